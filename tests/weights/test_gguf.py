"""GGUF files: configuration, tokenizer and weights, as transformers and gguf have them."""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from packed_rows import bits, empty_parts
from shared_captures import shared_captures
from tiers import tiered
from tiny_gguf import ARCHITECTURES, widen_for, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from llmc import LLM, PoolingParams, SamplingParams
from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.kernels.quantized_linear import Quantization
from llmc.kernels.quantized_linear import dequantize as op_numbers
from llmc.startup.gguf_files import model_directory
from llmc.startup.model_files import load_config, resolve_model
from llmc.startup.resolve import resolve
from llmc.text.gguf_tokenizer import with_special_tokens, write_tokenizer
from llmc.text.tokenizer import Tokenizer
from llmc.weights.checkpoint import BlockWriter, SomeOf
from llmc.weights.gguf.blocks import KEPT, fill_blocks, kept_as, reference_blocks
from llmc.weights.gguf.files import gguf_files
from llmc.weights.gguf.reader import GgufTensorInfo
from llmc.weights.gguf.tensors import GgufTensor, Undo
from llmc.weights.tensors import open_tensors

Type = GGMLQuantizationType


def theirs(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter as transformers' own loader widens it."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)
    tensors: dict[str, torch.Tensor] = loaded["tensors"]
    return tensors


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture)
    files = resolve_model(EngineConfig(model=str(path)))
    config = load_config(files, EngineConfig(model=str(path)))
    want = theirs(path, files.path)
    got = open_tensors(files.path, None, torch.float32)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    assert set(state) - {"lm_head.weight"} <= set(got)
    for name, tensor in got.items():
        assert tensor.shape == tuple(state[name].shape)
        assert torch.equal(tensor.read(), want[name]), name


