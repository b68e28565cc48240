"""The certificate says yes to what is right, and names what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiers import tiered
from tiny_configs import save_random, tiny_config
from tiny_models import save_checkpoint

from llmc.check import check as check_module
from llmc.check.certificate import Certificate, CertificateStore, fingerprint, from_json
from llmc.check.check import check_model, find_certificate, fixed_config
from llmc.check.compare import TOLERANCES, Tolerance
from llmc.check.identity import identify
from llmc.check.variants import RoundedWeights
from llmc.config import EngineConfig
from llmc.errors import CheckpointError
from llmc.kernels.registry import OPS, Impl
from llmc.kernels.rms_norm import rms_norm

pytestmark = pytest.mark.slow
_THREE = {"num_hidden_layers": 3}  # one first, one last, one between
_SPEC = importlib.util.spec_from_file_location(
    "llmc_planted_passes", Path(__file__).with_name("planted_passes.py")
)
assert _SPEC is not None and _SPEC.loader is not None
planted = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(planted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("check"), **_THREE)


@pytest.fixture(scope="module", autouse=True)
def _own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.mktemp("cache")
    with mock.patch.object(check_module, "cache_dir", return_value=root):
        yield


def config(path: Path, **options: Any) -> EngineConfig:
    given = {"dtype": "float32", "device": "cpu", "block_size": 4, "opt_level": 0} | options
    return EngineConfig(model=str(path), **given)


@pytest.fixture(scope="module")
def certificate(checkpoint: Path) -> Certificate:
    return check_model(config(checkpoint))


def test_a_right_rewrite_is_certified_and_found_again(
    checkpoint: Path, certificate: Certificate
) -> None:
    assert certificate.certified and certificate.culprits == ()
    assert certificate.logits.relative < 2e-6, "float32 agrees to rounding"
    assert certificate.logits.top1 == 1.0
    assert [layer.layer for layer in certificate.layers] == [0, 1, 2]
    assert all(layer.is_good and layer.relative > 0 for layer in certificate.layers)
    assert certificate.num_tokens == sum((1, 13, 37, 64)) + 4 * 6
    assert find_certificate(config(checkpoint)) == certificate
    assert find_certificate(config(checkpoint, block_size=8)) is None
    assert find_certificate(config(checkpoint, passes={"merge_linears": False})) is None


def test_a_wrong_pass_is_named_and_can_be_disabled(checkpoint: Path) -> None:
    given = config(checkpoint, extra_passes=[planted.wrong_attention(), planted.wrong_scale()])
    certificate = check_model(given)
    assert not certificate.certified and certificate.is_fixable
    found = {c.name: (c.kind, c.layer) for c in certificate.culprits}
    assert found == {"wrong_scale": ("pass", 1), "wrong_attention": ("pass", 0)}
    assert set(certificate.switches) == {
        "--disable-pass wrong_scale",
        "--disable-pass wrong_attention",
    }
    fixed = check_model(given, disable_culprits=True)
    assert fixed.certified
    assert not fixed.passes["wrong_scale"] and not fixed.passes["wrong_attention"]
    assert fixed.passes["fuse_norms"], "the innocent ones stay on"
    assert find_certificate(fixed_config(given, certificate)) == fixed


def test_bfloat16_hides_a_small_mistake_and_float32_shows_it(checkpoint: Path) -> None:
    given = config(checkpoint, dtype="bfloat16", extra_passes=[planted.wrong_scale()])
    certificate = check_model(given)
    assert certificate.noise is not None and certificate.float32 is not None
    assert certificate.logits.relative <= certificate.limit.relative, "within rounding"
    assert certificate.float32_limit is not None
    assert certificate.float32.relative > 10 * certificate.float32_limit.relative
    assert [c.name for c in certificate.culprits] == ["wrong_scale"]


def test_a_pass_may_change_the_model_on_purpose(checkpoint: Path) -> None:
    certificate = check_model(config(checkpoint, extra_passes=[planted.louder()]))
    assert certificate.certified
    [changed] = certificate.changed
    assert changed.name == "louder" and changed.is_good
    assert certificate.logits.relative < 2e-6, "the comparison with transformers is without it"


@pytest.mark.parametrize("quantization", tiered(["int8", "int4", "fp8"], "int4"))
def test_quantizing_is_certified(quantization: str, tmp_path: Path) -> None:
    """With int4, the output head has 8 bits on both sides."""
    path = save_checkpoint("llama", tmp_path, hidden_size=64, intermediate_size=128)
    found = check_model(config(path, quantization=quantization), longest_prompt=8)
    assert found.certified
    results = {result.name: result for result in found.changed}
    assert results["quantize_linears"].limit.relative == 2e-5


def test_quantizing_a_model_that_reads_no_positions_is_certified(tmp_path: Path) -> None:
    save_random(tiny_config("mamba2"), tmp_path)
    found = check_model(config(tmp_path, quantization="int8"), longest_prompt=8)
    assert found.certified and "quantize_linears" in {result.name for result in found.changed}


@pytest.mark.parametrize(
    "passes", tiered([{}, {"absorb_mla": False}], {}), ids=["latent", "by head"]
)
def test_quantizing_a_model_with_latent_attention_is_certified(
    passes: dict[str, bool], tmp_path: Path
) -> None:
    """Latent attention reads one of its weights unquantized."""
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    save_random(tiny_config("deepseek_v3", moe_intermediate_size=32, **sizes), tmp_path)
    found = check_model(config(tmp_path, quantization="int8", passes=passes), longest_prompt=8)
    assert found.certified and "quantize_linears" in {result.name for result in found.changed}


def test_quantizing_a_model_that_chooses_keys_is_certified(tmp_path: Path) -> None:
    save_random(tiny_config("deepseek_v32"), tmp_path)
    found = check_model(config(tmp_path, quantization="int8"))
    assert found.certified and "choose_keys" in found.kernels
    assert "quantize_linears" in {changed.name for changed in found.changed}


def test_what_transformers_cant_run_is_told(checkpoint: Path) -> None:
    error = RuntimeError("strides should be multiple of 16 bytes\nand more")
    with (
        mock.patch("llmc.check.reference.taken", side_effect=error),
        pytest.raises(
            CheckpointError, match="can't run the model to compare with: strides .*bytes$"
        ),
    ):
        check_model(config(checkpoint))


def test_a_model_whose_layers_pass_several_streams_on_is_compared_by_its_logits(
    tmp_path: Path,
) -> None:
    tiny_config("hy_v4").save_pretrained(tmp_path)
    found = check_model(config(tmp_path, load_format="dummy"), longest_prompt=8)
    assert found.certified and not found.layers
    assert any(note.startswith("hidden states are not compared") for note in found.notes)


def test_a_model_whose_layers_return_lists_is_certified(tmp_path: Path) -> None:
    save_random(tiny_config("openai-gpt"), tmp_path)
    found = check_model(config(tmp_path), longest_prompt=8)
    assert found.certified and len(found.layers) == 2


def test_a_number_that_the_served_model_has_in_bfloat16_is_rounded_in_float32_too(
    tmp_path: Path,
) -> None:
    """The factor of embeddings, which is a buffer of the model's dtype that checkpoints lack."""
    save_random(tiny_config("gemma3_text"), tmp_path)
    found = check_model(config(tmp_path, dtype="bfloat16"), longest_prompt=8)
    assert found.certified
    assert found.float32 is not None and found.float32.relative < 5e-6


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("model_type", tiered(["ctrl", "xglm", "olmo", "rwkv"], "ctrl", "rwkv"))
def test_in_float32_both_sides_compute_the_same(model_type: str, tmp_path: Path) -> None:
    """Each has what one side might round or scale alone: a table that the model's code rounds when
    it runs, one that is captured with another attention, a last norm without weights, and weights
    that transformers halves every few layers."""
    save_random(tiny_config(model_type), tmp_path)
    found = check_model(config(tmp_path, dtype="bfloat16"), longest_prompt=8)
    assert found.certified and len(found.layers) == 2
    assert found.float32 is not None and found.float32.relative < 2e-6


