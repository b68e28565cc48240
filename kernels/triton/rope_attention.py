"""`rope_attention` in Triton: one kernel if a step has at most one token per request, else two.

The shapes decide, as CUDA graphs require: decode steps take one launch (attention_rope.py). With
more tokens per request, many programs would write the same keys.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from llmc.kernels.paged_attention import paged_attention
from llmc.kernels.prompts import Prompts
from llmc.kernels.rope_attention import rope_attention
from llmc.kernels.rope_write import rope_write
from llmc.kernels.triton import paged_attention as attention
from llmc.kernels.triton import rope_write as rope
from llmc.kernels.triton import write_kv
from llmc.kernels.triton.attention_rope import Rope
from llmc.kernels.triton.counters import orders_stores
from llmc.kernels.triton.define import define
from llmc.kernels.triton.launch import Plan
from llmc.kernels.write_kv import write_kv as op_of_writes

_ROPE = tuple(field.name for field in fields(Rope))


def plan(*args: Any, **named: Any) -> Plan[Tensor]:
    """One launch, for up to one token per request."""
    given = rope_attention.bind(args, named)
    del given["prompts"]
    parts = Rope(**{name: given.pop(name) for name in _ROPE})
    return attention.plan(**given, rope=parts)


def _run(*args: Any) -> Tensor:
    given = rope_attention.bind(args)
    hint = given["prompts"]
    few = given["query"].shape[0] <= given["context_len"].shape[0]
    few = few and orders_stores(given["query"].device)
    if few and (hint is None or not Prompts.read(hint).lengths):
        return plan(*args).run()
    taken = {**given, "query": _write(given)}
    return attention.run(*(taken[name] for name in paged_attention.defaults if name in taken))


def _write(given: dict[str, Any]) -> Tensor:
    """Fill the caches; the rotated query."""
    if given["cos_table"].shape[-1] == 0 and given["query_norm"] is None is given["key_norm"]:
        write_kv.plan(**{name: given[name] for name in op_of_writes.defaults}).run()
        return given["query"]  # type: ignore[no-any-return]
    return rope.plan(**{name: given[name] for name in rope_write.defaults}).run()


def _supports(**given: Any) -> bool:
    write = {name: given[name] for name in rope_write.defaults}
    read = {name: given[name] for name in paged_attention.defaults if name in given}
    return rope.supports(**write) and attention.supports(**paged_attention.bind((), read))


define(rope_attention, run=_run, supports=_supports)
