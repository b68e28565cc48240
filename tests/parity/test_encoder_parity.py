"""Vectors and scores of tiny encoders are those of transformers, many texts in one engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from tiers import tiered
from tiny_models import make_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from llmc import LLM
from llmc.config import EngineConfig
from llmc.errors import CheckpointError, CompileError, ConfigError, InvalidRequestError
from llmc.startup.config_facts import is_encoder
from llmc.startup.start import start_engine

VOCAB = 200
LENGTHS = (5, 1, 37, 20, 60)
OPTIONS: dict[str, Any] = {"dtype": "float32", "opt_level": 0, "max_num_seqs": 3}
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
# learned positions from 0 and from behind padding, rotary ones, windows, shared layers, positions
# of its own; and attention with biases, which is computed one text at a time
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"type_vocab_size": 1, "max_position_embeddings": 66},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 3},
    "nomic_bert": {},
    "albert": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "megatron-bert": {},
    "mpnet": {"max_position_embeddings": 66},
}
ONE_TEXT = {"mpnet"}


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def save(config: Any, path: Path, maker: Any = tf.AutoModel) -> Any:
    torch.manual_seed(0)
    model = maker.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model


def config_of(family: str, **fields: Any) -> Any:
    return tf.AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **fields})


def hidden(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        states: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def vectors(llm: LLM, prompts: list[list[int]]) -> Tensor:
    found = [o.outputs.data for o in llm.encode(prompts, use_tqdm=False) if o.outputs is not None]
    assert len(found) == len(prompts)
    return torch.tensor(found)


ORDINARY = ("bert", "modernbert", "mpnet")


@pytest.mark.parametrize("family", tiered(FAMILIES, *ORDINARY))
def test_embeddings(family: str, tmp_path: Path) -> None:
    model = save(config_of(family), tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        info = llm.info.pooling
        assert info is not None and (info.task, info.method) == ("embed", "mean")
        assert llm.info.max_model_len == 64 and llm.info.kv_bytes_per_token == 0
        want = torch.stack([hidden(model, ids).mean(0) for ids in texts()])
        torch.testing.assert_close(vectors(llm, texts()), want, rtol=1e-4, atol=1e-5)
        reports = [r for r in llm.info.pass_reports if r.startswith("find_attention")]
        assert ("one at a time" in reports[0]) == (family in ONE_TEXT)


def test_a_text_as_long_as_the_context_is_one_step(tmp_path: Path) -> None:
    """Beyond the tokens of a step that were asked for: they can't be cut."""
    model = save(config_of("bert"), tmp_path)
    with LLM(str(tmp_path), pooling="cls", max_num_batched_tokens=16, **OPTIONS) as llm:
        prompts = [[*range(5, 69)], [7, 8, 9], [*range(100, 164)]]
        want = torch.stack([hidden(model, ids)[0] for ids in prompts])
        torch.testing.assert_close(vectors(llm, prompts), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_decoders_that_were_made_encoders(name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"is_causal": False}
    if name == "gemma3":
        fields = {"use_bidirectional_attention": True, "sliding_window": 10}
    model = save(make_config(name, **fields), tmp_path, tf.AutoModelForCausalLM)
    prompts = [[i % 90 for i in ids] for ids in texts()]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        want = torch.stack([hidden(model.base_model, ids).mean(0) for ids in prompts])
        torch.testing.assert_close(vectors(llm, prompts), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "fields"),
    tiered(
        [
            ("bert", {}),
            ("xlm-roberta", {}),
            ("albert", {}),
            ("modernbert", {"classifier_pooling": "mean"}),
            ("distilbert", {}),
            ("mpnet", {}),
        ],
        ("bert", {}),
        ("modernbert", {"classifier_pooling": "mean"}),
    ),
)
def test_classifiers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(family, num_labels=3, **fields)
    model = save(config, tmp_path, tf.AutoModelForSequenceClassification)
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        want = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts()])
        torch.testing.assert_close(vectors(llm, texts()), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", tiered(["bert", "modernbert", "mpnet"], "bert", "mpnet"))
def test_classifiers_of_tokens(family: str, tmp_path: Path) -> None:
    """Many in a step, whatever `max_num_batched_tokens` says: a text can't be cut."""
    model = save(config_of(family, num_labels=3), tmp_path, tf.AutoModelForTokenClassification)
    with LLM(str(tmp_path), max_num_batched_tokens=16, **OPTIONS) as llm, torch.no_grad():
        outputs = llm.encode(texts(), pooling_task="token_classify", use_tqdm=False)
        for ids, output in zip(texts(), outputs, strict=True):
            want = model(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
            assert output.outputs is not None
            found = torch.tensor(output.outputs.data)
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_classifier_that_pools_its_scores(tmp_path: Path) -> None:
    config = tf.AutoConfig.for_model("eurobert", num_labels=2, head_dim=8, **_SIZES)
    assert config.classifier_pooling == "late"
    model = save(config, tmp_path, tf.AutoModelForSequenceClassification)
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        want = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in texts()])
        torch.testing.assert_close(vectors(llm, texts()), want, rtol=1e-4, atol=1e-5)


