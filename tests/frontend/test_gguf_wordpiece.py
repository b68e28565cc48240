"""WordPiece vocabularies of GGUF files give the ids of the tokenizer that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmc.text.gguf_tokenizer import write_tokenizer
from llmc.text.tokenizer import Tokenizer
from llmc.weights.gguf.reader import read_header

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "The quick Brown fox, again and again.",
    "Caf\u00e9 na\u00efve r\u00e9sum\u00e9 \u00c5\u00c4\u00d6 Stra\u00dfe",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u4e2d\u6587",
    "emoji \U0001f600\U0001f603 flags",
    "tabs\tand\nlines \u00a0 wide \u3000 spaces",
    "\x00\x01 control \x7f \u200b\ufeff",
    "a" * 120 + " internationalization",
    "[MASK] in [CLS] text [SEP] [unused0] [other]",
    "x = foo(bar, 1234); // code_name ##ing \u2581mark",
    "",
    "   ",
]


def trained(lowercase: bool) -> RustTokenizer:
    made = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([*TEXTS, "plays playing played player again"] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def written(made: RustTokenizer, path: Path) -> Path:
    """As llama.cpp's converter does: pieces that begin a word are marked."""
    names = [made.id_to_token(i) for i in range(made.get_vocab_size())]
    special = [name in SPECIAL for name in names]
    tokens = [
        name if known else name[2:] if name.startswith("##") else f"\u2581{name}"
        for name, known in zip(names, special, strict=True)
    ]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if known else 1 for known in special])
    for add, i in (
        (writer.add_bos_token_id, 2), (writer.add_unk_token_id, 1), (writer.add_sep_token_id, 3),
        (writer.add_pad_token_id, 0), (writer.add_mask_token_id, 4),
    ):  # fmt: skip
        add(i)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("lowercase", [True, False])
def test_ids_are_those_of_the_original(lowercase: bool, tmp_path: Path) -> None:
    made = trained(lowercase)
    metadata: dict[str, Any] = dict(read_header(written(made, tmp_path / "a.gguf")).metadata)
    assert write_tokenizer(metadata, tmp_path)
    (tmp_path / "gguf.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    for text in TEXTS:
        want = made.encode(text).ids
        assert tokenizer.encode(text) == want, text
        assert tokenizer.decode(want) == made.decode(want), text
