"""Compares one model's step with its reference: the measurements, the verdict, and the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmc.check.bisect import Culprit, Diagnosis, Kind, bisect
from llmc.check.certificate import ChangedResult, LayerResult
from llmc.check.compare import (
    TOLERANCES,
    Average,
    LogitsDeviation,
    Tolerance,
    allowed,
    allowed_hidden,
    deviation,
    logits_deviation,
    within,
)
from llmc.check.reference import Reference, Run
from llmc.check.variants import Subject, Variant
from llmc.errors import CompileError
from llmc.kernels.cache_dtype import CACHE_DTYPES, FP8, narrower
from llmc.passes.base import Pass
from llmc.passes.inputs import WeightInput, input_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The measurements of `compare`, and their limits."""

    subject: Subject
    reference: Reference
    variant: Variant  # the compared one: passes that change the model on purpose are off
    average: Average  # of errors, over tokens
    stated: Tolerance  # of the dtype
    limit: Tolerance  # the same, allowing for the model's own rounding
    noise: LogitsDeviation | None  # of the model's own rounding
    logits: LogitsDeviation
    compiled: LogitsDeviation | None  # the same at -O2 and above
    layers: tuple[LayerResult, ...]  # empty if hidden states can't be compared
    changed: tuple[ChangedResult, ...]
    notes: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return (
            self._allows(self.logits)
            and self._allows(self.compiled)
            and all(layer.is_good for layer in self.layers)
            and all(changed.is_good for changed in self.changed)
        )

    def diagnose(self) -> Diagnosis:
        """Bisect by the logits and, if they can be compared, by the hidden states."""
        wrong = tuple(
            Culprit(kind=c.kind, name=c.name, switch=c.switch)
            for c in self.changed
            if not c.is_good
        )
        logits_good = self._allows(self.logits) and self._allows(self.compiled)
        if logits_good and all(layer.is_good for layer in self.layers):
            return Diagnosis(culprits=wrong, is_fixable=True)
        found = bisect(
            self.subject,
            self.variant,
            self._is_good,
            captured_is_good=self._captured_is_good,
            first_layer=self._first_layer,
        )
        return Diagnosis(culprits=(*found.culprits, *wrong), is_fixable=found.is_fixable)

    def _captured_is_good(self) -> bool:
        """Whether the captured graph is right. It has no adapters, so with some this is assumed."""
        if self.subject.adapters:
            return True
        return self._allows(self._measure(self.subject.run_captured()))

    def _is_good(self, variant: Variant) -> bool:
        """Compare hidden states too, if available: a norm can hide an error from the logits."""
        tapped = None
        if self.layers and variant.level == 0:
            tapped, _ = _run_tapped(self.subject, self.reference, variant)
        if tapped is None:
            return self._allows(self._measure(self.subject.run(variant)))
        layers = _layer_results(tapped, self.reference, self.stated, self.average)
        return self._allows(self._measure(tapped.logits)) and all(x.is_good for x in layers)

    def _first_layer(self, variant: Variant) -> int | None:
        tapped, _ = _run_tapped(self.subject, self.reference, variant)
        results = (
            _layer_results(tapped, self.reference, self.stated, self.average) if tapped else ()
        )
        return next((x.layer for x in results if not x.is_good), None)

    def _allows(self, found: LogitsDeviation | None) -> bool:
        return found is None or within(found, self.limit)

    def _measure(self, logits: list[Tensor]) -> LogitsDeviation:
        return _measure(logits, self.reference, self.stated, self.average)


def compare(
    subject: Subject, reference: Reference, switches: Mapping[str, bool], level: int
) -> Comparison:
    """Compare the step with transformers, without the passes that change the model on purpose. With
    each of these, compare it with the captured graph after the same pass. With each pass that
    rounds, compare the step with the step without that pass, and with a narrower KV cache with the
    step that has one in the model's dtype."""
    stated = TOLERANCES[str(subject.built.dtype).removeprefix("torch.")]
    average = _average_for(subject, stated)
    noise = None
    if reference.has_noise:
        noise = _measure(reference.rounded.logits, reference, stated, average)
    changing = [
        p
        for p in subject.options.passes
        if p.changes_model and p.is_on(switches) and subject.matches(p)
    ]
    rounding = [p for p in subject.options.passes if p.rounds and p.is_on(switches)]
    off = dict.fromkeys((p.name for p in (*changing, *rounding)), False)
    plain = Variant(switches={**switches, **off})
    variant = Variant(switches=plain.switches, level=level)
    tapped, note = _run_tapped(subject, reference, plain)
    logits = _measure(subject.run(plain), reference, stated, average)
    compiled = _measure(subject.run(variant), reference, stated, average) if level else None
    late = [p for p in changing if p.place == "late"]
    notes = [note] if note else []
    notes += [f"{p.name} changes the model late, so its effect can't be compared" for p in late]
    return Comparison(
        subject=subject,
        reference=reference,
        variant=variant,
        average=average,
        stated=stated,
        limit=allowed(stated, noise),
        noise=noise,
        logits=logits,
        compiled=compiled,
        layers=_layer_results(tapped, reference, stated, average) if tapped else (),
        changed=(
            *_compare_changed(subject, changing, off, switches, stated),
            *_compare_rounded(subject, rounding, switches, level),
            *_compare_cache(subject, switches, level),
        ),
        notes=tuple(notes),
    )


