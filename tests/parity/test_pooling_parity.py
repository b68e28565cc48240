"""Vectors of tiny models are those of transformers: packed, in chunks, with a prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
import transformers as tf
from safetensors.torch import save_file
from tiers import tiered
from tiny_chat import tiny_chat_model
from tiny_models import load_reference, make_config, prompts, save_checkpoint

from llmc import LLM, PoolingParams
from llmc.config import EngineConfig
from llmc.engine.core import EngineCore
from llmc.engine.messages import AddRequest
from llmc.errors import CheckpointError, ConfigError, InvalidRequestError
from llmc.frontend.inputs import InputProcessor
from llmc.frontend.pooling import max_sim
from llmc.pooling import values_of
from llmc.startup.start import start_engine

LENGTHS = (5, 1, 37, 20, 64)
PROMPTS = prompts(LENGTHS)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "opt_level": 0,
    "max_model_len": 64,
    "kv_cache_memory": 1 << 20,
}


def vectors(engine: EngineCore, inputs: InputProcessor) -> list[torch.Tensor]:
    """Of all prompts, in one engine."""
    for i, prompt in enumerate(PROMPTS):
        source = inputs.pooled(list(prompt))
        ids, sampling = source.prompt_token_ids, source.sampling
        engine.add(AddRequest(request_id=str(i), prompt_token_ids=ids, sampling=sampling))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work:
        for update in engine.step():
            assert update.error is None and not update.new_token_ids
            found[update.request_id] = torch.tensor(values_of(update.vector))
    engine.check()
    assert engine.stats().num_generated_tokens == 0
    return [found[str(i)] for i in range(len(PROMPTS))]


def hidden(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    """[T, N], of the last layer and its norm."""
    with torch.no_grad():
        out = model.base_model(input_ids=torch.tensor([prompt]), use_cache=False)
    states: torch.Tensor = out.last_hidden_state[0]
    return states


def pooled(states: torch.Tensor, method: str) -> torch.Tensor:
    weight = torch.arange(1, len(states) + 1)[:, None].float()
    return {
        "last": states[-1],
        "mean": states.mean(0),
        "weightedmean": (states * weight).sum(0) / weight.sum(),
        "mean_sqrt_len": states.sum(0) / len(states) ** 0.5,
        "max": states.amax(0),
    }[method]


# attention with and without windows, experts; tests/passes/test_pool.py has every method
CASES = [
    ("qwen3", "last"),
    ("qwen3", "mean"),
    ("gemma3", "weightedmean"),
    ("gemma3", "max"),
    ("gpt_oss", "last"),
]


@pytest.mark.parametrize(
    ("family", "method"),
    tiered(CASES, ("qwen3", "mean"), ("gemma3", "weightedmean"), ("gpt_oss", "last")),
)
def test_embeddings(family: str, method: str, tmp_path: Path) -> None:
    path = save_checkpoint(family, tmp_path / "model")
    running = tiny_engine.start(path, task="embed", pooling=method)
    inputs, model = InputProcessor(running.started.info, None), load_reference(path)
    want = [pooled(hidden(model, prompt), method) for prompt in PROMPTS]
    for step_tokens in (256, 7):
        engine = running.engine(max_num_batched_tokens=step_tokens)
        for _ in range(2):  # again with what the prefix cache has, if it is on
            torch.testing.assert_close(vectors(engine, inputs), want, rtol=1e-4, atol=1e-5)
        assert (engine.stats().prefix_cache_hits > 0) == (method == "last")


# plain attention; windows, sinks and experts
TOKEN_CASES = [("qwen3", "token_embed"), ("gpt_oss", "token_classify")]


@pytest.mark.parametrize(("family", "task"), TOKEN_CASES)
def test_vectors_of_tokens(family: str, task: str, tmp_path: Path) -> None:
    model: Any
    if task == "token_embed":
        path = save_checkpoint(family, tmp_path / "model")
        model = load_reference(path)
        want = [hidden(model, prompt) for prompt in PROMPTS]
    else:
        path = tmp_path
        model = save_classifier(path, 12, family, tf.AutoModelForTokenClassification)
        with torch.no_grad():
            want = [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    running = tiny_engine.start(path, task=task)
    inputs = InputProcessor(running.started.info, None)
    info = inputs.need_pooling()
    assert info.task == task and info.size == want[0].shape[1]
    for step_tokens in (256, 7):
        engine = running.engine(max_num_batched_tokens=step_tokens)
        for _ in range(2):  # a cached prefix has no vectors
            found = [rows.view(-1, info.size) for rows in vectors(engine, inputs)]
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def save_classifier(
    path: Path,
    labels: int,
    family: str = "llama",
    maker: Any = tf.AutoModelForSequenceClassification,
    **fields: Any,
) -> Any:
    config = make_config(family, vocab_size=800, num_labels=labels, **fields)
    torch.manual_seed(0)
    model = maker.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    for file in tiny_chat_model().glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return model


def test_a_classifier(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, 3, id2label={0: "no", 1: "maybe", 2: "yes"})
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        for prompt, output in zip(
            PROMPTS, llm.classify(list(map(list, PROMPTS)), use_tqdm=False), strict=True
        ):
            want = model(input_ids=torch.tensor([prompt])).logits[0]
            assert output.outputs is not None
            torch.testing.assert_close(torch.tensor(output.outputs.probs), want.softmax(-1))
            assert output.outputs.label == ("no", "maybe", "yes")[int(want.argmax())]
        (raw,) = llm.encode([1, 2, 3])
        want = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0]
        assert raw.outputs is not None
        torch.testing.assert_close(torch.tensor(raw.outputs.data), want)
        for call in (llm.generate, llm.embed):
            with pytest.raises(InvalidRequestError, match="is served for classif|it is a classif"):
                call([1, 2])
        with pytest.raises(InvalidRequestError, match="has 3 labels"):
            llm.score("a", "b")


def test_a_classifier_of_one_label_scores_pairs(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, 1)
    texts = ["Licensed under the Apache License", "the weather", "terms and conditions"]
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        found = [one.outputs.score for one in llm.score("a license", texts) if one.outputs]
        want = []
        for text in texts:
            ids = tokenizer("a license", text, return_tensors="pt").input_ids
            want.append(float(model(input_ids=ids).logits.sigmoid()))
        assert found == pytest.approx(want, rel=1e-4)
        assert len(set(found)) == 3
    with LLM(str(tmp_path), task="reward", **OPTIONS) as llm, torch.no_grad():
        (raw,) = llm.classify([[1, 2, 3]])
        logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0]
        assert raw.outputs is not None and raw.outputs.probs == pytest.approx(logits.tolist())


def test_a_classifier_of_tokens(tmp_path: Path) -> None:
    names = [f"B-{i}" for i in range(12)]
    model = save_classifier(
        tmp_path, 12, maker=tf.AutoModelForTokenClassification, id2label=dict(enumerate(names))
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = dict(sorted(config["id2label"].items()))  # as texts: "1", "10", "11", "2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [list(prompt) for prompt in PROMPTS]
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        assert llm.info.pooling is not None and list(llm.info.pooling.labels) == names
        raw = llm.encode(prompts, use_tqdm=False)
        params = PoolingParams(use_activation=False)
        also_raw = llm.encode(prompts, params, pooling_task="token_classify", use_tqdm=False)
        scores = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
        for prompt, *found in zip(prompts, raw, also_raw, scores, strict=True):
            want = model(input_ids=torch.tensor([prompt])).logits[0]
            for output, wanted in zip(found, (want, want, want.softmax(-1)), strict=True):
                assert output.outputs is not None and output.prompt_token_ids == prompt
                torch.testing.assert_close(torch.tensor(output.outputs.data), wanted)
        served = r"is served for classification of tokens \(/pooling, LLM.encode\)"
        for call in (llm.generate, llm.embed, llm.classify):
            with pytest.raises(InvalidRequestError, match=served):
                call([1, 2])
        with pytest.raises(InvalidRequestError, match="not for 'token_embed'"):
            llm.encode([1, 2], pooling_task="token_embed")
        with pytest.raises(InvalidRequestError, match=served):
            llm.score("a", "b")
    with pytest.raises(ConfigError, match=r"\.\.\.ForSequenceClassification in config.json"):
        start_engine(EngineConfig(model=str(tmp_path), task="classify", **OPTIONS))


def as_sentence_transformer(path: Path, method: str, *, dense: bool) -> torch.nn.Linear | None:
    """Makes a model's directory one of sentence-transformers."""
    names = ["", "1_Pooling", "2_Dense", "3_Normalize"]
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": n, "type": f"sentence_transformers.models.{k}"}
        for i, (n, k) in enumerate(zip(names, kinds, strict=True))
        if dense or k != "Dense"
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    (path / "1_Pooling").mkdir()
    stated = {"word_embedding_dimension": 32, method: True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    if not dense:
        return None
    (path / "2_Dense").mkdir()
    linear = torch.nn.Linear(32, 20)
    tensors = {f"linear.{name}": value for name, value in linear.state_dict().items()}
    save_file(tensors, path / "2_Dense" / "model.safetensors")
    activation = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": 32, "out_features": 20, "bias": True}
    described = {**sizes, "activation_function": activation}
    (path / "2_Dense" / "config.json").write_text(json.dumps(described))
    return linear


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any]]:
    path = save_checkpoint("qwen3", tmp_path_factory.mktemp("st") / "model", vocab_size=800)
    for file in tiny_chat_model().glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    linear = as_sentence_transformer(path, "pooling_mode_mean_tokens", dense=True)
    with LLM(str(path), **{**OPTIONS, "max_model_len": None}) as llm:
        yield llm, load_reference(path), linear


