"""`check_model`: EngineConfig -> Certificate. Runs the whole comparison.

tokens -> transformers, eager -----------------------------------.
capture -> passes -> kernels -> step, over the same tokens ------+-> compare -> certificate
                                                                 '-> bisect
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from llmc.cache_dir import cache_dir
from llmc.check.bisect import Diagnosis
from llmc.check.certificate import Certificate, CertificateStore
from llmc.check.comparison import Comparison, compare
from llmc.check.identity import Identity, identify
from llmc.check.reference import Reference, run_reference
from llmc.check.tokens import make_sequences, make_steps
from llmc.check.variants import RoundedWeights, Subject, Variant, kernels_of
from llmc.compiler.attention_fallback import capture_model
from llmc.compiler.build import BuiltModel
from llmc.config import EngineConfig
from llmc.kernels.cpu.build import load
from llmc.load_test.machine import package_versions
from llmc.lora_request import LoRARequest
from llmc.model_info import OnPhase
from llmc.passes.layers import find_layers
from llmc.runner.adapter_store import lora_targets, target_sizes
from llmc.startup.adapter_files import as_peft
from llmc.startup.compile import build_as_stored, for_parameters, weights_of
from llmc.startup.phase_clock import PhaseClock
from llmc.startup.resolve import ModelSource
from llmc.text.tokenizer import Tokenizer
from llmc.weights.load import WeightSource
from llmc.weights.lora import LoraWeights, PlainWeight, open_adapter, read_adapter

_MAX_CACHED_ERROR = 2e-4  # relative, in float32: ten times the tolerance of the logits


def find_certificate(config: EngineConfig) -> Certificate | None:
    """The certificate stored for exactly this model, these options and this machine, or None."""
    key = identify(config).key
    return CertificateStore(cache_dir()).load(key) if key else None


def certificate_path(certificate: Certificate) -> str:
    """The path of a certificate; "" for one without a key."""
    return str(CertificateStore(cache_dir()).path(certificate.key)) if certificate.key else ""


def check_model(
    config: EngineConfig,
    *,
    longest_prompt: int | None = None,
    disable_culprits: bool = False,
    adapters: Sequence[LoRARequest] = (),
    on_phase: OnPhase | None = None,
) -> Certificate:
    """Compare, find the cause of a difference, and save the certificate.

    With `adapters`, each in a slot of `max_loras`, sequences with each adapter and without any are
    computed in the same steps. The certificate is for the model with exactly these adapters.
    With `disable_culprits`, a model that is correct without the culprits is checked again and gets
    a certificate for those options.
    Raises whatever loading a model raises, and CompileError if it can't be captured.
    """
    clock = PhaseClock(on_phase)
    with clock.phase("read config") as detail:
        identity = identify(config)
        source = identity.source
        adapters = [as_peft(adapter, source.files.path) for adapter in adapters]
        detail += [source.files.name, source.dtype_name, str(source.device)]
    with clock.phase("capture") as detail:
        identity.options.check()
        subject = _subject(identity, longest_prompt, adapters)
        names = _digests(adapters, subject.adapters)
        layers = find_layers(subject.captured.graph.graph)
        detail.append(f"{layers.count} layers")
        if subject.captured.note:
            detail.append(subject.captured.note)
    with clock.phase("run transformers") as detail:
        reference = run_reference(
            source.files.path,
            source.load_hf_config(),
            source.stored,
            subject.sequences,
            dtype=source.dtype,
            device=source.device,
            layers=layers.path,
            dummy_seed=config.seed if source.is_dummy else None,
            trust_remote_code=config.trust_remote_code,
            tables={n: subject.built.buffers[n] for n in subject.captured.parameters.tables},
            constructed=subject.built.constructed,
            adapters=subject.adapters,
            experts=subject.captured.parameters.experts,
        )
        detail += [_compared_with(reference, source)]
    with clock.phase("load kernels"):
        _load_kernels(source.device)
    with clock.phase("run llmc") as detail:
        found = [compare(subject, reference, config.passes, identity.level)]
        detail += [f"{len(subject.steps)} steps", f"-O{identity.level}"]
    if reference.has_noise:
        with clock.phase("run llmc in float32") as detail:
            found.append(
                _compare_float32(identity, reference, longest_prompt, adapters, subject.built)
            )
    diagnosis = None
    wrong = [comparison for comparison in found if not comparison.is_good]
    if wrong:
        with clock.phase("find the cause") as detail:
            diagnosis = wrong[-1].diagnose()  # float32, if present, shows it more clearly
            detail += [str(culprit) for culprit in diagnosis.culprits]
    certificate = _certificate(identity, found, diagnosis, names)
    if certificate.key:
        CertificateStore(cache_dir()).save(certificate)
    if disable_culprits and certificate.is_fixable:
        return check_model(
            fixed_config(config, certificate),
            longest_prompt=longest_prompt,
            adapters=adapters,
            on_phase=on_phase,
        )
    return certificate


def _compare_float32(
    identity: Identity,
    reference: Reference,
    longest_prompt: int | None,
    adapters: Sequence[LoRARequest],
    served: BuiltModel,
) -> Comparison:
    """Check the rewrite in float32, because rounding in a 16-bit dtype hides small errors."""
    exact = dataclasses.replace(identity, source=identity.source.in_dtype(torch.float32))
    return compare(
        _subject(exact, longest_prompt, adapters, rounded_as=served),
        Reference(exact=reference.exact, rounded=reference.exact),
        identity.options.switches,
        level=0,
    )


def fixed_config(config: EngineConfig, certificate: Certificate) -> EngineConfig:
    """The same options without the culprits."""
    off = {c.name: False for c in certificate.culprits if c.kind == "pass"}
    kinds = {c.kind for c in certificate.culprits}
    cache = certificate.dtype if "cache" in kinds else config.kv_cache_dtype
    return dataclasses.replace(
        config,
        kv_cache_dtype=cache,
        passes={**config.passes, **off},
        opt_level=0 if "compiler" in kinds else config.opt_level,
    )


def _subject(
    identity: Identity,
    longest_prompt: int | None,
    adapters: Sequence[LoRARequest],
    rounded_as: BuiltModel | None = None,
) -> Subject:
    """The model to check. `rounded_as`: first round its weights, and the buffers that it computes,
    as in this model, which serves."""
    source = identity.source
    built = build_as_stored(source)
    if rounded_as is not None:
        for name in built.buffers.keys() & rounded_as.buffers.keys():
            built.buffers[name] = rounded_as.buffers[name].to(built.buffers[name].dtype)
    captured = capture_model(built, source.device, outline=identity.options.outline)
    encode = None
    if source.files.has_tokenizer:
        tokenizer = Tokenizer.load(
            source.files.path, trust_remote_code=source.config.trust_remote_code
        )
        encode = tokenizer.encode
    sequences = make_sequences(
        encode,
        vocab_size=captured.vocab_size,
        max_len=source.model_len,
        longest=longest_prompt,
        num_adapters=len(adapters),
    )

    def open_weights() -> WeightSource:
        weights = weights_of(source, built.module)
        if rounded_as is None:
            return weights
        dtypes = {name: t.dtype for name, t in rounded_as.module.state_dict().items()}
        return RoundedWeights(weights, rounded_as.dtype, dtypes)

    subject = Subject(
        built=built,
        captured=captured,
        options=for_parameters(identity.options, source, built),
        open_weights=open_weights,
        cache_dir=cache_dir(),
        sequences=sequences,
        steps=make_steps(sequences),
    )
    if not adapters:
        return subject
    dtype = (rounded_as or built).dtype
    return dataclasses.replace(subject, adapters=_read_adapters(subject, adapters, dtype))


def _read_adapters(
    subject: Subject, adapters: Sequence[LoRARequest], dtype: torch.dtype
) -> tuple[LoraWeights, ...]:
    """Read the adapters. InvalidRequestError for one that does not fit the model."""
    program = subject.rewrite(Variant(switches=subject.options.switches))
    bound = {
        node.name: torch.empty(node.meta["val"].shape, device="meta")
        for node, _ in program.adapter_inputs()
    }
    sizes = target_sizes(lora_targets(program, bound))
    expert_rank = subject.options.pipeline.max_lora_expert_rank
    stored = [open_adapter(one, sizes, program.parameters, expert_rank) for one in adapters]
    source, plain = subject.open_weights(), {}
    for name in {name for one in stored for name in one.copies}:
        weight = torch.empty(subject.captured.parameters.shapes[name], dtype=dtype)
        source.fill(name, weight)
        plain[name] = PlainWeight.of(weight)
    return tuple(
        read_adapter(one, of_one, dtype, plain)
        for one, of_one in zip(adapters, stored, strict=True)
    )


def _digests(adapters: Sequence[LoRARequest], weights: Sequence[LoraWeights]) -> tuple[str, ...]:
    """Each adapter's name, with a digest of its weights."""
    made = []
    for adapter, of_adapter in zip(adapters, weights, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for place, pair in sorted(of_adapter.items()):
            digest.update(" ".join(place).encode())
            for tensor in pair:
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        made.append(f"{adapter.lora_name} {digest.hexdigest()}")
    return tuple(made)


def _load_kernels(device: torch.device) -> None:
    """Load the kernels used for serving; a CPU without a compiler uses the references."""
    importlib.import_module(f"llmc.kernels.{'cpu' if device.type == 'cpu' else 'triton'}")
    if device.type == "cpu":
        load()


def _compared_with(reference: Reference, source: ModelSource) -> str:
    used = "float32" if reference.has_noise else source.dtype_name
    return f"eager attention in {used}"


def _certificate(
    identity: Identity,
    found: Sequence[Comparison],
    diagnosis: Diagnosis | None,
    adapters: tuple[str, ...],
) -> Certificate:
    """`found`: the comparison in the serving dtype, optionally followed by one in float32."""
    key = identity.key
    if key and adapters:  # the model without them has a separate certificate
        key = hashlib.blake2b(" ".join((key, *adapters)).encode(), digest_size=16).hexdigest()
    served = found[0]
    subject, source = served.subject, identity.source
    switches = identity.options.switches
    graph = subject.rewrite(Variant(switches=switches)).graph
    longest = max(s.prompt_len for s in subject.sequences)
    return Certificate(
        key=key,
        certified=all(comparison.is_good for comparison in found),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=source.files.name,
        architecture=type(subject.built.module).__name__,
        dtype=source.dtype_name,
        device=str(source.device),
        opt_level=identity.level,
        weights=identity.weights,
        adapters=adapters,
        versions=package_versions(),
        passes={p.name: p.is_on(switches) for p in identity.options.passes},
        kernels=kernels_of(graph),
        compared_with=f"transformers, {_compared_with(served.reference, source)}",
        num_sequences=len(subject.sequences),
        num_tokens=sum(len(s.token_ids) for s in subject.sequences),
        num_steps=len(subject.steps),
        longest_prompt=longest,
        average=served.average,
        limit=served.limit,
        noise=served.noise,
        logits=served.logits,
        compiled=served.compiled,
        float32=found[1].logits if len(found) > 1 else None,
        float32_limit=found[1].limit if len(found) > 1 else None,
        layers=served.layers,
        changed=served.changed,
        culprits=diagnosis.culprits if diagnosis else (),
        is_fixable=diagnosis.is_fixable if diagnosis else False,
        notes=(*served.notes, *_not_reached(subject, longest)),
        cache_note=_cache_note(served.reference),
    )


def _cache_note(reference: Reference) -> str:
    error = reference.cached_error
    if error is None or error <= _MAX_CACHED_ERROR:
        return ""
    return (
        "transformers computes other logits with its cache than without; llmc matches the latter "
        f"(relative difference {error:.1e})"
    )


def _not_reached(subject: Subject, longest: int) -> list[str]:
    """Notes about windows that are longer than every prompt, and so were not tested."""
    text = subject.built.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window > longest:
        return [
            f"no prompt is longer than the window of {window} tokens; "
            f"--longest-prompt {window + 64} would be"
        ]
    return []
