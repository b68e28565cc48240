"""`check_model`: EngineConfig -> Certificate. The order of it all.

tokens -> transformers, eager -----------------------------------.
capture -> passes -> kernels -> step, over the same tokens ------+-> compare -> certificate
                                                                 '-> bisect
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from llmc.check.bisect import Diagnosis
from llmc.check.certificate import Certificate, CertificateStore
from llmc.check.comparison import Comparison
from llmc.check.identity import Identity, identify
from llmc.check.reference import Reference, run_reference
from llmc.check.tokens import make_sequences, make_steps
from llmc.check.variants import RoundedWeights, Subject, Variant, kernels_of
from llmc.compiler.attention_fallback import build_any, build_plain, capture_any
from llmc.config import EngineConfig
from llmc.kernels.cpu.build import cache_dir, load
from llmc.load_test.machine import package_versions
from llmc.passes.base import OUTLINE, check_names
from llmc.passes.layers import find_layers
from llmc.startup.load import untied_config
from llmc.startup.start import OnPhase, PhaseClock
from llmc.text.tokenizer import Tokenizer
from llmc.weights.checkpoint import Readable
from llmc.weights.load import CheckpointWeights, DummyWeights, WeightSource
from llmc.weights.parameters import describe_parameters
from llmc.weights.tensors import open_tensors


def find_certificate(config: EngineConfig) -> Certificate | None:
    """What is on disk for exactly this model, these options and this machine."""
    key = identify(config).key
    return CertificateStore(cache_dir()).load(key) if key else None


def certificate_path(certificate: Certificate) -> str:
    """Where a certificate is kept; "" for one that nothing names."""
    return str(CertificateStore(cache_dir()).path(certificate.key)) if certificate.key else ""


def check_model(
    config: EngineConfig,
    *,
    longest_prompt: int | None = None,
    disable_guilty: bool = False,
    on_phase: OnPhase | None = None,
) -> Certificate:
    """Compare, find who is culprit if need be, and keep the certificate.

    With `disable_guilty` a model that can be fixed_by gets the certificate of the fixed_by options.
    Raises what loading a model raises, and CompileError where it can't be captured.
    """
    clock = PhaseClock(on_phase)
    with clock.phase("read config") as detail:
        identity = identify(config)
        detail += [identity.files.name, _plain(identity.dtype), str(identity.device)]
    with clock.phase("capture") as detail:
        subject = _subject(identity, longest_prompt)
        check_names(config.passes, subject.passes)
        layers = find_layers(subject.captured.graph.graph)
        detail.append(f"{layers.count} layers")
        if subject.captured.note:
            detail.append(subject.captured.note)
    with clock.phase("run transformers") as detail:
        reference = run_reference(
            identity.files.path,
            copy.deepcopy(identity.hf_config),
            identity.stored,
            subject.sequences,
            dtype=identity.dtype,
            device=identity.device,
            layers=layers.path,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
            trust_remote_code=config.trust_remote_code,
        )
        detail += [_compared_with(reference, identity.dtype)]
    with clock.phase("load kernels"):
        _load_kernels(identity.device)
    with clock.phase("run llmc") as detail:
        found = [Comparison(subject, reference, config.passes, identity.level)]
        detail += [f"{len(subject.steps)} steps", f"-O{identity.level}"]
    if reference.has_noise:
        with clock.phase("run llmc in float32") as detail:
            found.append(_compare_float32(identity, reference, longest_prompt))
    bisect = None
    wrong = [comparison for comparison in found if not comparison.is_good]
    if wrong:
        with clock.phase("find the cause") as detail:
            bisect = wrong[-1].find_blame()  # float32 shows it more sharply
            detail += [str(culprit) for culprit in bisect.culprits]
    certificate = _certificate(identity, found, bisect)
    if certificate.key:
        CertificateStore(cache_dir()).save(certificate)
    if disable_guilty and certificate.fixed_by:
        return check_model(
            cured_config(config, certificate), longest_prompt=longest_prompt, on_phase=on_phase
        )
    return certificate


def _compare_float32(
    identity: Identity, reference: Reference, longest_prompt: int | None
) -> Comparison:
    """The rewrite itself, free of the rounding that hides small mistakes in a short dtype."""
    exact = dataclasses.replace(identity, dtype=torch.float32)
    return Comparison(
        _subject(exact, longest_prompt, rounded_to=identity.dtype),
        Reference(exact=reference.exact, rounded=reference.exact),
        identity.config.passes,
        level=0,
    )


def cured_config(config: EngineConfig, certificate: Certificate) -> EngineConfig:
    """The same options without the culprits."""
    off = {c.name: False for c in certificate.culprits if c.kind == "pass"}
    compiled = any(c.kind == "compiler" for c in certificate.culprits)
    return dataclasses.replace(
        config,
        passes={**config.passes, **off},
        opt_level=0 if compiled else config.opt_level,
    )


def _open(identity: Identity) -> dict[str, Readable]:
    return open_tensors(identity.files.path, identity.stored, identity.dtype)


def _subject(
    identity: Identity, longest_prompt: int | None, rounded_to: torch.dtype | None = None
) -> Subject:
    """`rounded_to`: the weights are first rounded to this dtype, as those that serve are."""
    config, dtype = copy.deepcopy(identity.hf_config), identity.dtype
    is_dummy = identity.config.load_format == "dummy"
    stored = {} if is_dummy else _open(identity)
    built = build_any(config, dtype)
    untied = untied_config(config, describe_parameters(built.module).aliases, stored)
    if untied is not None:
        config, built = untied, build_any(untied, dtype)
    captured = capture_any(
        built,
        functools.partial(build_plain, config, dtype),
        identity.device,
        outline=identity.config.passes.get(OUTLINE, True),
    )
    encode = None
    if identity.files.has_tokenizer:
        tokenizer = Tokenizer.load(
            identity.files.path, trust_remote_code=identity.config.trust_remote_code
        )
        encode = tokenizer.encode
    sequences = make_sequences(
        encode,
        vocab_size=captured.vocab_size,
        max_len=identity.model_len,
        longest=longest_prompt,
    )

    def open_source() -> WeightSource:
        source: WeightSource
        if is_dummy:
            source = DummyWeights(identity.config.seed)
        else:
            source = CheckpointWeights(built.module, stored)
        return source if rounded_to is None else RoundedWeights(source, rounded_to)

    return Subject(
        built=built,
        captured=captured,
        parameters=describe_parameters(built.module),
        open_source=open_source,
        options=identity.options,
        extra=identity.extra,
        device=identity.device,
        cache_dir=cache_dir(),
        sequences=sequences,
        steps=make_steps(sequences),
    )


def _load_kernels(device: torch.device) -> None:
    """The same kernels as serve later; on a CPU without a compiler the references do."""
    importlib.import_module(f"llmc.kernels.{'cpu' if device.type == 'cpu' else 'triton'}")
    if device.type == "cpu":
        load()


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compared_with(reference: Reference, dtype: torch.dtype) -> str:
    used = "float32" if reference.has_noise else _plain(dtype)
    return f"eager attention in {used}"


def _certificate(
    identity: Identity, found: Sequence[Comparison], bisect: Diagnosis | None
) -> Certificate:
    """`found` begins with the comparison in the dtype that serves; one in float32 may follow."""
    served = found[0]
    subject = served.subject
    switches = identity.config.passes
    graph, _ = subject.rewrite(Variant(switches=switches))
    longest = max(s.prompt_len for s in subject.sequences)
    return Certificate(
        key=identity.key,
        certified=all(comparison.is_good for comparison in found),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=identity.files.name,
        architecture=type(subject.built.module).__name__,
        dtype=_plain(identity.dtype),
        device=str(identity.device),
        opt_level=identity.level,
        weights=identity.weights,
        versions=package_versions(),
        passes={p.name: switches.get(p.name, True) for p in subject.passes},
        kernels=kernels_of(graph),
        compared_with=f"transformers, {_compared_with(served.reference, identity.dtype)}",
        num_sequences=len(subject.sequences),
        num_tokens=sum(len(s.token_ids) for s in subject.sequences),
        num_steps=len(subject.steps),
        longest_prompt=longest,
        limit=served.limit,
        noise=served.noise,
        logits=served.logits,
        compiled=served.compiled,
        float32=found[1].logits if len(found) > 1 else None,
        float32_limit=found[1].limit if len(found) > 1 else None,
        layers=served.layers,
        changed=served.changed,
        culprits=bisect.culprits if bisect else (),
        fixed_by=bisect.fixed_by if bisect else False,
        notes=(*served.notes, *_not_reached(subject, longest)),
    )


def _not_reached(subject: Subject, longest: int) -> list[str]:
    """Windows longer than every prompt have not been tested."""
    text = subject.built.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and window > longest:
        return [
            f"no prompt is longer than the window of {window} tokens; "
            f"--longest-prompt {window + 64} would be"
        ]
    return []
