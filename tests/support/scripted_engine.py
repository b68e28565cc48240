"""A real EngineCore over a runner that says what the test wrote, and a small tokenizer for it.

What the "model" says depends on the prompt alone, so any two runs agree: `SCRIPTS` maps a word of
the prompt to the reply; other prompts are answered with REPLY. After the reply comes the end
token, and then (with ignore_eos) the reply again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pending import DoneStep, run_now
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.options import EngineFeatures, EngineLimits
from llmc.engine.plan import RowWork, StepPlan, StepResult, TokenLogprobs
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
    """Byte-level BPE with few merges, so that characters are split over tokens."""
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


class ScriptedRunner:
    """Says the script. Knobs make steps slow, rows bad, or the whole engine fail."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: dict[int, tuple[Any, list[int]]] = {}
        self.scripts = dict(SCRIPTS)
        self.delay_s = 0.0
        self.fail_next: Exception | None = None
        self.nan_word: str | None = None
        self.num_steps = 0
        self.max_in_flight = 2
        self.num_runtime_compiles = 0

    def use_idle_time(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> DoneStep:
        return run_now(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for row in plan.released_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._rows[new.row] = (new, list(new.token_ids))
        scores = [score for work in plan.work for score in self._scores(work)]
        drawn = [self._draw(work) for work in plan.work if work.sample]
        return StepResult(
            token_ids=[token for token, _ in drawn],
            logprobs=[logprob for _, logprob in drawn],
            scores=scores,
        )

    def _scores(self, work: RowWork) -> list[TokenLogprobs]:
        new, tokens = self._rows[work.row]
        follows = tokens[work.start + 1 : work.start + 1 + work.num_scored]
        return [_logprobs(token, new.sampling.prompt_logprobs) for token in follows]

    def _draw(self, work: RowWork) -> tuple[int | None, TokenLogprobs | None]:
        new, tokens = self._rows[work.row]
        if work.entered_token_ids:
            first = work.start + work.num_tokens - len(work.entered_token_ids)
            tokens[first:] = work.entered_token_ids
        prompt = self._tokenizer.decode(tokens[: new.num_prompt_tokens], skip_special_tokens=False)
        if self.nan_word is not None and self.nan_word in prompt:
            return None, None
        reply = next((text for word, text in self.scripts.items() if word in prompt), REPLY)
        script = [*self._tokenizer.encode(reply), self._tokenizer.eos_token_id]
        token = script[(len(tokens) - new.num_prompt_tokens) % len(script)]
        tokens.append(token)
        wanted = new.num_candidates or new.sampling.logprobs
        if wanted is None:
            return token, None
        return token, _logprobs(token, wanted)


def _logprobs(token: int, wanted: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token,
        logprob=-0.5,
        rank=1,
        top_token_ids=[(token + i) % 300 for i in range(wanted)],
        top_logprobs=[-0.5 - i for i in range(wanted)],
    )


@dataclass(frozen=True, kw_only=True)
class ScriptedInfo:
    """The fields of start.ModelInfo."""

    name: str = "scripted"
    path: Path = Path("scripted")
    tokenizer_path: Path | None = None
    max_model_len: int = 256
    vocab_size: int = VOCAB_WIDTH
    eos_token_ids: tuple[int, ...] = (1,)
    dtype: str = "float32"
    device: str = "cpu"
    num_blocks: int = 64
    block_size: int = 16
    blocks_per_request: int = 16
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    is_default: bool = False
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    extra_args: tuple[str, ...] = ()

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(kw_only=True)
class Scripted:
    """What start.start_engine returns, with handles on the inside."""

    engine: EngineCore
    info: ScriptedInfo
    runner: ScriptedRunner
    tokenizer: Tokenizer
    config: EngineConfig
    phases: list[Any] = field(default_factory=list)
    upgrade: Any = None

    def assert_idle(self) -> None:
        """Nothing of any request is left."""
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
    **info: Any,
) -> Scripted:
    tokenizer = Tokenizer(make_hf_tokenizer(chat_template, special_tokens))
    model = ScriptedInfo(**info)
    runner = ScriptedRunner(tokenizer)
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
        EngineFeatures(eos_token_ids=model.eos_token_ids),
    )
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_queued=max_num_queued)
    return Scripted(engine=engine, info=model, runner=runner, tokenizer=tokenizer, config=config)
