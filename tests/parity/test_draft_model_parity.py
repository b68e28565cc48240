"""A draft model on real runners: what comes out is what comes out without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import tiny_engine
import tiny_models
import torch
from oracle import AlwaysOn
from speculation_cases import LIMITS, NUM_TOKENS, PROMPTS, SAMPLING

from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.engine.options import EngineLimits
from llmc.engine.spec_decode.draft_model import DraftModel, DraftModelSpeculation
from llmc.errors import ConfigError
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.startup.compile import CompiledModel
from llmc.startup.draft_model import load_draft, resolve_draft
from llmc.startup.resolve import ModelSource, resolve
from llmc.startup.start import start_engine


def drafting(path: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(path)}


def near(path: Path, where: Path, noise: float = 0.25) -> Path:
    """A checkpoint whose weights are nearly those of another: it is often right."""
    weights = safetensors.torch.load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for weight in weights.values():
        if weight.dim() > 1:
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    where.mkdir()
    (where / "config.json").write_text((path / "config.json").read_text())
    safetensors.torch.save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
    return where


def eager(running: tiny_engine.Running) -> DraftModelSpeculation:
    """A new one around the draft model's runner, which drafts from the first step on."""
    old = running.started.engine.scheduler.speculation
    assert isinstance(old, DraftModelSpeculation)
    info = running.started.info
    limits = EngineLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=tiny_engine.MAX_ROWS,
        max_num_batched_tokens=64,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
    )
    model = DraftModel(old.model.runner, limits, target_vocab_size=info.vocab_size)
    config = SpeculativeConfig(method="draft_model", model="draft")
    return DraftModelSpeculation(config, model, AlwaysOn())


def is_empty(engine: EngineCore) -> bool:
    """Nothing is left in either cache."""
    speculation = engine.scheduler.speculation
    assert isinstance(speculation, DraftModelSpeculation)
    engine.check()
    pools = (engine.scheduler.pool, speculation.model.pool)
    return all(pool.num_free == pool.num_blocks for pool in pools)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("draft")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return tiny_models.save_checkpoint("llama", folder / "target")


@pytest.fixture(scope="module", params=["near", "same"])
def running(request: pytest.FixtureRequest, folder: Path, target: Path) -> tiny_engine.Running:
    draft = target if request.param == "same" else near(target, folder / "near")
    return tiny_engine.start(target, speculative_config=drafting(draft), async_scheduling=True)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_answers_are_those_without_speculation(
    running: tiny_engine.Running,
    request: pytest.FixtureRequest,
    limits: dict[str, int],
    sampling: dict[str, Any],
) -> None:
    want = tiny_engine.generate(running.engine(), PROMPTS, NUM_TOKENS, **sampling)
    engine = running.engine(speculation=eager(running), **limits)
    got = tiny_engine.generate(engine, PROMPTS, NUM_TOKENS, **sampling)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=tiny_engine.LOGPROB_TOLERANCE)
    stats = engine.stats()
    assert stats.num_generated_tokens == sum(len(one.tokens) for one in want)
    assert is_empty(engine)
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    if "same" in request.node.callspec.id:  # it draws with the same noise
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    else:
        assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("running", ["near"], indirect=True)
