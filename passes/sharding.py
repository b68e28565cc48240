"""Which values of a graph can be cut into a part for each rank, proven op by op.

A region starts from one value that is to be cut. The rules of the ops that compute it and that read
it determine how the neighboring values must be cut, and so on, until the region ends at linears. A
linear whose output is cut has its rows cut; one whose input is cut has its columns cut, so its
outputs are terms of a sum over the ranks. An op without a rule ends the attempt, and nothing of the
region is cut: only rules (sharding_rules.py) prove that the sum equals the original value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.passes.edit import val
from llmc.passes.inputs import CacheInput, ConstantInput, WeightInput, input_of

Sections = tuple[tuple[int, int], ...]  # (length, parts), end to end, as in Shard
Rule = Callable[["Region", fx.Node], None]  # cuts or keeps the call's values, as they imply


class Unprovable(Exception):
    """The value can't be cut, or no rule says that it can; the message says why."""


class NoWholeBlocks(Unprovable):
    """The parts of a quantized weight would not be whole blocks of its format."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension `dim` of a value is divided among the ranks."""

    dim: int
    sections: Sections

    @property
    def length(self) -> int:
        """The size of `dim` on each rank."""
        return sum(length // parts for length, parts in self.sections)


class Region:
    """A set of cuts that imply each other, by the rules that `rule_of` returns for calls.

    `blocks`: for weights that will be quantized, the block size in each dimension; parts must be
    multiples of it. `known` is an accepted region that this one extends.
    """

    def __init__(
        self,
        size: int,
        rule_of: Callable[[fx.Node], Rule | None],
        blocks: Mapping[fx.Node, Sequence[int]],
        known: Region | None = None,
    ) -> None:
        self.size = size
        self.blocks = blocks
        self._rule_of = rule_of
        self.cuts: dict[fx.Node, Cut] = dict(known.cuts) if known else {}
        self.whole: set[fx.Node] = set(known.whole) if known else set()
        self.terms: set[fx.Node] = set(known.terms) if known else set()  # of a sum over the ranks
        self._queue: deque[fx.Node] = deque()
        self._unsure: list[tuple[fx.Node, Sequence[fx.Node]]] = []  # (call, unknown pieces)
        self._call: fx.Node | None = None  # the call whose rule is being applied

    def attempt(self) -> Region:
        """A new region that starts with the cuts of this one."""
        return Region(self.size, self._rule_of, self.blocks, self)

    def cut(self, node: Any, dim: int, sections: Sections) -> None:
        """Require this cut of a value. Raises Unprovable if it is not possible."""
        shape = val(node).shape
        dim %= len(shape)
        if all(parts == 1 for _, parts in sections):
            self.keep(node)
            return
        wanted = Cut(dim, sections)
        if node in self.cuts:
            if self.cuts[node] != wanted:
                raise Unprovable(f"{node.name} would have to be cut in two ways")
            return
        if node in self.whole:
            raise Unprovable(f"{node.name} is needed whole")
        if node.op == "placeholder" and not isinstance(
            input_of(node), WeightInput | ConstantInput | CacheInput
        ):
            raise Unprovable(f"{node.name} is an input of the step")
        if not isinstance(shape[dim], int) or shape[dim] != sum(n for n, _ in sections):
            raise Unprovable(f"{node.name} has another size")
        if any(length % parts for length, parts in sections):
            raise Unprovable(f"{node.name} is not divisible by {self.size}")
        block = self.blocks[node][dim] if node in self.blocks else 1
        for length, parts in sections:
            if length // parts % block:
                raise NoWholeBlocks(
                    f"{length} / {parts} is not a multiple of {block}, the block size of a "
                    "quantized weight"
                )
        self.cuts[node] = wanted
        self._queue.append(node)

    def keep(self, node: Any) -> None:
        """Require that a value is whole on every rank."""
        if node in self.cuts:
            raise Unprovable(f"{node.name} is needed whole")
        self.whole.add(node)

    def grow(self) -> None:
        """Follow the rules until nothing new is cut. Raises Unprovable if they fail."""
        touched: set[fx.Node] = set()
        while self._queue or self._unsure:
            if not self._queue:
                call, pieces = self._unsure.pop()
                for piece in pieces:
                    if piece not in self.cuts:
                        self.keep(piece)
                self._apply(call)
                continue
            node = self._queue.popleft()
            for call in (node, *node.users):
                if call.op != "placeholder":
                    touched.add(call)
                    self._apply(call)
        for call in touched:
            for value in (call, *call.all_input_nodes):
                if value not in self.cuts:
                    self.whole.add(value)

    def _apply(self, call: fx.Node) -> None:
        rule = self._rule_of(call) if call.op == "call_function" else None
        if rule is None:
            raise Unprovable(f"no rule for {call.name}")
        self._call = call
        rule(self, call)

    def divide(
        self, source: fx.Node, dim: int, pieces: Sequence[tuple[fx.Node | None, int]]
    ) -> None:
        """Relate `source` to its pieces (value, length), end to end; None: an unused piece."""
        cut = self.cuts.get(source)
        if cut is not None:
            at = list(cut.sections)
            for piece, length in pieces:
                own: list[tuple[int, int]] = []
                while at and sum(n for n, _ in own) < length:
                    own.append(at.pop(0))
                if sum(n for n, _ in own) != length:
                    raise Unprovable(f"{source.name} is split across its parts")
                if piece is not None:
                    self.cut(piece, dim, tuple(own))
            return
        unknown = [p for p, _ in pieces if p is not None and p not in {*self.cuts, *self.whole}]
        if unknown:
            assert self._call is not None, "called by a rule"
            self._unsure.append((self._call, unknown))
            return
        sections: list[tuple[int, int]] = []
        for piece, length in pieces:
            found = self.cuts.get(piece) if piece is not None else None
            if found is not None and found.dim != dim:
                raise Unprovable(f"{source.name} is split across its parts")
            sections += found.sections if found is not None else [(length, 1)]
        self.cut(source, dim, tuple(sections))
