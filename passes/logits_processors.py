"""User logits processors: torch functions of the whole batch that become part of the graph.

    request is assigned row r --begin(extra_args)--> values in the processor's tables, at r
    step: logits [S, V], tables gathered by row [S, ...] --apply--> logits [S, V] --> append_sampler

`apply` is traced once, when the model is loaded, so it runs inside the compiled step and its CUDA
graphs. Its result goes through penalties, biases, bans and masks like the model's own logits, so
structured output follows its grammar whatever a processor does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from llmc.errors import ConfigError
from llmc.kernels.process_logits import process_logits
from llmc.passes.base import Notes, Pass, graph_pass
from llmc.passes.edit import arguments, aten, calls, emit, set_arguments, val
from llmc.passes.inputs import fake_like, step_input
from llmc.passes.user_code import called, check_names, code_digest, find, plain

GROUP = "llmc.logits_processors"
_DTYPES = (torch.float32, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """State that a processor keeps for each request: a tensor of `shape` and dtype float32, int32
    or int64. For a request that does not use the processor, all its elements are `neutral`."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    neutral: float = 0

    @property
    def columns(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsBatch:
    """What `apply` can read about the requests whose logits [S, V] it is given, one per row.

    `state`: the processor's tables, [S, *shape]. `length` [S] int32: the number of tokens of each
    request so far, prompt and output, at least 1; `prompt_length` [S] int32: that of its prompt.
    """

    state: Mapping[str, Tensor]
    length: Tensor
    prompt_length: Tensor
    row: Tensor
    history: Tensor

    def tokens(self) -> Tensor:
        """[S, L] int32: the tokens of each request; those from `length` on are undefined."""
        return self.history.index_select(0, self.row)


class LogitsProcessor(ABC):
    """Changes the logits of requests that opt in with `SamplingParams(extra_args={...})`.

    It is created once, without arguments. `apply` must not change the logits of a request with
    neutral tables, and no request's logits may depend on another's.
    """

    arguments: Sequence[str] = ()  # the extra_args that this processor accepts

    @property
    def name(self) -> str:
        return type(self).__name__

    def tables(self, vocab_size: int) -> Mapping[str, RowTable]:
        """The processor's tables by name; `vocab_size` is the width of the logits."""
        return {}

    def begin(
        self, args: Mapping[str, Any], prompt_token_ids: Sequence[int], vocab_size: int
    ) -> Mapping[str, Any]:
        """Return the table values for a request that has some of `arguments`, as numbers, lists or
        tensors. Omitted tables are neutral. Raise an exception to reject the request."""
        return {}

    @abstractmethod
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """logits [S, V] float32 -> changed logits; only torch functions, since it is traced."""


def user_processors(given: Iterable[object]) -> tuple[LogitsProcessor, ...]:
    """The installed processors, then the given ones; ConfigError for any other object."""
    found = tuple(_as_processor(item, source) for item, source in find(GROUP, given, "class"))
    check_names([p.name for p in found], "logits processors")
    arguments = [name for p in found for name in p.arguments]
    check_names(arguments, "arguments of logits processors")
    return found


def _as_processor(item: object, source: str) -> LogitsProcessor:
    if isinstance(item, type) or (callable(item) and not isinstance(item, LogitsProcessor)):
        item = called(item, source)
    if not isinstance(item, LogitsProcessor):
        raise ConfigError(f"{source} is not a logits processor: derive it from LogitsProcessor")
    return item


def tables_of(processor: LogitsProcessor, vocab_size: int) -> dict[str, RowTable]:
    """The processor's tables by the names of their step inputs."""
    found = {}
    for name, table in processor.tables(vocab_size).items():
        if not name.isidentifier() or table.dtype not in _DTYPES or table.columns < 1:
            raise ConfigError(
                f"logits processor {processor.name!r} has a table {name!r} of {table}; a table's "
                "name must be an identifier, its dtype float32, int32 or int64, and no dimension 0"
            )
        found[table_name(processor, name)] = table
    return found


def table_name(processor: LogitsProcessor, name: str) -> str:
    return f"processor_{processor.name}_{name}"


def processor_passes(processors: Sequence[LogitsProcessor]) -> tuple[Pass, ...]:
    """One pass per processor, with its name; logits go through them in this order."""
    return tuple(dataclasses.replace(apply_processor(processor=p), name=p.name) for p in processors)


def processors_digest(processors: Sequence[LogitsProcessor]) -> str | None:
    """Digest of their code and attributes; None if a graph with them in it must not be cached."""
    parts = []
    for processor in processors:
        code, options = code_digest(type(processor)), plain(vars(processor))
        if code is None or options is None:
            return None
        parts.append([processor.name, code, options])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@graph_pass()
def apply_processor(gm: fx.GraphModule, *, processor: LogitsProcessor) -> Notes:
    """Apply a user's function before logits are processed. Reported logits remain the model's own.

    Before:
        processed = llmc.process_logits(logits [S, V], row [S], length [S], history, prompt_len ...)
    After:
        state = each table [N, ...] of the processor, at row
        changed [S, V] = what processor.apply(logits, state, ...) calls
        processed = llmc.process_logits(changed, row, length, history, prompt_len ...)
    """
    graph = gm.graph
    [sampler] = calls(graph, process_logits.overload)
    given = arguments(sampler)
    logits = given.logits
    tables = processor.tables(int(val(logits).shape[-1]))
    inputs = {
        name: step_input(
            graph,
            table_name(processor, name),
            fake_like(logits, 4, *((table.columns,) if table.shape else ()), dtype=table.dtype),
        )
        for name, table in tables.items()
    }

    def function(logits: Tensor, *given: Tensor) -> Tensor:
        row, length, history, prompt_len, *values = given
        state = {
            name: value.index_select(0, row).view(-1, *table.shape)
            for (name, table), value in zip(tables.items(), values, strict=True)
        }
        batch = LogitsBatch(
            state=state,
            length=length.clamp(min=1),  # 0 in rows without a sample, and length - 1 is an index
            prompt_length=prompt_len.index_select(0, row),
            row=row,
            history=history,
        )
        return processor.apply(logits, batch)

    with graph.inserting_before(sampler):
        # a copy: the user's function may write to it, and the model's own logits are reported
        own = emit(graph, aten.clone.default, emit(graph, aten.to.dtype, logits, torch.float32))
        read = (given.row, given.length, given.history, given.prompt_len)
        args = (own, *read, *inputs.values())
        changed = _inline(graph, _traced(function, args, processor), args, processor)
    set_arguments(sampler, logits=changed)
    return []


def _traced(function: Any, args: Sequence[Any], processor: LogitsProcessor) -> fx.Graph:
    """The ATen calls of `function`; ConfigError if it does not consist of torch functions."""
    fakes = [val(node) for node in args]
    mode = detect_fake_mode(fakes)
    assert mode is not None, "values of a captured graph are fake"
    num_guards = len(mode.shape_env.guards) if mode.shape_env is not None else 0
    try:
        with torch.no_grad(), mode:
            traced = make_fx(function)(*fakes).graph
    except Exception as e:  # a user's code can raise anything
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ConfigError(
            f"logits processor {processor.name!r} can't become part of the graph: {reason}; use "
            "torch functions of logits and batch only: no .item(), no `if` on values, and other "
            "tensors from tables()"
        ) from e
    result = next(iter(reversed(traced.nodes))).args[0]
    value = result.meta.get("val") if isinstance(result, fx.Node) else None
    if (
        not isinstance(value, Tensor)
        or list(map(str, value.shape)) != list(map(str, fakes[0].shape))
        or not value.is_floating_point()
    ):
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(result)
        raise ConfigError(
            f"logits processor {processor.name!r} returns {found}; it must return logits of the "
            f"shape that it is given"
        )
    if mode.shape_env is not None and len(mode.shape_env.guards) > num_guards:
        raise ConfigError(
            f"logits processor {processor.name!r} works only for some numbers of requests: its "
            f"Python code depends on {mode.shape_env.guards[-1].expr}"
        )
    return traced


def _inline(
    graph: fx.Graph, traced: fx.Graph, args: Sequence[Any], processor: LogitsProcessor
) -> fx.Node:
    """Copy the traced calls to the insertion point; returns the node of the result."""
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, args, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = {"val": node.meta.get("val")}
        elif node.op == "output":
            result: fx.Node = env[node.args[0]]
        elif node.op != "placeholder":
            raise ConfigError(
                f"logits processor {processor.name!r} creates a tensor from Python numbers in "
                "apply(); use torch.full, torch.arange or a table"
            )
    return result