def test_aborts_leave_nothing_behind(running: tiny_engine.Running) -> None:
    engine = running.engine(speculation=eager(running), num_blocks=20)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add(
            AddRequest(request_id=str(index), prompt_token_ids=list(prompt), sampling=sampling)
        )
    for step in range(12):
        engine.step()
        if step % 3 == 2:
            engine.abort(str(step // 3))
    tiny_engine.finish(engine)
    assert is_empty(engine)


@pytest.mark.parametrize("running", ["near"], indirect=True)
def test_a_draft_model_that_fails_takes_no_request_down(
    running: tiny_engine.Running,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    want = tiny_engine.generate(running.engine(), PROMPTS, NUM_TOKENS)
    speculation = eager(running)
    engine = running.engine(speculation=speculation)
    left = 6
    runner: Any = speculation.model.runner
    launch = runner.launch

    def failing(plan: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("no memory left")
        return launch(plan)

    monkeypatch.setattr(runner, "launch", failing)
    got = tiny_engine.generate(engine, PROMPTS, NUM_TOKENS)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    assert engine.stats().num_draft_tokens > 0 and engine.stats().num_failed_steps == 0
    assert "no memory left" in caplog.text and "switching it off" in caplog.text
    assert is_empty(engine)


# ---- the distribution ----

ALLOWED = list(range(20, 28))
PROMPT = (3, 1, 4, 1, 5)
NUM_ANSWERS = 800
LIMIT = 35.0  # chi-square of 7 degrees of freedom is above it once in 90,000 times


@pytest.mark.parametrize("running", ["near"], indirect=True)
def test_drawn_tokens_have_the_probabilities_of_the_target(
    running: tiny_engine.Running, target: Path
) -> None:
    engine = running.engine(speculation=eager(running))
    for seed in range(NUM_ANSWERS):
        sampling = SamplingParams(
            seed=seed, max_tokens=3, ignore_eos=True, allowed_token_ids=ALLOWED
        )
        engine.add(
            AddRequest(request_id=str(seed), prompt_token_ids=list(PROMPT), sampling=sampling)
        )
    answers = tiny_engine.finish(engine).values()
    stats = engine.stats()
    assert NUM_ANSWERS / 4 < stats.num_accepted_tokens < 0.95 * stats.num_draft_tokens
    # The second token can be a draft token; the third follows one, accepted or not, or none.
    for place, expected in enumerate(chances(target), start=1):
        counts = Counter(answer.tokens[place] for answer in answers)
        wanted = {t: NUM_ANSWERS * p for t, p in zip(ALLOWED, expected.tolist(), strict=True)}
        assert min(wanted.values()) > 5
        assert sum((counts[t] - w) ** 2 / w for t, w in wanted.items()) < LIMIT


def chances(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the allowed tokens at the second and the third place, by transformers."""
    model = tiny_models.load_reference(path)
    allowed = torch.tensor(ALLOWED)

    def after(texts: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(model(texts).logits[:, -1, allowed].double(), -1)

    def longer(texts: torch.Tensor) -> torch.Tensor:
        tokens = allowed.repeat(len(texts))[:, None]
        return torch.cat([texts.repeat_interleave(len(allowed), 0), tokens], 1)

    one = torch.tensor([PROMPT])
    two = longer(one)
    pairs = after(one).reshape(-1, 1) * after(two)
    triples = pairs.reshape(-1, 1) * after(longer(two))
    return pairs.sum(0), triples.sum(0)


# ---- which models go together ----


def source(path: Path, draft: Path) -> ModelSource:
    """What is known of a model before anything is compiled."""
    config = EngineConfig(model=str(path), device="cpu", speculative_config=drafting(draft))  # type: ignore[arg-type]
    return resolve(config, torch.device("cpu"))


def test_another_vocabulary_is_refused(folder: Path, target: Path) -> None:
    other = tiny_models.save_checkpoint("llama", folder / "wider", vocab_size=123)
    with pytest.raises(ConfigError, match="vocabulary from 'target': 123 token ids instea"):
        start_engine(source(target, other).config)


def test_tokenizers_that_differ_are_refused_but_widths_may_differ(folder: Path) -> None:
    """A vocabulary may be padded to other widths; its tokens must be the same."""
    words = {f"w{i}": i for i in range(100)}
    target = tiny_models.save_checkpoint("llama", folder / "words", vocab_size=112)
    same = tiny_models.save_checkpoint("llama", folder / "narrow", vocab_size=104)
    swapped = tiny_models.save_checkpoint("llama", folder / "swapped", vocab_size=112)
    save_tokenizer(target, words)
    save_tokenizer(same, words)
    save_tokenizer(swapped, {**words, "w5": 6, "w6": 5})
    found = resolve_draft(source(target, same))
    assert found is not None and found.files.name == "narrow"
    with pytest.raises(
        ConfigError, match="2 tokens that differ, the first being 5: 'w6' instead of 'w5'"
    ):
        resolve_draft(source(target, swapped))


def save_tokenizer(path: Path, tokens: Mapping[str, int]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(tokens), unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def test_recurrent_layers_are_refused(target: Path) -> None:
    program: Any = SimpleNamespace(states=("a state",))
    compiled = CompiledModel(source=source(target, target), program=program, key="", built=None)
    with pytest.raises(ConfigError, match="'target' has recurrent layers"):
        load_draft(compiled, compiled, program)
