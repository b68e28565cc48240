"""Limits of the memory and time that a chat template takes: it is a program from the internet.

jinja2's sandbox keeps a template from Python's internals, but `'a' * 10**10` takes all memory, in
one operation that no timeout can end. `LimitedEnvironment` estimates what an operation builds
before it runs. No real template comes near the limits.

    with limited(): template.render(...)     # without it, there are no limits
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_VALUE = 64 << 20  # bytes of a value; of the most that fits a request's body, several times over
MAX_BUILT = 1 << 30  # bytes of all values, since all may be kept
MAX_BITS = 1 << 16  # of an integer: arithmetic takes time that is quadratic in them
MAX_WIDTH = 100_000  # of a formatted field
MAX_COUNT = 1_000_000  # of slices and similar
MAX_CPU_S = 10.0
TICKS = 64  # between two looks at the clock

_FIELD = re.compile(r"%(?:\(.*?\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_DIGITS = re.compile(r"\d+")
_OVERHEAD = 64  # bytes of an item of a container
_OF_JINJA = ("_loop_vars", "_block_vars")  # arguments of a call that are not the template's


class TemplateLimitError(SecurityError):
    """A template builds too much, or takes too long."""


class _Budget:
    """What one rendering has used. Containers can't change in the sandbox, so their sizes are kept,
    with the containers, whose ids must not be reused."""

    def __init__(self) -> None:
        self._built = 0
        self._left = 1
        self._deadline = time.thread_time() + MAX_CPU_S
        self._sizes: dict[int, tuple[int, Any]] = {}

    def tick(self) -> None:
        self._left -= 1
        if not self._left:
            self._left = TICKS
            if time.thread_time() > self._deadline:
                raise TemplateLimitError(f"it takes more than {MAX_CPU_S:g} s")

    def need(self, size: int) -> None:
        """Raise if a value of `size` bytes is too large, before it is built."""
        if size > MAX_VALUE:
            raise TemplateLimitError(f"it builds a value of more than {MAX_VALUE} bytes")

    def take(self, value: Any) -> Any:
        """Count a value that was built."""
        if isinstance(value, str | bytes | list | tuple | dict | set | frozenset):
            own = sys.getsizeof(value)
            self._built += own
            self.need(own if isinstance(value, str | bytes) else self.size(value))
            if self._built > MAX_BUILT:
                raise TemplateLimitError(f"it builds more than {MAX_BUILT} bytes in all")
        return value

    def size(self, value: Any) -> int:
        """Bytes of a value with all that it contains, written out: what occurs twice counts twice.
        So it is also a measure of its text, and of the time to compare it."""
        if isinstance(value, str | bytes):
            return sys.getsizeof(value)
        if isinstance(value, Mapping):
            parts: Iterable[Any] = (part for item in value.items() for part in item)
        elif isinstance(value, list | tuple | set | frozenset):
            parts = value
        else:
            return _OVERHEAD
        known = self._sizes.get(id(value))
        if known is None:
            known = sum(self.size(part) for part in parts) + _OVERHEAD * (1 + len(value)), value
            self._sizes[id(value)] = known
        return known[0]


class _Active(threading.local):
    budget: _Budget | None = None


_active = _Active()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit the templates that this thread compiles and renders."""
    if _active.budget is not None:
        yield
        return
    _active.budget = _Budget()
    try:
        yield
    finally:
        _active.budget = None


# ---- what is looked at before an operation ----


def _check_product(budget: _Budget, left: Any, right: Any) -> None:
    for count, repeated in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(repeated, str | bytes | list | tuple):
            budget.need(budget.size(repeated) * count)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it computes an integer of more than {MAX_BITS} bits")


def _check_sum(budget: _Budget, left: Any, right: Any) -> None:
    if isinstance(left, str | bytes | list | tuple):
        budget.need(budget.size(left) + budget.size(right))


def _check_percent(budget: _Budget, text: Any, values: Any) -> None:
    if not isinstance(text, str | bytes):
        return
    fields = _FIELD.findall(text if isinstance(text, str) else text.decode("latin-1"))
    for width in (number for field in fields for number in field):
        _check_width(int(width[:9]) if width.isdecimal() else 0)
    if any("*" in field for field in fields):
        for value in values if isinstance(values, tuple) else (values,):
            _check_width(value)
    uses = len(fields) if isinstance(values, Mapping) else 1
    budget.need(budget.size(text) + budget.size(values) * uses)


def _check_width(width: Any, most: int = MAX_WIDTH) -> None:
    if isinstance(width, int) and abs(width) > most:
        raise TemplateLimitError(f"it asks for a width or count above {most}")


def _check_padding(budget: _Budget, text: Any, width: Any = 80, *_: Any) -> None:
    if isinstance(width, int):
        budget.need(width * 4)


