"""Tokenizers of directories with a tekken.json and no tokenizer.json.

transformers converts the vocabulary, but without the special tokens' names and without the BOS that
the vendor's package writes before a text. With that package installed, AutoTokenizer returns a
wrapper of it, which can save itself in the usual format, with a chat template.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

# The same in every file, and not written in it.
_SPECIAL: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


def is_tekken_alone(folder: Path) -> bool:
    return (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file()


def load_tekken(folder: Path, loaded: Any) -> Any:
    """The tokenizer of a folder for which AutoTokenizer returned `loaded`."""
    from transformers import PreTrainedTokenizerFast

    if isinstance(loaded, PreTrainedTokenizerFast):
        hf = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True, **_SPECIAL)
    else:
        with tempfile.TemporaryDirectory() as converted:
            loaded.save_pretrained(converted, save_format="hf")
            hf = PreTrainedTokenizerFast.from_pretrained(converted, local_files_only=True)
    _write_bos(hf)
    return hf


def _write_bos(hf: Any) -> None:
    from tokenizers.processors import Sequence, TemplateProcessing

    backend, bos = hf.backend_tokenizer, hf.bos_token
    before = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, hf.bos_token_id)],
    )
    backend.post_processor = Sequence([backend.post_processor, before])
