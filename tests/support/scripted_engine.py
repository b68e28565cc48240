"""A real EngineCore on a runner with scripted replies, and a small tokenizer for it.

The "model's" output depends only on the prompt, so all runs agree: `SCRIPTS` maps a word of the
prompt to the reply; other prompts are answered with REPLY. After the reply comes the end token, and
then (with ignore_eos) the reply again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripted_runner import ScriptedRunner
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmc.config import EngineConfig
from llmc.engine.adapters import AdapterLoader
from llmc.engine.core import EngineCore
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import NewRow
from llmc.model_info import ModelInfo
from llmc.text.tokenizer import Tokenizer

REPLY = (
    "The quick brown fox says: h\u00e9llo w\u00f6rld \U0001f642 \u4f60\u597d, and jumps over it."
)
SCRIPTS = {
    "count": "one two three four five six seven eight nine ten",
    "control": "before\x00after\x07.",
    "emoji": "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d\u4e16\u754c" * 4,
}
EOS, BOS, TURN, END_TURN = "</s>", "<s>", "<|turn|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
VOCAB_WIDTH = 400  # of the logits: wider than the tokenizer, as padded checkpoints are


def make_hf_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, special_tokens: Sequence[str] = ()
) -> Any:
    """Byte-level BPE with few merges, so that characters are split into several tokens."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[BOS, EOS, TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(
        ["the quick brown fox says hello world one two three four"] * 4, trainer
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token=BOS, eos_token=EOS, chat_template=chat_template
    )
    hf.add_tokens(list(special_tokens), special_tokens=True)
    return hf


class TextRunner(ScriptedRunner):
    """Replies with the first of `scripts` whose word is in the prompt, otherwise with REPLY."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(self._reply)
        self._tokenizer = tokenizer
        self.scripts = dict(SCRIPTS)
        self.nan_word: str | None = None  # prompts with this word get NaN logits

    def _reply(self, new: NewRow, tokens: Sequence[int]) -> int | None:
        prompt = self._tokenizer.decode(tokens[: new.num_prompt_tokens], skip_special_tokens=False)
        if self.nan_word is not None and self.nan_word in prompt:
            return None
        reply = next((text for word, text in self.scripts.items() if word in prompt), REPLY)
        script = [*self._tokenizer.encode(reply), self._tokenizer.eos_token_id]
        return script[(len(tokens) - new.num_prompt_tokens) % len(script)]


def scripted_info(**changes: Any) -> ModelInfo:
    """The ModelInfo of a model that does not exist. Sizes that no test needs are 0."""
    info = ModelInfo(
        name="scripted",
        path=Path("scripted"),
        tokenizer_path=None,
        max_model_len=256,
        vocab_size=VOCAB_WIDTH,
        eos_token_ids=(1,),
        dtype="float32",
        device="cpu",
        num_blocks=64,
        block_size=16,
        pool_tokens=64 * 16,
        blocks_per_request=16,
        weight_bytes=0,
        kv_bytes_per_token=64,
        state_bytes_per_request=0,
        is_default=False,
        opt_level=0,
    )
    info = replace(info, **changes)
    if "pool_tokens" not in changes:
        info = replace(info, pool_tokens=info.num_blocks * info.block_size)
    return info


@dataclass(kw_only=True)
class Scripted:
    """A replacement for the result of start.start_engine, with access to its internals."""

    engine: EngineCore
    info: ModelInfo
    runner: TextRunner
    tokenizer: Tokenizer
    config: EngineConfig
    phases: list[Any] = field(default_factory=list)
    upgrade: Any = None

    def end_ranks(self) -> None:
        """Do nothing: there are no ranks."""

    def assert_idle(self) -> None:
        """Check that nothing of any request remains."""
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        self.engine.check()


def make_scripted(
    *,
    max_num_seqs: int = 4,
    max_num_queued: int | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    special_tokens: Sequence[str] = (),
    adapters: AdapterLoader | None = None,
    **info: Any,
) -> Scripted:
    tokenizer = Tokenizer(make_hf_tokenizer(chat_template, special_tokens))
    model = scripted_info(**info)
    runner = TextRunner(tokenizer)
    engine = EngineCore(
        runner,
        EngineLimits(
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        ),
        EngineFeatures(eos_token_ids=model.eos_token_ids, adapters=adapters),
    )
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_queued=max_num_queued,
        enable_lora=adapters is not None,
    )
    return Scripted(engine=engine, info=model, runner=runner, tokenizer=tokenizer, config=config)