def _average_for(subject: Subject, limit: Tolerance) -> Average:
    """How to average errors with this limit: rounding may change what a model chooses."""
    is_exact = limit == TOLERANCES["float32"]
    return "mean" if is_exact or not subject.chooses else "median"


def _measure(
    logits: list[Tensor], reference: Reference, stated: Tolerance, average: Average
) -> LogitsDeviation:
    return logits_deviation(reference.exact.logits, logits, 2 * stated.relative, average)


def _run_tapped(subject: Subject, reference: Reference, variant: Variant) -> tuple[Run | None, str]:
    """A run with hidden states; None, and the reason, if they can't be recorded."""
    try:
        run = subject.run_tapped(variant)
    except CompileError as e:
        return None, f"hidden states are not compared: {e}"
    if _shapes(run) != _shapes(reference.exact):
        return None, "hidden states are not compared: the model's layers return different ones"
    return run, ""


def _shapes(run: Run) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in layer] for layer in run.hidden]


def _layer_results(
    run: Run, reference: Reference, stated: Tolerance, average: Average
) -> tuple[LayerResult, ...]:
    exact, rounded = reference.exact.hidden, reference.rounded.hidden
    results = []
    for i, (want, have) in enumerate(zip(exact, run.hidden, strict=True)):
        noise = deviation(want, rounded[i], average) if reference.has_noise else None
        found = deviation(want, have, average)
        results.append(
            LayerResult(
                layer=i,
                max_abs=found.max_abs,
                relative=found.relative,
                limit=allowed_hidden(stated, noise),
            )
        )
    return tuple(results)


def _compare_changed(
    subject: Subject,
    changing: Sequence[Pass],
    off: Mapping[str, bool],
    switches: Mapping[str, bool],
    stated: Tolerance,
) -> tuple[ChangedResult, ...]:
    results = []
    subject = subject.without_adapters()
    for p in changing:
        if p.place == "late":
            continue
        wanted = subject.run_captured((p,))
        have = subject.run(Variant(switches={**switches, **off, p.name: True}))
        results.append(_changed(subject, p, "the model with it", wanted, have, stated))
    return tuple(results)


def _compare_rounded(
    subject: Subject, rounding: Sequence[Pass], switches: Mapping[str, bool], level: int
) -> tuple[ChangedResult, ...]:
    """With inputs in fp8 its tolerance applies, with 8-bit integers bfloat16's, with 16-bit ones
    float16's."""
    variant = Variant(switches=switches, level=level)
    results = []
    for p in rounding:
        if not subject.changes(p, variant):
            continue
        without = replace(variant, switches={**switches, p.name: False})
        wanted, have = subject.run(without), subject.run(variant)
        limit = _rounding_limit(subject, variant)
        results.append(_changed(subject, p, "the step without it", wanted, have, limit))
    return tuple(results)


def _compare_cache(
    subject: Subject, switches: Mapping[str, bool], level: int
) -> tuple[ChangedResult, ...]:
    """The tolerance is that of the cache's dtype; that of int8 is bfloat16's."""
    name, own = subject.options.pipeline.kv_cache_dtype, subject.built.dtype
    wanted = CACHE_DTYPES[name]
    if wanted is None or narrower(own, wanted) == own:
        return ()
    plain = Variant(switches=switches, level=level)
    own_name = str(own).removeprefix("torch.")
    found = _result(
        subject,
        subject.run(plain),
        subject.run(replace(plain, kv_cache_dtype=name)),
        TOLERANCES["float8" if wanted in FP8 else "bfloat16" if wanted == torch.int8 else name],
        kind="cache",
        name=f"a KV cache in {name}",
        beside=f"the step with one in {own_name}",
        switch=f"--kv-cache-dtype {own_name}",
    )
    return (found,)


def _rounding_limit(subject: Subject, variant: Variant) -> Tolerance:
    options = subject.options.pipeline
    if options.float8_activations:
        roles = (input_of(node) for node in subject.rewrite(variant).graph.graph.nodes)
        if any(
            isinstance(role, WeightInput) and role.quantized and role.quantized.to.format == "fp8"
            for role in roles
        ):
            return TOLERANCES["float8"]
    return TOLERANCES["bfloat16" if options.activation_bits == 8 else "float16"]


def _changed(
    subject: Subject,
    p: Pass,
    beside: str,
    wanted: Sequence[Tensor],
    have: Sequence[Tensor],
    limit: Tolerance,
) -> ChangedResult:
    switch = f"--disable-pass {p.name}"
    return _result(
        subject, wanted, have, limit, kind="pass", name=p.name, beside=beside, switch=switch
    )


def _result(
    subject: Subject,
    wanted: Sequence[Tensor],
    have: Sequence[Tensor],
    limit: Tolerance,
    *,
    kind: Kind,
    name: str,
    beside: str,
    switch: str,
) -> ChangedResult:
    found = logits_deviation(wanted, have, 2 * limit.relative, _average_for(subject, limit))
    return ChangedResult(
        kind=kind,
        name=name,
        beside=beside,
        switch=switch,
        logits=found,
        limit=limit,
        is_good=within(found, limit),
    )