def test_sampling_parameters_that_a_file_does_not_state_are_those_of_llama_cpp(
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    llama_cpp = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    for given, expected in ((None, llama_cpp), ({"temperature": 0.2}, {"temperature": 0.2})):
        folder = model_directory(path, given)
        stored = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        assert {n: v for n, v in stored.items() if n != "eos_token_id"} == expected
    files = resolve_model(EngineConfig(model=str(path)))
    assert (
        resolve(EngineConfig(model=str(path)), torch.device("cpu")).sampling_defaults() == llama_cpp
    )
    assert files.path == model_directory(path)


@pytest.mark.parametrize(
    ("stated", "penalties"),
    [
        ({"penalty_repeat": 1.25}, {"repetition_penalty": 1.25, "repeat_last_n": 64}),
        (
            {"penalty_repeat": 1.25, "penalty_last_n": 9},
            {"repetition_penalty": 1.25, "repeat_last_n": 9},
        ),
        (
            {"penalty_repeat": 1.25, "penalty_last_n": -1},
            {"repetition_penalty": 1.25, "repeat_last_n": -1},
        ),
        (
            {"penalty_repeat": 1.25, "penalty_last_n": 0},
            {"repetition_penalty": 1.25, "repeat_last_n": 0},
        ),
    ],
)
def test_penalties_that_a_file_states(
    stated: dict[str, float], penalties: dict[str, float], tmp_path: Path
) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        for name, value in stated.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_int32
            add(f"general.sampling.{name}", value)  # type: ignore[operator]

    path = write_gguf(tmp_path / "m.gguf", "llama", edit=edit)
    config = resolve(EngineConfig(model=str(path)), torch.device("cpu"))
    found = config.sampling_defaults()
    assert {name: found[name] for name in found if "repe" in name} == penalties


def test_gguf_makes_its_map_of_names_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for it at every module, and it takes long to make."""
    path = write_gguf(tmp_path / "m.gguf", "llama")
    made: list[Any] = []
    make = gguf.get_tensor_name_map

    def counted(*about: Any) -> Any:
        made.append(about)
        return make(*about)

    monkeypatch.setattr(gguf, "get_tensor_name_map", counted)
    model_directory(path)
    assert len(made) == 1


def test_a_cache_that_cant_be_written_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"\(Not a directory\); set LLMC_CACHE_DIR"):
        model_directory(path)


@pytest.mark.parametrize("fits", ["nothing", "all but the tokenizer"])
def test_a_full_cache_is_told_with_what_to_do(
    fits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    sizes = {file.name: file.stat().st_size for file in model_directory(path).iterdir()}
    tokenizer = sizes.pop("tokenizer.json")
    limit = 10 if fits == "nothing" else tokenizer - 1
    assert fits == "nothing" or limit > max(sizes["config.json"], sizes["generation_config.json"])
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "full"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(CheckpointError, match="the cache for GGUF files .* set LLMC_CACHE_DIR"):
            model_directory(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "full" / "gguf").iterdir()) == []


def test_a_file_is_known_by_its_name_in_capitals_or_its_content(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    want = open_tensors(model_directory(path), None, torch.float32)
    folder = tmp_path / "MODELS"
    folder.mkdir()
    shout = folder / "M.Q8_0.GGUF"
    blob = tmp_path / f"sha256-{'a1' * 32}"
    for other in (shout, blob):
        other.write_bytes(path.read_bytes())
    for model, name in ((shout, "M.Q8_0"), (folder, "MODELS"), (blob, blob.name)):
        files = resolve_model(EngineConfig(model=str(model)))
        assert files.name == name
        got = open_tensors(files.path, None, torch.float32)
        assert all(torch.equal(got[key].read(), want[key].read()) for key in want)


def test_fields_of_the_config_are_the_models(tmp_path: Path) -> None:
    for architecture, (_, fields) in ARCHITECTURES.items():
        path = write_gguf(tmp_path / f"{architecture}.gguf", architecture)
        config = AutoConfig.from_pretrained(model_directory(path))
        for name, value in fields.items():
            if name not in ("bias", "parallel_attn", "alibi", "pad_token_id"):
                assert getattr(config, name) == value, (architecture, name)


@pytest.mark.parametrize(
    "kind", [t for t in Type if t.name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
)
def test_widened_values_are_the_gguf_packages(kind: Type, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", kind)
    folder = model_directory(path)
    want = theirs(path, folder)
    for name, tensor in open_tensors(folder, None, torch.float32).items():
        assert torch.equal(tensor.read(), want[name]), name


def test_extreme_scales_and_nan_stay(tmp_path: Path) -> None:
    values = np.zeros((128, 64), np.float32)
    raw = quantize(values, Type.Q8_0).reshape(128, 2, 34)
    raw[:, :, :2] = (
        np.array([np.nan, np.inf, 6e-8, -65504], np.float16)
        .view(np.uint8)
        .reshape(4, 1, 2)
        .repeat(32, 0)
    )
    raw[:, :, 2:] = np.arange(32, dtype=np.uint8) * 8
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", Type.Q8_0)
    data = bytearray(path.read_bytes())
    from llmc.weights.gguf.reader import read_header

    info = read_header(path).tensors["token_embd.weight"]
    data[info.offset : info.offset + info.num_bytes] = raw.tobytes()
    path.write_bytes(data)
    got = open_tensors(model_directory(path), None, torch.float32)["model.embed_tokens.weight"]
    with np.errstate(all="ignore"):
        want = torch.from_numpy(dequantize(raw.reshape(128, 68), Type.Q8_0))
    assert torch.equal(got.read().view(torch.int32), want.view(torch.int32))
    assert bool(want.isnan().any()) and bool(want.isinf().any())


@pytest.mark.parametrize(("kind", "want"), [(1, "mean"), (3, "last"), (0, None), ("x", None)])
def test_an_embedding_model_says_how_it_pools(kind: Any, want: str | None, tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        add = writer.add_string if isinstance(kind, str) else writer.add_uint32
        add("qwen3.pooling_type", kind)

    path = write_gguf(tmp_path / "m.gguf", "qwen3", edit=edit)
    options: Any = {"opt_level": 0, "max_model_len": 32, "kv_cache_memory": 1 << 20}
    with LLM(str(path), **options) as llm:
        assert (llm.info.pooling is None) == (want is None)
        if want is None:
            return
        assert llm.info.pooling is not None and llm.info.pooling.method == want
        (output,) = llm.embed([[5, 6, 7, 8]])
        assert output.outputs is not None
        got = torch.tensor(output.outputs.embedding)
    raw = PoolingParams(use_activation=False)
    with LLM(str(path), task="token_embed", **options) as llm:
        (output,) = llm.encode([[5, 6, 7, 8]], raw, pooling_task="token_embed", use_tqdm=False)
        assert output.outputs is not None
        hidden = torch.tensor(output.outputs.data)
    vector = hidden.mean(0) if want == "mean" else hidden[-1]
    torch.testing.assert_close(got, torch.nn.functional.normalize(vector, dim=0))


@pytest.mark.parametrize("suffix", [".gguf", ".GGUF"])
def test_split_files_are_one_model(suffix: str, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", "llama")
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=8)
    from gguf import GGUFReader

    reader = GGUFReader(whole)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = [part.rename(part.with_suffix(suffix)) for part in sorted(tmp_path.glob("m-*.gguf"))]
    assert len(parts) > 1
    one, many = (open_tensors(model_directory(p), None, torch.float32) for p in (whole, parts[0]))
    assert {n: t.read().tolist() for n, t in one.items()} == {
        n: t.read().tolist() for n, t in many.items()
    }
    with pytest.raises(CheckpointError, match="name its first part"):
        resolve_model(EngineConfig(model=str(parts[1])))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"part {parts[1].name} is missing"):
        resolve_model(EngineConfig(model=str(parts[0])))


def test_a_split_model_in_the_hubs_cache(tmp_path: Path) -> None:
    """There the files are links, to names that are hashes."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    folder.mkdir()
    write_gguf(blobs / "0a1b", "llama")
    empty = GGUFWriter(blobs / "2c3d", "llama")
    empty.write_header_to_file()
    empty.write_kv_data_to_file()
    empty.close()
    for number, blob in ((1, "0a1b"), (2, "2c3d")):
        (folder / f"m-0000{number}-of-00002.gguf").symlink_to(blobs / blob)
    files = resolve_model(EngineConfig(model=str(folder / "m-00001-of-00002.gguf")))
    assert files.name == "m-00001-of-00002"
    assert [f.parent for f in gguf_files(files.path)] == [folder] * 2
    one = tmp_path / "m.gguf"
    one.symlink_to(blobs / "0a1b")
    assert resolve_model(EngineConfig(model=str(one))).name == "m"


def test_a_directory_with_one_file_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    write_gguf(folder / "a.gguf", "llama")
    files = resolve_model(EngineConfig(model=str(folder)))
    assert files.name == "some-model" and files.has_tokenizer
    write_gguf(folder / "b.gguf", "llama")
    with pytest.raises(CheckpointError, match=r"several GGUF models \(a.gguf, b.gguf\); name one"):
        resolve_model(EngineConfig(model=str(folder)))


def write_other(path: Path, stated: dict[str, str]) -> Path:
    """Write a file that has no model. `stated`: metadata under `general.`."""
    writer = GGUFWriter(path, stated.get("architecture", "llama"))
    if "architecture" not in stated:
        del writer.kv_data[0]["general.architecture"]
    if "type" in stated:
        writer.add_type(stated["type"])
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


OTHERS: tuple[tuple[dict[str, str], str], ...] = (
    ({"architecture": "clip", "type": "mmproj"}, "is the image or audio encoder of a model, and"),
    ({"architecture": "clip"}, "is the image or audio encoder .* name the file of the language"),
    ({"type": "imatrix"}, "is an importance matrix, .* and not a model; name the model's file"),
    ({"architecture": "llama", "type": "adapter"}, "is an adapter, .* --lora-modules NAME=FILE"),
    ({"architecture": "controlvector"}, "is a control vector, which llmc does not support"),
)


@pytest.mark.parametrize(("stated", "message"), OTHERS)
def test_a_file_that_is_no_model_is_told_by_what_it_is(
    stated: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = write_other(tmp_path / "a.gguf", stated)
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError, match=f"a.gguf {message}"):
            resolve_model(EngineConfig(model=str(place)))
    write_other(tmp_path / "b.gguf", stated)
    with pytest.raises(CheckpointError, match=r"several GGUF models \(a.gguf, b.gguf\); name one"):
        resolve_model(EngineConfig(model=str(tmp_path)))


def test_the_model_of_a_directory_may_have_other_files_beside_it(tmp_path: Path) -> None:
    for i, (stated, _) in enumerate(OTHERS):
        write_other(tmp_path / f"{i}.gguf", stated)
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    model = write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(CheckpointError, match=r"several GGUF models \(m.gguf, short.gguf\)"):
        resolve_model(EngineConfig(model=str(tmp_path)))
    (tmp_path / "short.gguf").unlink()
    found = resolve_model(EngineConfig(model=str(tmp_path)))
    assert gguf_files(found.path) == [model]


def test_an_architecture_without_a_map_is_refused_by_name(tmp_path: Path) -> None:
    def rename(writer: GGUFWriter) -> None:
        writer.kv_data[0]["general.architecture"].value = "nobodys-model"

    path = write_gguf(tmp_path / "m.gguf", "llama", edit=rename)
    with pytest.raises(CheckpointError, match="of architecture 'nobodys-model' are not served"):
        resolve_model(EngineConfig(model=str(path)))


def test_a_decoder_whose_tokens_attend_to_later_ones_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "llama", edit=lambda w: w.add_bool("llama.attention.causal", False)
    )
    with pytest.raises(CheckpointError, match="a llama model whose tokens attend to later ones"):
        resolve_model(EngineConfig(model=str(path)))


