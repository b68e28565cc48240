"""Checks that the packages llmc needs are installed. Imports none of them but `packaging`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import InvalidRequirement, Requirement

DISTRIBUTION = "llmc-engine"
EXTRAS = {"plot": "plots of llmc bench", "otel": "traces"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. `advice` is empty if nothing needs to be done; `is_needed`: llmc fails without."""

    name: str
    value: str
    advice: str = ""
    is_needed: bool = False

    @property
    def is_ok(self) -> bool:
        return not self.advice

    @property
    def is_missing(self) -> bool:
        return self.is_needed and not self.is_ok


def examine_packages() -> Iterator[Finding]:
    """A finding for each package that llmc needs, and for each of EXTRAS."""
    yield from check_packages(requires(DISTRIBUTION) or ())


def check_packages(texts: Iterable[str]) -> Iterator[Finding]:
    """The distribution's requirements, and those of the extras in EXTRAS."""
    extras: dict[str, list[Requirement]] = {name: [] for name in EXTRAS}
    for text in texts:
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield _package(need)
            continue
        for name, needs in extras.items():
            if need.marker.evaluate({"extra": name}):
                needs.append(need)
    for name, needs in extras.items():
        missing = [need.name for need in needs if not _package(need).is_ok]
        purpose = EXTRAS[name]
        if needs and missing:
            advice = f"for {purpose}: pip install '{DISTRIBUTION}[{name}]'"
            yield Finding(name=f"extra {name}", value=f"no {', '.join(missing)}", advice=advice)
        elif needs:
            yield Finding(name=f"extra {name}", value=f"installed, for {purpose}")


def _package(need: Requirement) -> Finding:
    install = f"pip install '{need.name}{need.specifier}'"
    try:
        found = version(need.name)
    except PackageNotFoundError:
        return Finding(name=need.name, value="not installed", advice=install, is_needed=True)
    if need.specifier.contains(found, prereleases=True):
        return Finding(name=need.name, value=found)
    return Finding(name=need.name, value=found, advice=install, is_needed=True)