# fmt: off
WORDS = [
    "the", "a", "license", "weather", "is", "under", "sun", "shines", "rain",
    "falls", "apache",
]
# fmt: on


def add_tokenizer(path: Path) -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: i for i, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{k}_token": v for k, v in names.items()},
    )
    tokenizer.save_pretrained(path)
    return tokenizer


def test_a_cross_encoder_tells_the_texts_of_a_pair_apart(tmp_path: Path) -> None:
    config = config_of("bert", num_labels=1, pad_token_id=0)
    model = save(config, tmp_path, tf.AutoModelForSequenceClassification)
    tokenizer = add_tokenizer(tmp_path)
    question, documents = "the license", ["the weather is the sun", "apache", "rain falls"]

    def score(document: str, *, types: bool = True) -> float:
        given = tokenizer(question, document, return_tensors="pt")
        assert 1 in given["token_type_ids"]
        if not types:
            del given["token_type_ids"]
        with torch.no_grad():
            return float(model(**given).logits.sigmoid())

    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.info.pooling is not None and llm.info.pooling.token_types
        found = [o.outputs.score for o in llm.score(question, documents) if o.outputs]
        assert found == pytest.approx([score(d) for d in documents], rel=1e-4)
        assert found != pytest.approx([score(d, types=False) for d in documents], rel=1e-3)
        (cut,) = llm.score(question, "rain " * 100, truncate_prompt_tokens=-1)
        assert cut.outputs is not None and 0 < cut.outputs.score < 1
        with pytest.raises(InvalidRequestError, match="maximum context length is 64 tokens"):
            llm.score(question, "rain " * 100)
    # as older directories of sentence-transformers state it
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["sbert_ce_default_activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = [o.outputs.score for o in llm.score(question, documents) if o.outputs]
        want = torch.logit(torch.tensor([score(d) for d in documents])).tolist()
        assert found == pytest.approx(want, rel=1e-3, abs=1e-5)


def test_a_directory_of_sentence_transformers(tmp_path: Path) -> None:
    """With a Dense module and tanh behind the first token's pooling."""
    model = save(config_of("bert", pad_token_id=0), tmp_path)
    tokenizer = add_tokenizer(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": kind}
        for i, kind in enumerate(kinds)
    ]
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type']}"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name, stated in (
        ("1_Pooling", {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}),
        (
            "2_Dense",
            {
                "in_features": 32,
                "out_features": 12,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
    dense = torch.nn.Linear(32, 12)
    tensors = {f"linear.{name}": value for name, value in dense.state_dict().items()}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    said = ["the sun shines", "a license is under apache", "rain"]
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        want = torch.stack([hidden(model, tokenizer(text).input_ids)[0] for text in said])
        want = torch.nn.functional.normalize(torch.tanh(dense(want)))
        found = [o.outputs.embedding for o in llm.embed(said, use_tqdm=False) if o.outputs]
        torch.testing.assert_close(torch.tensor(found), want, rtol=1e-4, atol=1e-5)


def test_weights_of_a_model_that_fills_in_words(tmp_path: Path) -> None:
    """Its names have a prefix, and its head stays unread."""
    model = save(config_of("bert"), tmp_path, tf.AutoModelForMaskedLM)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        want = torch.stack([hidden(model.bert, ids).mean(0) for ids in texts()])
        torch.testing.assert_close(vectors(llm, texts()), want, rtol=1e-4, atol=1e-5)
        with pytest.raises(InvalidRequestError, match="served for embeddings"):
            llm.generate([5, 6])


def test_what_is_refused(tmp_path: Path) -> None:
    save(config_of("bert"), tmp_path / "bert")
    with pytest.raises(ConfigError, match="is an encoder, whose tokens attend to later ones"):
        start_engine(EngineConfig(model=str(tmp_path / "bert"), task="generate", **OPTIONS))
    with pytest.raises(ConfigError, match="this classifier has 'cls' pooling"):
        save(config_of("bert"), tmp_path / "score", tf.AutoModelForSequenceClassification)
        start_engine(EngineConfig(model=str(tmp_path / "score"), pooling="mean", **OPTIONS))
    config = tf.FNetConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    save(config, tmp_path / "fnet")
    with pytest.raises((CompileError, CheckpointError), match="mixes the tokens of requests"):
        start_engine(EngineConfig(model=str(tmp_path / "fnet"), **OPTIONS))


def test_no_model_that_writes_text_is_taken_for_an_encoder() -> None:
    """Those that read images or sound are in none of transformers' lists of causal language
    models."""
    masked = set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    writes = {
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
    }
    seen = 0
    for name in set(writes) - masked:
        try:
            config = tf.AutoConfig.for_model(name)
            config.get_text_config()
        except Exception:  # transformers' own default config can't be made, or names no text part
            continue
        seen += 1
        assert not is_encoder(config), name
    assert seen > 150
    for name in ("bert", "deberta-v2", "nomic_bert", "embedding_gemma2"):
        if name in tf.CONFIG_MAPPING:  # the newest is unknown to older transformers
            assert is_encoder(tf.AutoConfig.for_model(name)), name
    assert not is_encoder(tf.AutoConfig.for_model("bert", is_decoder=True))