@pytest.mark.parametrize("model_type", tiered(["ernie4_5_moe", "gpt_oss"], "ernie4_5_moe"))
def test_single_tokens_may_choose_other_experts_in_bfloat16(
    model_type: str, tmp_path: Path
) -> None:
    save_random(tiny_config(model_type), tmp_path)
    given = config(tmp_path, dtype="bfloat16")
    found = check_model(given)
    assert found.certified and found.average == "median"
    wrong = check_model(dataclasses.replace(given, extra_passes=[planted.wrong_scale()]))
    assert [c.name for c in wrong.culprits] == ["wrong_scale"], "seen in float32"


@pytest.mark.parametrize("name", tiered(["float16", "fp8_e4m3", "int8"], "int8"))
def test_a_narrower_cache_is_compared_with_the_models_own(name: str, checkpoint: Path) -> None:
    given = config(checkpoint, kv_cache_dtype=name)
    found = check_model(given, longest_prompt=8)
    assert found.certified
    [result] = found.changed
    assert (result.kind, result.name) == ("cache", f"a KV cache in {name}")
    assert 0 < result.logits.relative < result.limit.relative
    none = Tolerance(relative=0.0, kl=0.0, top1=1.0)
    strict = {**TOLERANCES, **dict.fromkeys(("float16", "bfloat16", "float8"), none)}
    with mock.patch("llmc.check.comparison.TOLERANCES", strict):
        found = check_model(given, longest_prompt=8)
    assert not found.certified
    assert found.switches == ("--kv-cache-dtype float32",)
    assert fixed_config(given, found).kv_cache_dtype == "float32"


