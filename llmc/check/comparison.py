"""One model's step against its reference: the measurements, the verdict, and who is to bisect."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmc.check.bisect import Culprit, Diagnosis, find_blame
from llmc.check.certificate import ChangedResult, LayerResult
from llmc.check.compare import (
    TOLERANCES,
    LogitsDeviation,
    allowed,
    allowed_hidden,
    deviation,
    logits_deviation,
    within,
)
from llmc.check.reference import Reference, Run
from llmc.check.variants import Subject, Variant
from llmc.errors import CompileError
from llmc.passes.base import Pass


class Comparison:
    """Measures on construction; `find_blame` searches afterwards, where something is wrong.

    Passes that mean to change the model are off for the comparison with transformers. With them
    the step is held against the captured graph with the same passes and nothing else.
    """

    def __init__(
        self, subject: Subject, reference: Reference, switches: Mapping[str, bool], level: int
    ) -> None:
        self.subject = subject
        self.reference = reference
        self.stated = TOLERANCES[str(subject.built.dtype).removeprefix("torch.")]
        self.noise = self._measure(reference.rounded.logits) if reference.has_noise else None
        self.limit = allowed(self.stated, self.noise)
        self.notes: list[str] = []
        changing = [
            p
            for p in subject.passes
            if p.changes_model and switches.get(p.name, True) and subject.matches(p)
        ]
        off = dict.fromkeys((p.name for p in changing), False)
        self.variant = Variant(switches={**switches, **off}, level=level)
        tapped = self._tapped(self.variant)
        self.layers = self._layer_results(tapped) if tapped else ()
        self.logits = self._measure(subject.run(Variant(switches=self.variant.switches)))
        self.compiled = self._measure(subject.run(self.variant)) if level else None
        self.changed = self._changed(changing, switches)

    @property
    def is_good(self) -> bool:
        return (
            within(self.logits, self.limit)
            and (self.compiled is None or within(self.compiled, self.limit))
            and all(layer.is_good for layer in self.layers)
            and all(changed.is_good for changed in self.changed)
        )

    def find_blame(self) -> Diagnosis:
        """Bisect; what the hidden states alone show is looked for in the hidden states."""
        wrong = tuple(
            Culprit(kind="pass", name=c.name, switch=f"--disable-pass {c.name}")
            for c in self.changed
            if not c.is_good
        )
        logits_good = self._good_logits(self.logits) and self._good_logits(self.compiled)
        if logits_good and all(layer.is_good for layer in self.layers):
            return Diagnosis(culprits=wrong, fixed_by=True)
        found = find_blame(
            self.subject,
            self.variant,
            self._good,
            captured_is_good=lambda: self._good_logits(self._measure(self.subject.run_captured())),
            first_layer=self._first_layer,
        )
        return Diagnosis(culprits=(*found.culprits, *wrong), fixed_by=found.fixed_by)

    def _good(self, variant: Variant) -> bool:
        """Hidden states too, where they can be told: a norm may hide a mistake from the logits."""
        tapped = self._tapped(variant) if self.layers and variant.level == 0 else None
        if tapped is None:
            return self._good_logits(self._measure(self.subject.run(variant)))
        layers = self._layer_results(tapped)
        return self._good_logits(self._measure(tapped.logits)) and all(x.is_good for x in layers)

    def _good_logits(self, found: LogitsDeviation | None) -> bool:
        return found is None or within(found, self.limit)

    def _first_layer(self, variant: Variant) -> int | None:
        tapped = self._tapped(variant)
        results = self._layer_results(tapped) if tapped else ()
        return next((x.layer for x in results if not x.is_good), None)

    def _measure(self, logits: list[Tensor]) -> LogitsDeviation:
        return logits_deviation(self.reference.exact.logits, logits, 2 * self.stated.relative)

    def _tapped(self, variant: Variant) -> Run | None:
        """A run that also gives hidden states; None, and a note, where they can't be told."""
        try:
            run = self.subject.run_tapped(variant)
        except CompileError as e:
            self._note(f"hidden states are not compared: {e}")
            return None
        if _shapes(run) != _shapes(self.reference.exact):
            self._note("hidden states are not compared: the model's layers return others")
            return None
        return run

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _layer_results(self, run: Run) -> tuple[LayerResult, ...]:
        exact, rounded = self.reference.exact.hidden, self.reference.rounded.hidden
        results = []
        for i, (want, have) in enumerate(zip(exact, run.hidden, strict=True)):
            noise = deviation(want, rounded[i]) if self.reference.has_noise else None
            found = deviation(want, have)
            results.append(
                LayerResult(
                    layer=i,
                    max_abs=found.max_abs,
                    relative=found.relative,
                    limit=allowed_hidden(self.stated, noise),
                )
            )
        return tuple(results)

    def _changed(
        self, changing: list[Pass], switches: Mapping[str, bool]
    ) -> tuple[ChangedResult, ...]:
        results = []
        for p in changing:
            others = {q.name: False for q in changing if q is not p}
            if p.place == "late":
                self.notes.append(f"{p.name} changes the model late, so nothing can vouch for it")
                continue
            wanted = self.subject.run_captured((p,))
            have = self.subject.run(Variant(switches={**switches, **others}))
            found = logits_deviation(wanted, have, 2 * self.stated.relative)
            results.append(
                ChangedResult(
                    name=p.name,
                    logits=found,
                    limit=self.stated,
                    is_good=within(found, self.stated),
                )
            )
        return tuple(results)


def _shapes(run: Run) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in layer] for layer in run.hidden]