def test_a_directory_of_sentence_transformers(sentences: tuple[LLM, Any, Any]) -> None:
    llm, model, linear = sentences
    info = llm.info.pooling
    assert info is not None and (info.task, info.method, info.size) == ("embed", "mean", 20)
    assert info.normalize and llm.info.max_model_len == 48
    texts = ["Licensed under the Apache License", "You may obtain a copy"]
    tokenizer = llm.get_tokenizer()
    want = []
    for text in texts:
        states = hidden(model, tuple(tokenizer(text).input_ids))
        with torch.no_grad():
            want.append(linear(states.mean(0)))
    whole = torch.nn.functional.normalize(torch.stack(want))
    cut = torch.nn.functional.normalize(torch.stack(want)[:, :8])
    for dimensions, expected in ((None, whole), (8, cut)):
        found = [o.outputs.embedding for o in llm.embed(texts, dimensions=dimensions) if o.outputs]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)
    (score,) = llm.score(*texts)
    assert score.outputs is not None
    assert score.outputs.score == pytest.approx(float(whole[0] @ whole[1]), rel=1e-4)
    raw = llm.embed(texts[0], PoolingParams(use_activation=False))[0].outputs
    assert raw is not None
    torch.testing.assert_close(torch.tensor(raw.embedding), want[0], rtol=1e-4, atol=1e-5)


