"""Prompts with images are answered as transformers' `generate` does, however they are scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_engine
import torch
import transformers as tf
from tiers import tiered
from tiny_adapters import peft_model, save_adapter
from tiny_engine import Generated, differences
from tiny_images import image_token, random_image, tiny_image_model
from tiny_models import Continuation, continue_greedily

from llmc.engine.messages import AddRequest
from llmc.engine.spec_decode.ngram import NgramSpeculation
from llmc.frontend.inputs import Input, InputProcessor
from llmc.lora_request import LoRARequest
from llmc.runner.images import RowImages
from llmc.sampling_params import SamplingParams
from llmc.speculative_config import SpeculativeConfig
from llmc.text.processor import load_processor
from llmc.text.tokenizer import Tokenizer

NUM_TOKENS = 10
SERVED = ("internvl", "qwen2_5_vl", "qwen3_vl", "gemma3")
# Compared in fewer schedules: in one batch, and in chunks.
MORE = (
    *("llava", "llava_next", "llava_onevision", "pixtral", "mistral3", "idefics3", "aya_vision"),
    *("qwen2_vl", "qwen3_5", "glm4v", "gemma4", "gemma4_small"),
)
# Text around images, 0 for each: first and last in a prompt, side by side, several, none at all.
LAYOUTS: tuple[tuple[Any, ...], ...] = (
    ("what is ", 0, " and where?"),
    (0, "the licence, or the work to which it is attached: "),
    ("compare ", 1, 2, " with ", 3, " in words that are easy"),
    ("no image at all, only terms and conditions",),
    ("look at ", 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    running: tiny_engine.Running
    inputs: list[Input]  # of LAYOUTS
    expected: tuple[Continuation, ...]

    @property
    def images(self) -> RowImages:
        found: Any = self.running.started.runner
        assert isinstance(found.images, RowImages)
        return found.images


@pytest.fixture(scope="module", params=tiered(SERVED, "qwen2_5_vl", "gemma3", group="{}"))
def subject(request: pytest.FixtureRequest) -> Subject:
    return _subject(request.param)


def _subject(family: str) -> Subject:
    path = tiny_image_model(family)
    running = tiny_engine.start(path, max_model_len=512, max_num_batched_tokens=512)
    prompts = [_prompt(layout, family) for layout in LAYOUTS]
    processor = InputProcessor(running.started.info, Tokenizer.load(path))
    greedy = SamplingParams(
        temperature=0.0, logprobs=0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=1
    )
    inputs = [processor.process(prompt, greedy) for prompt in prompts]
    model = tf.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    reference = load_processor(path)
    expected = [_continue(model, reference, prompt) for prompt in prompts]
    for mine, theirs in zip(inputs, expected, strict=True):
        assert tuple(mine.prompt_token_ids) == theirs.prompt
    return Subject(running=running, inputs=inputs, expected=tuple(expected))


def _prompt(layout: Sequence[Any], family: str) -> dict[str, Any]:
    images = [random_image(p, 24 + 16 * p, 40 - 4 * p) for p in layout if isinstance(p, int)]
    text = "".join(image_token(family) if isinstance(p, int) else p for p in layout)
    return {"prompt": text, "multi_modal_data": {"image": images}}


def _continue(model: Any, processor: Any, prompt: dict[str, Any]) -> Continuation:
    images = prompt["multi_modal_data"]["image"]
    given = processor(images=images or None, text=[prompt["prompt"]], return_tensors="pt")
    ids = tuple(given["input_ids"][0].tolist())
    if not images:
        return continue_greedily(model, ids, NUM_TOKENS)
    with torch.no_grad():
        out = model.generate(
            **given,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack(out.logits).float()[:, 0]
    tokens = out.sequences[0, len(ids) :]
    top = logits.topk(2).values
    return Continuation(
        prompt=ids,
        tokens=tuple(tokens.tolist()),
        logprobs=tuple(logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()),
        margins=tuple((top[:, 0] - top[:, 1]).tolist()),
    )


def _run(
    engine: Any,
    inputs: Sequence[Input],
    *,
    fork: bool = False,
    adapters: Sequence[LoRARequest | None] = (),
) -> list[Generated]:
    for i, source in enumerate(inputs):
        engine.add(
            AddRequest(
                request_id=str(i),
                prompt_token_ids=source.prompt_token_ids,
                sampling=source.sampling,
                images=source.images,
                fork_of="0" if fork and i else None,
                adapter=adapters[i] if adapters else None,
            )
        )
    out = tiny_engine.finish(engine)
    return [out[str(i)] for i in range(len(inputs))]


def _check(subject: Subject, engine: Any) -> Any:
    skipped, wrong = differences(subject.expected, _run(engine, subject.inputs))
    assert not wrong, "; ".join(wrong)
    assert skipped <= NUM_TOKENS, f"{skipped} positions were skipped as ties"
    return engine.stats()


def test_all_in_one_batch(subject: Subject) -> None:
    assert _check(subject, subject.running.engine()).num_steps == NUM_TOKENS


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("family", tiered(MORE, "gemma4_small"))
def test_more_classes(family: str) -> None:
    subject = _subject(family)
    images = subject.running.started.info.images
    assert images is not None
    _check(subject, subject.running.engine(max_num_batched_tokens=512))
    whole = 100 if images.most_rows else 7
    _check(subject, subject.running.engine(max_num_batched_tokens=whole))


def test_chunks_that_cut_images(subject: Subject) -> None:
    assert _check(subject, subject.running.engine(max_num_batched_tokens=5)).num_steps > 30


def test_prompts_are_scored_in_chunks(subject: Subject) -> None:
    """The tokens behind an image, whose positions differ from their places, among them."""
    info = subject.running.started.info.images
    if info is None or info.most_rows:
        pytest.skip("prompts with images are not scored, as these can't be cut")
    scores = []
    for num_tokens in (512, 5):
        engine = subject.running.engine(max_num_batched_tokens=num_tokens)
        found = {}
        for i, source in enumerate(subject.inputs):
            sampling = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
            ids, images = source.prompt_token_ids, source.images
            engine.add(
                AddRequest(
                    request_id=str(i), prompt_token_ids=ids, sampling=sampling, images=images
                )
            )
        while engine.has_work:
            for update in engine.step():
                found[update.request_id] = list(update.prompt_logprobs)
        scores.append([found[str(i)] for i in range(len(subject.inputs))])
    for source, whole, cut in zip(subject.inputs, *scores, strict=True):
        assert [one.token_id for one in cut] == list(source.prompt_token_ids[1:])
        assert [one.logprob for one in cut] == pytest.approx(
            [one.logprob for one in whole], abs=tiny_engine.LOGPROB_TOLERANCE
        )


def test_preemption(subject: Subject) -> None:
    """Prompts that fit into the pool together, and outgrow it."""
    if subject.running.started.engine.scheduler.layout.num_groups > 1:
        pytest.skip("layers with windows free their blocks, and never outgrow the pool")
    short = [0, 1, 4]
    tokens = sum(len(subject.expected[i].prompt) for i in short)
    num_blocks = tokens // tiny_engine.BLOCK_SIZE + 4
    engine = subject.running.engine(num_blocks=num_blocks, enable_prefix_caching=False)
    got = _run(engine, [subject.inputs[i] for i in short])
    skipped, wrong = differences([subject.expected[i] for i in short], got)
    assert not wrong and skipped <= NUM_TOKENS
    assert engine.stats().num_preemptions > 0


def test_few_blocks(subject: Subject) -> None:
    longest = max(len(e.prompt) for e in subject.expected) + NUM_TOKENS
    for tokens in (7, 16):
        _check(subject, subject.running.engine(tight_for=longest, max_num_batched_tokens=tokens))


def test_rows_are_made_again_where_the_cache_holds_none(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = subject.images
    images._cache.clear()
    images._used_bytes = 0
    monkeypatch.setattr(images, "_cache_bytes", 0)
    encode = _watched(images, monkeypatch)
    _check(subject, subject.running.engine(max_num_batched_tokens=5, enable_prefix_caching=False))
    assert images._used_bytes == 0
    # image 0 is in two prompts; chunks of one prompt use rows that stay with the request
    assert encode.call_count == 6


def _watched(images: Any, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the images that the tower encodes."""
    encode = Mock(wraps=images._tower.encode)
    monkeypatch.setattr(images._tower, "encode", encode)
    return encode


