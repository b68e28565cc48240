"""Encoders in GGUF files, as llama.cpp's converter writes them, say what their checkpoints do.

The layouts were compared with llama.cpp: it computes the same vectors from the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import converted_gguf
import pytest
import torch
import transformers as tf
from converted_gguf import Case, pairs, write_converted
from gguf import GGUFWriter
from tiers import tiered
from torch import Tensor

from llmc import LLM

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
PROMPTS = [[5, 9, 33, 14, 77, 31, 32, 88, 90, 20, 21, 22, 23, 55, 56, 57], [8, 7], [100] * 40]
MEAN, RANK = 1, 4  # pooling_type
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(f"\u2581{letter}" for letter in LETTERS),
    *LETTERS,
]
SPECIAL = {"padding": 0, "unknown": 1, "cls": 2, "seperator": 3, "mask": 4}


def plain(name: str, value: Tensor, _: Any) -> Mapping[str, Tensor]:
    return {} if name.startswith("pooler.") else {name: value}


def one_more(name: str, value: Tensor, _: Any) -> Mapping[str, Tensor]:
    return {name: value + 1 if name.endswith("norm.weight") else value}


def joined(name: str, value: Tensor, _: Any) -> Mapping[str, Tensor]:
    """Queries, keys and values are one tensor; norms have other names."""
    layer = next((word for word in name.split(".") if word.isdecimal()), "")
    for ours, stored in (("post_attention", "attn_output"), ("post_mlp", "layer_output")):
        if f"{ours}_layernorm" in name:
            return {f"blk.{layer}.{stored}_norm.{name.split('.')[-1]}": value}
    kind = name.split(".")[-2]
    if kind not in ("q_proj", "k_proj", "v_proj"):
        return {name: value}
    parts = _heads.setdefault(layer, [])
    parts.append(value)
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(_heads.pop(layer))} if len(parts) == 3 else {}


_heads: dict[str, list[Tensor]] = {}


def reranker(name: str, value: Tensor, _: Any) -> Mapping[str, Tensor]:
    part = name.split(".")[-1]
    if name.startswith("bert.pooler."):
        return {f"cls.{part}": value}
    if name.startswith("classifier."):
        return {f"cls.output.{part}": value}
    return {name.removeprefix("bert."): value}


CASES = {
    "bert": Case(architecture="bert", name="bert", fields=SIZES, change=plain),
    "one token type": Case(
        architecture="bert", name="bert", fields={**SIZES, "type_vocab_size": 1}, change=plain
    ),
    "no token types": Case(
        architecture="bert", name="distilbert", change=plain,
        fields={**SIZES, "hidden_dim": 96, "activation": "gelu"},
        metadata={"feed_forward_length": 96, "attention.layer_norm_epsilon": 1e-12},
    ),
    "joined heads": Case(
        architecture="nomic-bert", name="nomic_bert", change=joined,
        fields={**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "windows": Case(
        architecture="modern-bert", name="modernbert", change=plain,
        fields={
            **SIZES, "num_hidden_layers": 4, "local_attention": 8, "bos_token_id": None,
            "eos_token_id": None, "cls_token_id": None, "sep_token_id": None,
        },
        metadata={
            "attention.sliding_window": 8, "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0, "attention.layer_norm_epsilon": 1e-5,
        },
    ),
    "windows of all but the first of four layers": Case(
        architecture="modern-bert", name="modernbert", change=plain,
        fields={
            **SIZES, "num_hidden_layers": 5, "local_attention": 8, "bos_token_id": None,
            "eos_token_id": None, "cls_token_id": None, "sep_token_id": None, "norm_eps": 0.1,
            "global_attn_every_n_layers": 4, "hidden_activation": "silu",
        },
        metadata={
            "attention.sliding_window": 8, "attention.sliding_window_pattern": 4,
            "rope.freq_base": 160000.0, "rope.freq_base_swa": 10000.0,
            "attention.layer_norm_rms_epsilon": 0.1, "hidden_activation": "silu",
        },
    ),
    "rms norms": Case(
        architecture="eurobert", name="eurobert", change=plain,
        fields={**SIZES, "bos_token_id": None, "eos_token_id": None},
    ),
    "rms norms, halves side by side": Case(
        architecture="llama-embed", named_as="eurobert", name="eurobert", change=pairs,
        fields={
            **SIZES, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
            "tie_word_embeddings": True,
        },
        metadata={"rope.dimension_count": 16},
    ),
    "decoder made bidirectional": Case(
        architecture="gemma-embedding", name="gemma3_text", change=one_more,
        fields={
            **SIZES, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7, "sliding_window": 8, "use_bidirectional_attention": True,
            "bos_token_id": None, "eos_token_id": None,
        },
        metadata={"attention.sliding_window": 8, "rope.freq_base": 1000000.0},
    ),
}  # fmt: skip


def make(case: Case, maker: Any = tf.AutoModel) -> Any:
    torch.manual_seed(0)
    config = tf.AutoConfig.for_model(case.name, **case.fields)
    model = maker.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write(
    path: Path, case: Case, model: Any, monkeypatch: pytest.MonkeyPatch, pooling: int,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    def words(writer: GGUFWriter, *_: Any) -> None:
        tokens = WORDS + [f"[unused{i}]" for i in range(SIZES["vocab_size"] - len(WORDS))]
        writer.add_tokenizer_model("bert")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 5 + [1] * (len(tokens) - 5))
        for kind, number in SPECIAL.items():
            writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", number)
        writer.add_uint32(f"{case.architecture}.pooling_type", pooling)
        writer.add_bool(f"{case.architecture}.attention.causal", False)
        for name, value in (tensors or {}).items():
            writer.add_tensor(name, value.numpy())

    named = converted_gguf._named

    def also_named(names: Any, name: str, value: Tensor) -> Any:
        return iter([(name, value)]) if name.startswith("cls.") else named(names, name, value)

    monkeypatch.setattr(converted_gguf, "add_words", words)
    monkeypatch.setattr(converted_gguf, "_named", also_named)
    return write_converted(path, case, model)


def mean(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        states: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states.mean(0)


def embed(path: Path) -> Tensor:
    with LLM(str(path), dtype="float32", opt_level=0) as llm:
        prompts: Any = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return torch.tensor([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])


@pytest.mark.parametrize("name", tiered(CASES, "bert", "decoder made bidirectional"))
def test_vectors_are_those_of_the_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(CASES[name])
    path = write(tmp_path / "m.gguf", CASES[name], model, monkeypatch, MEAN)
    want = torch.stack([mean(model, ids) for ids in PROMPTS])
    torch.testing.assert_close(embed(path), torch.nn.functional.normalize(want), rtol=0, atol=2e-6)


def test_linears_after_the_pooling_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["bert"]
    model = make(case)
    dense = {"dense_2.weight": torch.randn(96, 64), "dense_3.weight": torch.randn(32, 96)}
    path = write(tmp_path / "m.gguf", case, model, monkeypatch, MEAN, dense)
    want = torch.stack([mean(model, ids) for ids in PROMPTS])
    for weight in dense.values():
        want = want @ weight.T
    torch.testing.assert_close(embed(path), torch.nn.functional.normalize(want), rtol=0, atol=2e-6)


def test_a_reranker_scores_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        architecture="bert", name="bert", fields={**SIZES, "num_labels": 1}, change=reranker
    )
    model = make(case, tf.AutoModelForSequenceClassification)
    path = write(tmp_path / "m.gguf", case, model, monkeypatch, RANK)
    query, documents = "a whale", ["big fish", "no idea at all"]
    with LLM(str(path), dtype="float32", opt_level=0) as llm:
        scored = llm.score(query, documents, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    for document, output in zip(documents, scored, strict=True):
        pair = tokenizer(query, document, return_tensors="pt")
        ids = pair["input_ids"][0].tolist()
        assert ids[0] == SPECIAL["cls"] and ids.count(SPECIAL["seperator"]) == 2
        assert pair["token_type_ids"][0].sum() == len(ids) - ids.index(SPECIAL["seperator"]) - 1
        with torch.no_grad():
            want = torch.sigmoid(model(**pair).logits).item()
        assert abs(output.outputs.score - want) < 2e-6