def test_a_wrong_kernel_is_named(checkpoint: Path) -> None:
    library = torch.library.Library("llmc_planted", "DEF")
    library.define("rms_norm(Tensor x, Tensor? w, float eps, float offset) -> Tensor")

    def wrong(x: torch.Tensor, w: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return 1.01 * torch.nn.functional.rms_norm(x, x.shape[-1:], w + offset, eps)

    library.impl("rms_norm", wrong, "CompositeExplicitAutograd")
    torch.library.register_fake("llmc_planted::rms_norm", wrong, lib=library)
    impl = Impl(
        name="cpu", op=lambda: torch.ops.llmc_planted.rms_norm.default, available=lambda: True
    )
    with mock.patch.object(OPS[rms_norm.name], "impls", [impl]):
        certificate = check_model(config(checkpoint))
    assert not certificate.certified
    assert [(c.kind, c.name) for c in certificate.culprits] == [("kernel", "rms_norm (planted)")]


# Dynamo makes an instance of an autograd function that a model defines
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("model_type", "op"),
    [("lfm2", "causal_conv"), ("bloom", "paged_attention")],
    ids=["recurrent layers", "attention of its own"],
)
def test_other_mechanisms_are_certified_too(tmp_path: Path, model_type: str, op: str) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    certificate = check_model(config(tmp_path, load_format="dummy"))
    assert certificate.certified and certificate.logits.relative < 2e-5
    assert op in certificate.kernels


def test_a_model_that_loops_over_its_layers_is_compared_by_their_last_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint("llama", tmp_path, **_THREE, intermediate_size=80)
    kind: Any = tf.LlamaModel
    built = kind.__init__

    def looped(self: Any, config: Any) -> None:
        built(self, config)
        self.layers.__class__ = _Twice

    monkeypatch.setattr(kind, "__init__", looped)
    certificate = check_model(config(checkpoint))
    assert certificate.certified
    assert [layer.layer for layer in certificate.layers] == [0, 1, 2]


class _Twice(torch.nn.ModuleList):
    """Layers that are run twice, each time with keys and values of their own."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [*found, *found] if isinstance(index, slice) else found


def test_other_answers_with_the_models_own_cache_are_noted(
    checkpoint: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not certificate.cache_note
    head: Any = tf.LlamaForCausalLM
    forward = head.forward

    def drifting(self: Any, *args: Any, use_cache: bool | None = None, **given: Any) -> Any:
        found = forward(self, *args, use_cache=use_cache, **given)
        if use_cache:
            found.logits = found.logits * 1.01
        return found

    monkeypatch.setattr(head, "forward", drifting)
    drifted = check_model(config(checkpoint))
    assert drifted.certified, "llmc computes what the model computes without a cache"
    assert "with its cache" in drifted.cache_note


def test_made_up_weights_are_the_same_on_both_sides(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    certificate = check_model(config(tmp_path, load_format="dummy", dtype="bfloat16"))
    assert certificate.certified and "seed" in certificate.weights
    assert certificate.noise is not None and certificate.noise.relative > 1e-3
    assert certificate.float32 is not None and certificate.float32.relative < 2e-6


@pytest.mark.parametrize("model_type", tiered(["llama", "zamba2"], "zamba2"))
def test_a_head_of_its_own_is_served_where_the_config_ties_it(
    model_type: str, tmp_path: Path
) -> None:
    """Zamba 2 ties its shared layers by the same field of the config: they stay tied."""
    save_random(tiny_config(model_type, tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert check_model(config(tmp_path)).certified


def test_certificates_survive_the_disk_and_damaged_ones_do_not(
    certificate: Certificate, tmp_path: Path
) -> None:
    assert from_json(certificate.to_json()) == certificate
    store = CertificateStore(tmp_path)
    path = store.save(certificate)
    assert path is not None and store.load(certificate.key) == certificate
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left aside"
    other = {**json.loads(path.read_text("utf-8")), "key": "another"}
    path.write_text(json.dumps(other), encoding="utf-8")
    assert store.load(certificate.key) is None
    path.write_text("{", encoding="utf-8")
    assert store.load(certificate.key) is None


def test_other_weights_need_another_certificate(checkpoint: Path, tmp_path: Path) -> None:
    other = save_checkpoint("llama", tmp_path / "other", seed=1, **_THREE)
    same = save_checkpoint("llama", tmp_path / "same", **_THREE)
    assert fingerprint(same) == fingerprint(checkpoint) != fingerprint(other)
    assert identify(config(same)).key == identify(config(checkpoint)).key
    assert identify(config(other)).key != identify(config(checkpoint)).key


class _Numbers:
    """A weight source whose weights are all 1.001, which bfloat16 does not hold."""

    is_thread_safe = True

    def check(self, names: Any) -> None: ...

    def reads_rows(self, name: str) -> bool:
        return False

    def write_blocks(self, name: str, to: Any, out: Any, part: Any = None) -> None: ...

    def fill(self, name: str, out: torch.Tensor, part: Any = None) -> None:
        out.fill_(1.001)


def test_what_the_served_model_keeps_in_float32_is_not_rounded() -> None:
    source = RoundedWeights(_Numbers(), torch.bfloat16, {"norm": torch.float32})
    norm, linear = torch.empty(1), torch.empty(1)
    source.fill("norm", norm)
    source.fill("linear", linear)
    assert norm.item() == pytest.approx(1.001) and linear.item() == 1.0