def _check_join(budget: _Budget, separator: Any, items: Any, *_: Any) -> None:
    budget.need(budget.size(items) + budget.size(separator) * len(items))


def _check_replace(budget: _Budget, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    if not isinstance(text, str | bytes):  # the filter takes anything
        text, old = str(text), str(old)
    budget.need(budget.size(text) + text.count(old) * budget.size(new))


def _check_tabs(budget: _Budget, text: Any, tabsize: Any = 8) -> None:
    budget.need(budget.size(text) + text.count("\t") * max(tabsize, 1) * 4)


def _check_translate(budget: _Budget, text: Any, table: Any, *_: Any) -> None:
    budget.need(len(text) * budget.size(table))


def _check_split(budget: _Budget, text: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    count = len(text) // 2 if sep is None else text.count(sep)
    budget.need(budget.size(text) + count * _OVERHEAD)


def _check_lines(budget: _Budget, text: Any, *_: Any, **__: Any) -> None:
    budget.need(budget.size(text) + text.count("\n") * _OVERHEAD)


def _check_bytes(budget: _Budget, number: Any, length: Any = 1, *_: Any, **__: Any) -> None:
    _check_width(length)


Check = Callable[..., None]
_OPERATORS: Mapping[str, Check] = {
    "*": _check_product,
    "**": _check_power,
    "+": _check_sum,
    "%": _check_percent,
}
_METHODS: Mapping[str, Check] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_padding),
    **dict.fromkeys(("split", "rsplit"), _check_split),
    "splitlines": _check_lines,
    "expandtabs": _check_tabs,
    "join": _check_join,
    "replace": _check_replace,
    "to_bytes": _check_bytes,
    "translate": _check_translate,
}


def _check_format(budget: _Budget, text: Any, *args: Any, **named: Any) -> None:
    _check_percent(budget, text, named or args)


def _check_counts(budget: _Budget, value: Any, *args: Any, **named: Any) -> None:
    for one in (*args, *named.values()):
        _check_width(one, MAX_COUNT)