def test_a_directory_of_late_interaction(tmp_path: Path) -> None:
    """Of PyLate: no pooling, and a Dense module over each token's hidden state. In a directory with
    a pooling, what follows it is for what it makes."""
    path = save_checkpoint("qwen3", tmp_path / "model")
    linear = as_sentence_transformer(path, "pooling_mode_mean_tokens", dense=True)
    assert linear is not None
    model, prompt = load_reference(path), PROMPTS[3]
    with LLM(str(path), task="token_embed", **OPTIONS) as llm:
        (output,) = llm.encode(list(prompt), pooling_task="token_embed", use_tqdm=False)
        assert output.outputs is not None
        want = torch.nn.functional.normalize(hidden(model, prompt))
        torch.testing.assert_close(torch.tensor(output.outputs.data), want, rtol=1e-4, atol=1e-5)
        rows = torch.nn.functional.normalize(hidden(model, prompt))
        other = torch.nn.functional.normalize(hidden(model, PROMPTS[1]))
        score = max_sim(rows.numpy(), other.numpy())
        assert score == pytest.approx(float((rows @ other.T).amax(1).sum()), rel=1e-5)
        assert score != pytest.approx(max_sim(other.numpy(), rows.numpy()))
    modules = json.loads((path / "modules.json").read_text())
    modules = [one for one in modules if one["path"] in ("", "2_Dense")]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (path / "modules.json").write_text(json.dumps(modules))
    with LLM(str(path), **OPTIONS) as llm, torch.no_grad():
        assert llm.info.pooling is not None and llm.info.pooling.task == "token_embed"
        params = PoolingParams(dimensions=8)
        (output,) = llm.encode(list(prompt), params, pooling_task="token_embed", use_tqdm=False)
        assert output.outputs is not None
        want = torch.nn.functional.normalize(linear(hidden(model, prompt))[:, :8])
        torch.testing.assert_close(torch.tensor(output.outputs.data), want, rtol=1e-4, atol=1e-5)
    dense = json.loads((path / "2_Dense" / "config.json").read_text())
    (path / "2_Dense" / "config.json").write_text(json.dumps({**dense, "use_residual": True}))
    with pytest.raises(CheckpointError, match="use_residual True"):
        start_engine(EngineConfig(model=str(path), **OPTIONS))