def test_only_some_projections_of_llama_may_have_biases(tmp_path: Path) -> None:
    sizes = {"attn_q": 64, "attn_k": 32, "attn_v": 32}

    def add(writer: GGUFWriter) -> None:
        for name, size in sizes.items():
            for layer in range(2):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.ones(size, np.float32))

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=add))
    found = open_tensors(folder, None, torch.float32)
    for name, value in {"q": 1, "k": 1, "v": 1, "o": 0}.items():
        bias = found[f"model.layers.1.self_attn.{name}_proj.bias"].read()
        assert bias.tolist() == [value] * (32 if name in "kv" else 64)


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    first = model_directory(path)
    path.unlink()
    write_gguf(path, "qwen2")
    second = model_directory(path)
    assert first != second
    kinds = [json.loads((d / "config.json").read_text())["model_type"] for d in (first, second)]
    assert kinds == ["llama", "qwen2"]


SCALINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"scale_linear": 1.0}, {"rope_type": "default"}),
    (
        {
            "scaling.type": "yarn",
            "scaling.factor": 8.0,
            "scaling.original_context_length": 32,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    ),
    ({"scaling.type": "none"}, {"rope_type": "default"}),
    ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
]


@pytest.mark.parametrize(("stored", "want"), SCALINGS)
def test_rotary_scaling(stored: dict[str, Any], want: dict[str, Any], tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        for key, value in stored.items():
            name = f"qwen2.rope.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)

    path = write_gguf(tmp_path / "m.gguf", "qwen2", edit=add)
    rope = AutoConfig.from_pretrained(model_directory(path)).rope_parameters
    assert want.items() <= rope.items() and rope["rope_theta"] == 10000.0


def test_factors_of_frequencies_are_kept(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", edit=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    config = AutoConfig.from_pretrained(model_directory(path))
    module = AutoModelForCausalLM.from_config(config)
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    got: Any = module.model.rotary_emb.inv_freq
    torch.testing.assert_close(got, plain / torch.from_numpy(factors))
    assert module.model.rotary_emb.attention_scaling == 1.0


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    tokenizer = Tokenizer.load(model_directory(path))
    ids = tokenizer.encode("a b!</s>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a b!</s>" and ids[-1] == 2
    assert tokenizer.chat_template is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_templates_may_have_names(tmp_path: Path) -> None:
    def tokenizer(name: str, **templates: str) -> Tokenizer:
        def edit(writer: GGUFWriter) -> None:
            del writer.kv_data[0]["tokenizer.chat_template"]
            named = [{"name": key, "template": text} for key, text in templates.items()]
            writer.add_chat_template(named)

        path = write_gguf(tmp_path / name, "llama", edit=edit)
        return Tokenizer.load(model_directory(path))

    several = tokenizer("a.gguf", default="plain", tool_use="with tools", rag="documents")
    assert [several.template_for(tools=tools) for tools in (False, True)] == ["plain", "with tools"]
    single = tokenizer("b.gguf", tool_use="with tools")
    assert [single.template_for(tools=tools) for tools in (False, True)] == [None, "with tools"]
    default = tokenizer("c.gguf", default="plain")
    assert [default.template_for(tools=tools) for tools in (False, True)] == ["plain", "plain"]
    with pytest.raises(CheckpointError, match=r"chat_template\.tool_use is not a Jinja template"):
        tokenizer("d.gguf", default="plain", tool_use="{% if %}")


def test_a_name_of_a_template_is_no_path(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_string("tokenizer.chat_template.../../stray", "x")

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=edit))
    assert not list(folder.rglob("*stray*")) and not list(folder.parent.glob("*stray*"))


def use_sentencepiece(writer: GGUFWriter) -> None:
    letters = ["\u2581", "a", "b", "ab", "\u2581ab", "aba", "<0xC3>", "<0xA4>"]
    words = ["<unk>", "<s>", "</s>", *letters]
    words += [f"<{i}>" for i in range(128 - len(words))]
    scores = [0.0] * 3 + [-9.0, -9.0, -9.0, -1.0, -2.0, -0.5, 0.0, 0.0]
    scores += [-99.0] * (128 - len(scores))
    for key in list(writer.kv_data[0]):
        if key.startswith("tokenizer."):
            del writer.kv_data[0][key]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3, *[1] * 6, 6, 6, *[1] * (128 - 11)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_sentencepiece_vocabulary(architecture: str, tmp_path: Path) -> None:
    """Merges follow the scores of what they make, and letters that are missing become bytes.

    Of qwen2 transformers has a tokenizer with rules of its own, which are not the file's.
    """
    path = write_gguf(tmp_path / "m.gguf", architecture, edit=use_sentencepiece)
    tokenizer = Tokenizer.load(model_directory(path))
    assert tokenizer.tokens(tokenizer.encode("ab")) == ["<s>", "\u2581ab"]
    assert tokenizer.tokens(tokenizer.encode("baba")) == ["<s>", "\u2581", "b", "aba"]
    assert tokenizer.tokens(tokenizer.encode("\u00e4")) == ["<s>", "\u2581", "<0xC3>", "<0xA4>"]
    assert tokenizer.decode(tokenizer.encode("ab \u00e4")) == "ab \u00e4"
    assert tokenizer.tokens(tokenizer.encode("<unk>")) == ["<s>", "<unk>"]
    assert tokenizer.decode([0, 1, 4]) == "a"


def test_tokens_without_scores_are_merged_by_id(tmp_path: Path) -> None:
    letters = ["\u2581", "a", "b", "ba", "ab"]
    metadata = {
        "general.architecture": "xverse", "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *letters],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 5], "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    assert write_tokenizer(with_special_tokens(metadata), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("aba", add_special_tokens=False)
    assert tokenizer.tokens(ids) == ["\u2581", "a", "ba"]


def test_a_kind_of_vocabulary_without_a_space_before_the_text(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        use_sentencepiece(writer)
        writer.kv_data[0]["tokenizer.ggml.model"].value = "gemma4"

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=change))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.tokens(tokenizer.encode("ab")) == ["<s>", "ab"]


def test_sentencepiece_has_its_own_special_tokens_where_a_file_names_none(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        use_sentencepiece(writer)
        for name in ("bos", "eos"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"]

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=change))
    assert Tokenizer.load(folder).encode("ab")[0] == 1
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2]


@pytest.mark.parametrize("number", [128, 2**32 - 1])
def test_special_tokens_outside_the_vocabulary_are_ignored(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in llama.cpp: files of models with an added token that was not converted have them."""

    def change(writer: GGUFWriter) -> None:
        writer.add_pad_token_id(number)
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = number

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=change))
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        1,
        None,
        None,
    )
    assert "eos_token_id" not in json.loads((folder / "generation_config.json").read_text())
    assert f"'tokenizer.ggml.padding_token_id': {number}" in caplog.text


@pytest.mark.parametrize(("rule", "is_composed"), [("qwen2", True), ("llama-bpe", False)])
def test_letters_and_accents_are_composed_where_the_checkpoints_tokenizer_does(
    rule: str, is_composed: bool, tmp_path: Path
) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = rule

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "qwen3", edit=change))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = "e\u0301" if backend.normalizer is None else backend.normalizer.normalize_str("e\u0301")
    assert found == ("\u00e9" if is_composed else "e\u0301")


def test_a_token_that_ends_a_turn_is_special_whatever_its_type(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[127] = "<end_of_turn>"

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=change))
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [2, 127]
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("a<end_of_turn>")[1:] == [127]
    assert tokenizer.decode(tokenizer.encode("a<end_of_turn>")) == "a"


def test_thousands_of_special_tokens_are_added_at_once(tmp_path: Path) -> None:
    """Gemma 3 has 6400 of them. Added one by one, these 12000 take 15 s."""
    unused = [f"<unused{i}>" for i in range(12_000)]
    fields = {
        "model": "llama",
        "tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *unused,
            "a",
            "<mark>",
            *(f"<0x{i:02X}>" for i in range(256)),
        ],
        "token_type": [2, 3, 3, *[3] * 12_000, 1, 4, *[6] * 256],
        "scores": [0.0] * (12_005 + 256),
        "add_space_prefix": False,
    }
    start = time.process_time()
    metadata = with_special_tokens({f"tokenizer.ggml.{k}": v for k, v in fields.items()})
    assert write_tokenizer(metadata, tmp_path)
    assert time.process_time() - start < 5
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a<unused11999>a<mark>", add_special_tokens=False)
    assert ids == [12_003, 12_002, 12_003, 12_004]
    assert tokenizer.decode(ids) == "aa<mark>"  # that one is not special


@pytest.mark.parametrize(
    ("rule", "text", "want"),
    [
        ("kimi-k2", "Ab\u4e16c's 12345", ["Ab", "\u4e16", "c's", "\u0120", "123", "45"]),
        ("afmoe", "a1234567\u4e16b", ["a", "1", "234", "567", "\u4e16", "b"]),
        ("dbrx", "Ab's 12345", ["Ab", "'s", "\u0120", "123", "45"]),
        ("superbpe", "a b 12345 c", ["a\u0120b\u0120", "12", "345", "\u0120c"]),
        ("ufakzeka", "Ab's 12", ["Ab", "'s", "\u0120", "1", "2"]),
        ("ufakzeka", "Ab'sun", ["Ab", "'sun"]),
        ("granite-embed-multi-97m", "AbCd's 1234", ["Ab", "Cd's", "\u0120", "123", "4"]),
    ],
)
def test_text_is_split_by_the_files_rule(
    rule: str, text: str, want: list[str], tmp_path: Path
) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = rule

    folder = model_directory(write_gguf(tmp_path / "m.gguf", "llama", edit=change))
    splits = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    found = [text[start:end] for _, (start, end) in splits.pre_tokenize_str(text)]
    assert [part.replace(" ", "\u0120") for part in found] == want


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ("sarvam-moe", "a \u2581 \u2581b \n c"),
        ("granite-embed-multi-311m", "<s> a \u2581 \u2581b \n c"),
        ("mmbert", "\u2581 a \u2581 \u2581b \n \u2581 c"),
    ],
)
def test_byte_level_vocabularies_may_spell_spaces_as_sentencepiece_does(
    rule: str, want: str, tmp_path: Path
) -> None:
    """The wanted tokens are llama.cpp's, of its version of October 2026."""
    fields = {
        "model": "gpt2", "pre": rule, "token_type": [2, 3, 3, *[1] * 6],
        "tokens": ["<unk>", "<s>", "</s>", "\u2581", "\u2581b", "a", "b", "c", "\n"],
        "merges": ["\u2581 b"], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    assert write_tokenizer({f"tokenizer.ggml.{k}": v for k, v in fields.items()}, tmp_path)
    ids = Tokenizer.load(tmp_path).encode("a  b\nc")
    assert [fields["tokens"][i] for i in ids] == want.split(" ")


@pytest.mark.parametrize("template", ["{% for m in", "{{ a b }}", "{% endif %}"])
def test_bad_templates(template: str, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.chat_template"].value = template

    path = write_gguf(tmp_path / "m.gguf", "llama", edit=change)
    with pytest.raises(CheckpointError, match="chat_template is not a Jinja template"):
        resolve_model(EngineConfig(model=str(path)))


# where a block has numbers in float16; other types begin with one
HALVES = {
    Type.Q4_1: (0, 2),
    Type.Q5_1: (0, 2),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
    Type.IQ1_M: (),
    Type.MXFP4: (),
}
# NaN, infinities, the largest, the least, zeros
EXTREMES = np.array([0x7E00, 0x7C00, 0xFC00, 0x7BFF, 0xFBFF, 1, 0x8001, 0, 0x8000], "<u2")


def random_blocks(kind: Type, rows: int, depth: int) -> np.ndarray[Any, Any]:
    """Any bits; the numbers of the first blocks are extreme, one by one and in pairs."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows * depth // block, block_bytes), np.uint8)
    if kind is Type.MXFP4:
        raw[:, 0] %= 255  # which is NaN by the format's specification, a number in the gguf package
    for i, at in enumerate(HALVES.get(kind, (0,))):
        for first in (EXTREMES.size * (i + 1), 0):
            raw[first : first + EXTREMES.size, at : at + 2] = EXTREMES.view(np.uint8).reshape(-1, 2)
    if kind is Type.IQ1_M:  # in the upper four bits of every other byte
        digits = EXTREMES[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) << 4 & 0xF0
        raw[: EXTREMES.size, 49:56:2] = raw[: EXTREMES.size, 49:56:2] & 15 | digits.astype(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", KEPT)
def test_kept_blocks_stand_for_the_same_numbers(kind: Type) -> None:
    raw = random_blocks(kind, 32, 512)
    to = kept_as(kind, 512)
    assert to is not None
    parts = empty_parts(to, 32, 512)
    fill_blocks(raw, kind, to, parts, slice(None))
    got = op_numbers(parts["weight"], parts["scale"], None, parts.get("minimum"))
    with np.errstate(all="ignore"):
        want = torch.from_numpy(dequantize(raw, kind))
    if kind is not Type.MXFP4:  # which has powers of two alone
        assert want.isnan().any() and want.isinf().any() and want.isfinite().any()
    same = got.view(torch.int32) == want.view(torch.int32)
    if kind is Type.MXFP4:
        same = got == want  # e2m1 has a zero with a sign
    assert (same | (got.isnan() & want.isnan())).all()
    assert {part: tensor.dtype for part, tensor in parts.items()} == to.dtypes
    assert all(tuple(t.shape) == to.shape(p, 32, 512) for p, t in parts.items())


@pytest.mark.parametrize("order", [slice(None), np.random.default_rng(2).permutation(64)])
def test_a_tensor_is_packed_some_channels_at_a_time(
    order: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_blocks(Type.Q4_1, 64, 96)
    (tmp_path / "m").write_bytes(raw.tobytes())
    info = GgufTensorInfo(
        name="w", file=tmp_path / "m", shape=(64, 96), type=Type.Q4_1, offset=0, num_bytes=raw.size
    )
    tensor = GgufTensor(
        name="w", shape=(64, 96), dtype=torch.float32, parts=(info,), row_order=order,
        undo=Undo(architecture="llama", config={}, rule={}),
    )  # fmt: skip
    to = tensor.kept_as()
    assert to is not None
    whole, out = reference_blocks(raw[order], Type.Q4_1, to), empty_parts(to, 64, 96)
    rows = []

    def counted(raw: Any, *others: Any) -> Any:
        rows.append(len(raw))
        return reference_blocks(raw, *others)

    monkeypatch.setattr("llmc.weights.gguf.blocks.pack_gguf", lambda *_: False)
    monkeypatch.setattr("llmc.weights.gguf.blocks.reference_blocks", counted)
    monkeypatch.setattr("llmc.weights.gguf.blocks._AT_ONCE", 32 * 96 + 1)
    tensor.write_blocks(to, BlockWriter(out))
    assert rows == [32, 32]
    for part, blocks in whole.items():
        assert torch.equal(bits(out[part]), bits(blocks))


@pytest.mark.parametrize("kind", KEPT)
def test_a_part_of_a_tensor_has_the_numbers_of_its_place(kind: Type, tmp_path: Path) -> None:
    """Of rows in another order, and of inputs that begin and end inside a block of the file."""
    raw, order = random_blocks(kind, 64, 512), np.random.default_rng(1).permutation(64)
    (tmp_path / "m").write_bytes(raw.tobytes())
    info = GgufTensorInfo(
        name="w", file=tmp_path / "m", shape=(2, 32, 512), type=kind, offset=0, num_bytes=raw.size
    )
    tensor = GgufTensor(
        name="w", shape=(2, 32, 512), dtype=torch.float32, parts=(info,),
        row_order=order[order < 32], undo=Undo(architecture="llama", config={}, rule={}),
    )  # fmt: skip
    to = tensor.kept_as()
    assert to is not None

    def numbers(part: SomeOf | None, to: Quantization = to) -> torch.Tensor:
        size = list(tensor.shape)
        if part is not None:
            size[part.dim] = sum(length for _, length in part.ranges)
        out = empty_parts(to, *size)
        tensor.write_blocks(to, BlockWriter(out), part)
        made = [{name: blocks[expert] for name, blocks in out.items()} for expert in range(2)]
        return torch.stack(
            [op_numbers(p["weight"], p["scale"], None, p.get("minimum")) for p in made]
        )

    whole = numbers(None)
    apart = dataclasses.replace(
        to,
        group=min(to.group, 32),
        scale="float32" if to.scale == "superblock" else to.scale,
    )
    for dim, ranges, kept in (
        (1, ((16, 16), (0, 8), (24, 8)), to),
        (2, ((256, 256),), to),
        (2, ((96, 64), (320, 32)), apart),
    ):
        part = SomeOf(shape=tensor.shape, dim=dim, ranges=ranges)
        same = numbers(part, kept).view(torch.int32) == part.of(whole).view(torch.int32)
        assert (same | part.of(whole).isnan()).all()


@pytest.mark.parametrize("kind", KEPT)
def test_columns_in_another_order_keep_their_bits(kind: Type, tmp_path: Path) -> None:
    """As those of linear attention, whose heads a file may have in another order. Cut into heads of
    128 inputs, superblocks get separate scales; heads of 16 are dequantized."""
    raw = random_blocks(kind, 32, 1024)
    (tmp_path / "m").write_bytes(raw.tobytes())
    info = GgufTensorInfo(
        name="w", file=tmp_path / "m", shape=(32, 1024), type=kind, offset=0, num_bytes=raw.size
    )
    with np.errstate(all="ignore"):
        stored = torch.from_numpy(dequantize(raw, kind))

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        # a zero has a sign in the table of MXFP4 only
        return bool(((a == b) | (a.isnan() & b.isnan())).all())

    for size in (16, 128, 256):
        columns = np.arange(1024).reshape(2, -1, size).swapaxes(0, 1).reshape(-1)
        tensor = GgufTensor(
            name="w", shape=(32, 1024), dtype=torch.float32, parts=(info,), columns=columns,
            row_order=slice(None), undo=Undo(architecture="llama", config={}, rule={}),
        )  # fmt: skip
        want = stored[:, columns]
        assert same(tensor.read(), want)
        whole, to = kept_as(kind, 1024), tensor.kept_as()
        assert whole is not None
        if size == 16:
            assert to is None
            continue
        is_cut = whole.scale == "superblock" and size == 128
        scale = "float32" if is_cut else whole.scale
        assert to == dataclasses.replace(whole, group=min(whole.group, size), scale=scale)
        rows = SomeOf(shape=tensor.shape, dim=0, ranges=((16, 16),))
        inputs = SomeOf(shape=tensor.shape, dim=1, ranges=((256, 512),))
        for part in (None, rows, inputs):
            kept = want if part is None else part.of(want)
            out = empty_parts(to, *kept.shape)
            tensor.write_blocks(to, BlockWriter(out), part)
            assert same(op_numbers(out["weight"], out["scale"], None, out.get("minimum")), kept)


@pytest.mark.parametrize(
    ("architecture", "kind", "op"),
    tiered(
        [
            ("llama", Type.Q4_0, "linear"),
            ("llama", Type.Q4_1, "linear"),
            ("llama", Type.Q5_0, "linear"),
            ("llama", Type.Q5_1, "linear"),
            ("llama", Type.IQ4_NL, "linear"),
            ("llama", Type.Q8_0, "linear"),
            ("qwen3moe", Type.Q5_0, "expert_linear"),
            ("qwen3moe", Type.Q5_1, "expert_linear"),
            ("qwen3moe", Type.IQ4_NL, "expert_linear"),
            ("qwen3moe", Type.Q4_0, "expert_linear"),
            ("qwen3moe", Type.Q8_0, "expert_linear"),
            ("qwen3moe", Type.MXFP4, "expert_linear"),
            ("qwen2moe", Type.Q4_1, "expert_linear"),
            ("llama", Type.Q4_K, "linear"),
            ("llama", Type.Q5_K, "linear"),
            ("llama", Type.Q6_K, "linear"),
            ("llama", Type.IQ4_XS, "linear"),
            ("qwen3moe", Type.IQ4_XS, "expert_linear"),
            ("qwen3moe", Type.Q5_K, "expert_linear"),
            ("qwen3moe", Type.Q6_K, "expert_linear"),
            ("llama", Type.IQ3_S, "linear"),
            ("llama", Type.IQ3_XXS, "linear"),
            ("llama", Type.IQ2_XS, "linear"),
            ("llama", Type.IQ1_S, "linear"),
            ("llama", Type.TQ2_0, "linear"),
            ("qwen3moe", Type.IQ3_XXS, "expert_linear"),
            ("qwen3moe", Type.IQ2_S, "expert_linear"),
        ],
        ("llama", Type.Q4_1, "linear"),
        ("llama", Type.Q4_K, "linear"),
        ("llama", Type.Q5_1, "linear"),
        ("llama", Type.Q6_K, "linear"),
        ("llama", Type.IQ4_XS, "linear"),
        ("llama", Type.IQ2_XS, "linear"),
        ("llama", Type.Q8_0, "linear"),
        ("qwen3moe", Type.MXFP4, "expert_linear"),
    ),
)
def test_an_engine_keeps_the_bits_and_says_what_transformers_does(
    architecture: str, kind: Type, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen_for(kind, architecture, monkeypatch)
    path = write_gguf(tmp_path / "m.gguf", architecture, kind)
    report = report_if_as_transformers(path)
    assert f"llmc.quantized_{op}.default" in report


@pytest.mark.parametrize("ties", [False, True])
def test_channels_that_are_no_whole_blocks_keep_their_bits(
    ties: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys and values, of which a block would have both, and of the head and the embedding."""
    name, fields = ARCHITECTURES["llama"]
    odd = {**fields, "head_dim": 12, "vocab_size": 131, "tie_word_embeddings": ties}
    monkeypatch.setitem(ARCHITECTURES, "llama", (name, odd))
    path = write_gguf(tmp_path / "m.gguf", "llama", Type.Q4_1)
    report = report_if_as_transformers(path)
    assert "1 llmc.quantized_embedding.default, 11 llmc.quantized_linear.default]" in report


def report_if_as_transformers(path: Path) -> str:
    """Compare log-probabilities with transformers' own; what the pass reports."""
    config = AutoConfig.from_pretrained(model_directory(path))
    reference: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reference.load_state_dict(theirs(path, model_directory(path)), strict=False)
    prompt = [5, 9, 23, 70, 14, 33]
    want = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    exact = {"dtype": "float32", "activation_bits": 32}
    with shared_captures(), LLM(str(path), opt_level=0, max_model_len=64, **exact) as llm:
        report = next(r for r in llm.info.pass_reports if "quantize_linears" in r)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([prompt], params, progress=False)
    assert output.prompt_logprobs is not None
    for i, token in enumerate(prompt[1:]):
        found = output.prompt_logprobs[i + 1]
        assert found is not None
        assert found[token].logprob == pytest.approx(float(want[i, token].detach()), abs=2e-6)
    return report