def _check_round(budget: _Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    _check_width(precision, 1000)


def _check_indent(budget: _Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = budget.size(width) if isinstance(width, str) else width * 4
    budget.need(budget.size(text) + (str(text).count("\n") + 1) * size)


def _check_inserted(budget: _Budget, value: Any, *args: Any, **named: Any) -> None:
    """The arguments may be inserted at each character."""
    texts = [one for one in (*args, *named.values()) if isinstance(one, str | list | tuple)]
    budget.need(budget.size(value) + sum(map(len, map(str, texts))) * len(str(value)))


def _check_nested(budget: _Budget, value: Any, *args: Any, **named: Any) -> None:
    """JSON may have an indentation at each level, and long separators."""
    widths = [
        one if isinstance(one, int) else sum(map(len, one))
        for one in (*args, *named.values())
        if isinstance(one, int | str | list | tuple)
    ]
    if any(width > 1 for width in widths):
        size = budget.size(value)
        budget.need(size + size // _OVERHEAD * sum(widths) * _depth(value))


def _check_lines_of(budget: _Budget, value: Any, *_: Any, **__: Any) -> None:
    """Each level is indented by a space."""
    budget.need(budget.size(value) + budget.size(value) // _OVERHEAD * _depth(value))


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return 1
    return 1 + max(map(_depth, parts), default=0)


def _check_added(budget: _Budget, items: Any, *args: Any, **named: Any) -> None:
    """Each list that is added to a sum copies all before it."""
    start = named.get("start", args[1] if len(args) > 1 else 0)
    if not isinstance(start, int | float) and len(items) * budget.size(items) > 4 * MAX_BUILT:
        raise TemplateLimitError(f"it adds up {len(items)} lists")


def _check_list(budget: _Budget, value: Any) -> None:
    if isinstance(value, str):
        budget.need(len(value) * _OVERHEAD)


def _check_joined(budget: _Budget, items: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    _check_join(budget, separator, items)


_FILTERS: Mapping[str, Check] = {
    "batch": _check_counts,
    "center": _check_padding,
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_joined,
    "list": _check_list,
    "pprint": _check_lines_of,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_counts,
    "sum": _check_added,
    "tojson": _check_nested,
    "urlize": _check_inserted,
    "wordwrap": _check_inserted,
}


# ---- where the sandbox calls it ----


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with limits for what runs in `limited()`."""

    intercepted_binops = frozenset(_OPERATORS)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.globals.pop("lipsum", None)  # random text, of any length
        filters = _Filters()
        for name, do in self.filters.items():
            filters[name] = do
        self.filters = filters

    def tick(self) -> None:
        """Called at the begin of each block, such as the body of a loop or a macro."""
        if (budget := _active.budget) is not None:
            budget.tick()

    def taken(self, value: Any) -> Any:
        """Called with each list, tuple, dict and slice."""
        return value if (budget := _active.budget) is None else budget.take(value)

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a template, macro or block."""
        budget = _active.budget
        if budget is None:
            return "".join(parts)
        texts, size = [], 0
        for part in parts:
            size += sys.getsizeof(part) if len(part) > _OVERHEAD else len(part)
            budget.need(size)
            texts.append(part)
        text: str = budget.take("".join(texts))
        return text

    def joined(self, join: Callable[[Sequence[Any]], str], parts: Sequence[Any]) -> str:
        """The operator `~`."""
        budget = _active.budget
        if budget is None:
            return join(parts)
        budget.need(sum(map(budget.size, parts)))
        text: str = budget.take(join(parts))
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _active.budget
        if budget is None:
            return super().call_binop(context, operator, left, right)
        _OPERATORS[operator](budget, left, right)
        return budget.take(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _active.budget
        if budget is None:
            return super().call(__context, __obj, *args, **kwargs)
        budget.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int) and name in _METHODS:
            args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
            named = {key: one for key, one in kwargs.items() if key not in _OF_JINJA}
            _METHODS[name](budget, owner, *args, **named)
        if isinstance(__obj, type) and issubclass(__obj, Namespace):
            __obj = _without_text(cast(Any, __obj))
        return budget.take(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def format(*args: Any, **named: Any) -> str:
            if is_map:
                [named], args = args, ()
            formatter: SandboxedFormatter = (
                _EscapeFormatter(self, escape=text.escape)
                if isinstance(text, Markup)
                else _Formatter(self)
            )
            return str(type(text)(formatter.vformat(text, args, named)))

        return format


@functools.cache
def _without_text(kind: Any) -> Any:
    """A kind of namespace whose text has no contents: they can change, so nothing limits them."""
    return type(kind.__name__, (kind,), {"__repr__": lambda self: "<Namespace>"})


class _Filters(dict[str, Callable[..., Any]]):
    """Filters with limits, also those that are set later."""

    def __setitem__(self, name: str, do: Callable[..., Any]) -> None:
        super().__setitem__(name, _limited_filter(name, do))


_PASSED = {"eval_context": "eval_ctx", "environment": "environment"}  # attributes of a context


def _limited_filter(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(getattr(do, "jinja_pass_arg", None), "name", None)
    check = _FILTERS.get(name)

    @pass_context  # so it is not called when the template is compiled
    def run(context: Context, value: Any, *args: Any, **named: Any) -> Any:
        first: list[Any] = []
        if passed is not None:
            first.append(context if passed == "context" else getattr(context, _PASSED[passed]))
        budget = _active.budget
        if budget is None:
            return do(*first, value, *args, **named)
        budget.tick()
        if check is not None:
            if isinstance(value, Iterator):
                value = list(value)
            check(budget, value, *args, **named)
        return budget.take(do(*first, value, *args, **named))

    return run


class _FieldLimits(SandboxedFormatter):
    _size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = _active.budget
        if budget is None:
            return super().format_field(value, format_spec)
        for digits in _DIGITS.findall(format_spec):
            _check_width(int(digits[:9]))
        text = super().format_field(value, format_spec)
        self._size += sys.getsizeof(text)
        budget.need(self._size)
        return text


class _Formatter(_FieldLimits):
    pass


class _EscapeFormatter(_FieldLimits, SandboxedEscapeFormatter):
    pass


class _Generator(CodeGenerator):
    """Calls `tick`, `taken` and `joined` of the environment where Jinja has no hooks."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        joins = {True: "markup_join", False: "str_join"}
        name = joins[frame.eval_ctx.autoescape]
        if frame.eval_ctx.volatile:
            name = "(markup_join if context.eval_ctx.volatile else str_join)"
        self.write(f"environment.joined({name}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self._taken(super().visit_Getitem, node, frame, is_slice)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._taken(super().visit_Tuple, node, frame, node.ctx == "load")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._taken(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._taken(super().visit_Dict, node, frame)

    def _taken(
        self, visit: Callable[..., None], node: nodes.Node, frame: Frame, is_value: bool = True
    ) -> None:
        self.write("environment.taken(" if is_value else "")
        visit(node, frame)
        self.write(")" if is_value else "")


LimitedEnvironment.code_generator_class = _Generator


@functools.cache
def limit_transformers() -> None:
    """Have transformers compile templates with these limits too."""
    from transformers.utils import chat_template_utils

    utils: Any = chat_template_utils
    utils.ImmutableSandboxedEnvironment = LimitedEnvironment