def test_prefix_cache(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = subject.running.engine()
    _run(engine, subject.inputs)
    encode = _watched(subject.images, monkeypatch)
    hits = engine.stats().prefix_cache_hits
    _check(subject, engine)
    assert engine.stats().prefix_cache_hits > hits + 100
    assert not encode.called


def test_another_image_shares_no_block(subject: Subject) -> None:
    """Prompts of the same tokens with other images have other keys from the image on."""
    engine = subject.running.engine()
    source = subject.inputs[0]
    [image] = source.images
    other = subject.inputs[4].images[0]
    changed = dataclasses.replace(image, digest=other.digest)
    _run(engine, [source])
    queries, hits = engine.stats().prefix_cache_queries, engine.stats().prefix_cache_hits
    _run(engine, [dataclasses.replace(source, images=(changed,))])
    after = engine.stats()
    assert after.prefix_cache_queries - queries == len(source.prompt_token_ids)
    size = tiny_engine.BLOCK_SIZE
    assert after.prefix_cache_hits - hits == image.spans[0][0] // size * size


def test_several_answers_of_one_prompt(subject: Subject) -> None:
    got = _run(subject.running.engine(), [subject.inputs[2]] * 3, fork=True)
    skipped, wrong = differences([subject.expected[2]] * 3, got)
    assert not wrong and skipped <= NUM_TOKENS


def test_draft_tokens(subject: Subject) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    _check(subject, subject.running.engine(speculation=NgramSpeculation(config)))


def test_answers_depend_on_the_image(subject: Subject) -> None:
    """Else all of the above could pass without any."""
    source = subject.inputs[0]
    [image] = source.images
    [plain] = _run(subject.running.engine(), [dataclasses.replace(source, images=())])
    [seen] = _run(subject.running.engine(), [source])
    assert image.num_rows > 0
    assert plain.logprobs[0] != pytest.approx(seen.logprobs[0], abs=1e-3)


def test_adapters(tmp_path: Path) -> None:
    """Of the text model, in steps with images and without."""
    family = "qwen2_5_vl"
    path = tiny_image_model(family)

    def load() -> Any:
        return tf.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    on = r".*language_model.*\.(q_proj|down_proj|embed_tokens)"
    adapter = save_adapter(load(), tmp_path / "adapter", r=4, target_modules=on)
    running = tiny_engine.start(path, max_model_len=256, enable_lora=True)
    processor = InputProcessor(running.started.info, Tokenizer.load(path))
    greedy = SamplingParams(temperature=0.0, logprobs=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [_prompt(LAYOUTS[i], family) for i in (0, 3)]
    inputs = [processor.process(prompt, greedy) for prompt in prompts] * 2
    adapters = [adapter, adapter, None, None]
    expected = []
    for one in (adapter, None):
        with peft_model(load(), one) as answering:
            expected += [_continue(answering, load_processor(path), p) for p in prompts]
    assert expected[0].logprobs != expected[2].logprobs
    engine = running.engine(adapters=running.started.engine._features.adapters)
    skipped, wrong = differences(expected, _run(engine, inputs, adapters=adapters))
    assert not wrong and skipped <= NUM_TOKENS