def test_long_texts_are_refused_or_cut(sentences: tuple[LLM, Any, Any]) -> None:
    llm, *_ = sentences
    text = "license " * 60
    cut = llm.embed(text, truncate_prompt_tokens=-1)[0]
    own = tf.AutoTokenizer.from_pretrained(llm.info.path)  # truncation stays with a tokenizer
    ids = own(text, truncation=True, max_length=48).input_ids
    assert cut.prompt_token_ids == ids and len(ids) == 48
    good, bad = llm.embed(["short", text])
    assert good.error is None and bad.outputs is None
    assert bad.error is not None and "maximum context length is 48 tokens" in bad.error
    for wrong in ({"dimensions": 0}, {"dimensions": 21}, {"truncate_prompt_tokens": 49}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            llm.embed("short", **wrong)  # type: ignore[arg-type]
    for texts in (["a", "b"], []):
        with pytest.raises(InvalidRequestError, match="can't be scored"):
            llm.score(texts, ["a", "b", "c"])
    with pytest.raises(InvalidRequestError, match="served for embeddings"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_what_can_not_be_served_is_refused_by_name(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model")

    def refused(error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            start_engine(EngineConfig(model=str(path), **{**OPTIONS, **options}))

    refused(ConfigError, "unknown task 'transcribe'", task="transcribe")
    refused(ConfigError, "needs a classifier's checkpoint", task="classify")
    refused(ConfigError, "ForTokenClassification in config.json", task="token_classify")
    refused(ConfigError, "pooling 'mean' is for task 'embed'", task="token_embed", pooling="mean")
    refused(ConfigError, "pooling and normalize are for", pooling="mean")
    refused(ConfigError, "enable_lora is for models that gen", task="embed", enable_lora=True)
    as_sentence_transformer(path, "pooling_mode_max_tokens", dense=False)
    both = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(both))
    refused(CheckpointError, "sets mean and max pooling")
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls", "lasttoken"]}')
    refused(CheckpointError, "sets cls and lasttoken pooling")
    (path / "modules.json").write_text('[{"type": "own.Transformer", "path": ""}]')
    refused(CheckpointError, "has a module own.Transformer")
    (path / "modules.json").write_text('[{"type": "x.Transformer", "path": "../x"}]')
    refused(CheckpointError, "outside the model's folder")
    (path / "modules.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    refused(ConfigError, "is an encoder", task="generate")


def test_a_model_that_generates_says_how_to_embed(tmp_path: Path) -> None:
    path = save_checkpoint("llama", tmp_path / "model")
    with LLM(str(path), **OPTIONS) as llm:
        for call in (llm.embed, llm.encode, llm.classify):
            with pytest.raises(InvalidRequestError, match="--task embed"):
                call([1, 2])
        with pytest.raises(InvalidRequestError, match="--task embed"):
            llm.score("a", "b")
