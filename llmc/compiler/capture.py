"""The model on meta -> one graph over packed tokens, with every input labeled.

Second stage of the compiler: torch.compile's front end (Dynamo, fullgraph) traces the model's
Python code, and the result is lowered to ATen ops. The number of tokens T stays symbolic, and no
guards are kept: the graph runs for every T, including 1. A graph break raises a CompileError that
names the line of the model's code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from llmc.compiler.branches import same_code, sizes_in_doubt
from llmc.compiler.build import BuiltModel, is_unset
from llmc.compiler.compressors import no_masks
from llmc.compiler.expert_blocks.refused import loop_reason
from llmc.compiler.functional import make_functional
from llmc.compiler.heads import HeadOutput
from llmc.compiler.interface import KEY_CACHE, NAME, VALUE_CACHE, unpacked_positions
from llmc.compiler.known_branches import KnownBranches
from llmc.compiler.left_values import (
    LeftValue,
    left_by_another_call,
    left_values,
    without_left,
)
from llmc.compiler.model_errors import MODEL_ERRORS
from llmc.compiler.program import CapturedModel
from llmc.compiler.recurrent import replaced_functions
from llmc.compiler.traceable import (
    lists_to_slices,
    meta_by_default,
    spelled_attention,
    traceable_torch,
    unlogged,
)
from llmc.errors import CompileError
from llmc.passes.base import remove_dead_code, run_passes
from llmc.passes.find_key_biases import find_key_biases
from llmc.passes.find_linear_attention import find_linear_attention, same_decays
from llmc.passes.inputs import (
    CacheInput,
    ConstantInput,
    Input,
    StepInput,
    WeightInput,
    add_input,
)
from llmc.weights.parameters import describe_parameters

# torch's messages for code that can't be captured, and the explanations for users.
_REASONS = {
    "Constraints violated": "its code depends on the number of tokens (it loops over them, or "
    "makes a list of them), so no single graph works for all",
    "Data-dependent branching": "its code branches on the value of a tensor",
    "data-dependent": "its code reads a number out of a tensor",
}
_TWO_DEVICES = re.compile("two different devices|not on the expected device")  # torch's messages
_EXAMPLE_TOKENS = 19  # differs from all sizes in a model, so that nothing equals it by chance


def capture(built: BuiltModel, device: torch.device) -> CapturedModel:
    """Capture a model. Raises CompileError if its code can't be captured in one graph."""
    captured = _capture(built, device, _EXAMPLE_TOKENS)
    doubts = sizes_in_doubt(captured.graph.graph, built.config)
    if doubts:
        captured, is_same = _for_both(captured, built, device, doubts[0])
        # otherwise one has more blocks than the other, and the longest would be slow to capture
        for tokens in doubts[1:][-1:] if is_same else ():
            captured, _ = _for_both(captured, built, device, tokens)
    return captured


def _for_both(
    captured: CapturedModel, built: BuiltModel, device: torch.device, tokens: int
) -> tuple[CapturedModel, bool]:
    """A graph that is also valid for this number of tokens, and whether the code is the same.

    If the code differs, passes may still find the same meaning in it: loops over blocks of tokens,
    or keys that are only selected if there are many. Otherwise raises CompileError.
    """
    other = _capture(built, device, tokens)
    if same_code(captured.graph.graph, other.graph.graph, tokens):
        return captured, True
    for model, most in ((captured, tokens), (other, min(_EXAMPLE_TOKENS, tokens))):
        passes = (find_key_biases(max_positions=most, block_size=1), find_linear_attention())
        one, two = (run_passes(m.graph, passes)[0].graph for m in (captured, other))
        if same_code(one, two, most) and same_decays(one, two):
            return model, False
    raise CompileError(
        f"{type(built.module).__name__} computes {tokens} tokens differently from "
        f"{_EXAMPLE_TOKENS}: its code depends on their number, so no single graph works for all"
    )


def _capture(built: BuiltModel, device: torch.device, tokens: int) -> CapturedModel:
    try:
        branches = KnownBranches(built)
        dynamo, examples, left = _run_dynamo(built, tokens, branches)
        if left:
            with left_by_another_call(left), suppress(CompileError):
                again, *_ = _run_dynamo(built, tokens, branches)
                without_left(dynamo, again, left)
    except CompileError as e:
        reasons = built.not_understood
        frame = _frame(e.__cause__)
        if built.own_code and frame is not None and not reasons:
            loop = loop_reason(built.module, frame.filename, frame.lineno or 0)
            reasons = () if loop is None else (loop,)
        raise CompileError("; ".join((str(e), *reasons))) from e.__cause__
    lists_to_slices(dynamo.graph)
    roles = _roles(built, dynamo, examples)
    aten = _to_aten(dynamo)
    for node, role in zip(
        (n for n in aten.graph.nodes if n.op == "placeholder"), roles, strict=True
    ):
        node.meta["input"] = role
    _round_tables(aten.graph)
    _flatten_inputs(aten.graph)
    _constants_to_inputs(aten)
    _single_output(aten.graph, left)
    _move_devices(aten.graph, device)
    _strip_grad_mode(aten.graph)
    make_functional(aten.graph)
    remove_dead_code(aten.graph)
    for node in aten.graph.nodes:
        role = node.meta.get("input")
        if isinstance(role, ConstantInput) and is_unset(role.tensor):
            names = [name for name, value in built.buffers.items() if value is role.tensor]
            if built.left.intersection(names):
                raise CompileError(
                    f"the model's result depends on {', '.join(names)}, which the code of a loop "
                    "over experts sets: that is not supported; the loop would have to return it"
                )
            raise CompileError(
                f"the model's code does not initialize its buffer {', '.join(names) or node.name}, "
                "which is not in checkpoints"
            )
    aten.graph.lint()
    aten.recompile()
    logits: Any = aten.graph.output_node().args[0]
    return CapturedModel(
        graph=aten,
        parameters=describe_parameters(built.module, built.buffers),
        vocab_size=_vocab_size(built, logits),
        dtype=built.dtype,
        device=device,
    )


def _vocab_size(built: BuiltModel, output: fx.Node) -> int:
    """Number of token ids: the width of the model's logits, or the rows of its embedding."""
    if built.head.kind == "lm" and built.head.draft_head is None:
        return int(output.meta["val"].shape[-1])
    module: Any = built.module
    return int(module.get_input_embeddings().weight.shape[0])


class _Captured(Exception):
    """Raised to end the captured call: its inputs are on meta, so there is nothing to run."""


def _run_dynamo(
    built: BuiltModel, tokens: int, branches: KnownBranches, *, on_meta: bool = False
) -> tuple[fx.GraphModule, Sequence[Any], list[LeftValue]]:
    """Dynamo's graph, its example inputs, and the numbers that the code leaves in attributes.

    Code that makes tensors without naming a device makes them on the CPU, where they don't fit the
    model's. It is traced again with meta as the default (`on_meta`), which takes twice as long.
    """
    model, head = built.module, built.head
    captured: list[tuple[fx.GraphModule, Sequence[Any]]] = []
    changed: list[str] = []
    left: list[LeftValue] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        captured.append((gm, list(examples)))
        changed.extend(branches.changed())
        if built.own_code:
            left.extend(left_values())
        return stop

    def stop(*args: Any) -> Any:
        raise _Captured

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    positions = torch.zeros(*head.position_shape(tokens), dtype=torch.long, device="meta")
    torch._dynamo.mark_dynamic(ids, 1)
    torch._dynamo.mark_dynamic(positions, positions.dim() - 1)
    wrapper = HeadOutput(model, head).eval()
    config: Any = model.config
    has_markers = config._attn_implementation == NAME
    torch._dynamo.reset()
    try:
        with (
            torch.no_grad(),
            meta_by_default() if on_meta else nullcontext(),
            torch._dynamo.config.patch(specialize_float=True),
            replaced_functions(model),
            traceable_torch(),
            unpacked_positions() if has_markers else nullcontext(),
            no_masks(model),
            # Torch logs the trace of a failing op. The error is also raised, and then explained to
            # the user, or handled: a model's own attention code is tried after its interface.
            unlogged("torch._subclasses.fake_tensor"),
            branches.decided(),
        ):
            torch.compile(wrapper, backend=backend, fullgraph=True)(ids, positions)
    except _Captured:
        pass
    except torch._dynamo.exc.TorchDynamoException as e:
        if not on_meta and _TWO_DEVICES.search(str(e)):
            return _run_dynamo(built, tokens, branches, on_meta=True)
        raise CompileError(_explain(e, model)) from e
    except (*MODEL_ERRORS, ConstraintViolationError) as e:
        raise CompileError(_explain(e, model)) from e
    finally:
        torch._dynamo.reset()
    if len(captured) != 1:
        raise CompileError(f"capture produced {len(captured)} graphs instead of one")
    if changed:
        raise CompileError(
            f"{type(model).__name__} can't be captured in one graph: its code branches on the "
            f"value of its buffer {', '.join(changed)}, which it also changes; compute the buffer "
            "when the model is constructed"
        )
    _refuse_scalars(captured[0][0], model)
    return *captured[0], left


def _refuse_scalars(gm: fx.GraphModule, model: nn.Module) -> None:
    """Refuse numbers read out of tensors: they mix a batch's requests, and would stall a GPU."""
    for node in gm.graph.nodes:
        if node.op == "call_method" and node.target in ("item", "tolist"):
            frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
            frames = [frame for frame in frames if "/torch/" not in frame[0]]
            where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
            raise CompileError(
                f"{type(model).__name__} can't be captured in one graph{where}: it reads a value "
                f"out of a tensor (.{node.target}()), which changes from step to step"
            )


def _explain(error: Exception, model: nn.Module) -> str:
    """One sentence that says why capture failed, and where in the model's code."""
    ours = re.search(r"raised exception CompileError\((['\"])(.*)\1\)", str(error))
    if ours:
        return ours.group(2)
    frame = _frame(error)
    where = f" at {frame.filename}:{frame.lineno} ({frame.line or frame.name})" if frame else ""
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    known = (said for sign, said in _REASONS.items() if sign in str(error))
    reason = next(known, first.strip()[:300])
    return f"{type(model).__name__} can't be captured in one graph{where}: {reason}"


def _frame(error: BaseException | None) -> FrameSummary | None:
    """The line of the model's code that Dynamo did not follow."""
    stack: list[FrameSummary] = list(getattr(error, "real_stack", None) or [])
    for frame in reversed(stack):
        if "torch" not in frame.filename.split("/")[-3:] and "/torch/" not in frame.filename:
            return frame
    return None


def _roles(built: BuiltModel, gm: fx.GraphModule, examples: Sequence[Any]) -> list[Input]:
    """The role of each of Dynamo's placeholders, by the identity of its example tensor."""
    module = built.module
    by_id: dict[int, Input] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), WeightInput(parts=(name,)))
    persistent = set(module.state_dict())
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in built.buffers:
            by_id[id(buffer)] = ConstantInput(tensor=built.buffers[name])
        elif name in persistent:
            by_id.setdefault(id(buffer), WeightInput(parts=(name,)))
    layers: dict[str, int] = {}  # owner of a cache -> its index in order of first use
    owners = {}
    for name, child in module.named_modules():
        owners[id(getattr(child, KEY_CACHE))] = (name, "key")
        owners[id(getattr(child, VALUE_CACHE))] = (name, "value")
    roles: list[Input] = []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node, example in zip(placeholders, examples, strict=True):
        if isinstance(example, torch.SymInt | int):
            roles.append(StepInput(name="num_tokens"))
        elif id(example) in by_id:
            roles.append(by_id[id(example)])
        elif id(example) in owners:
            name, part = owners[id(example)]
            layer = layers.setdefault(name, len(layers))
            roles.append(CacheInput(layer=layer, part="key" if part == "key" else "value"))
        elif "input_ids" in node.name:
            roles.append(StepInput(name="token_ids"))
        elif "position_ids" in node.name:
            name = "axis_positions" if example.dim() == 3 else "positions"
            roles.append(StepInput(name=name))
        else:
            raise CompileError(f"capture made an input that is not a parameter: {node.name}")
    return roles


def _to_aten(gm: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph of Python calls -> ATen ops; linears and reshapes are not decomposed."""
    fakes = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(fakes)
    if mode is None:
        raise CompileError("capture produced no fake tensors")
    with torch.no_grad(), mode, spelled_attention(gm.graph):
        return make_fx(gm, pre_dispatch=True)(*fakes)


def _flatten_inputs(graph: fx.Graph) -> None:
    """Flatten step inputs to token_ids [T] and positions [T] or axis_positions [axes, T]. T itself
    is read from the shape of token_ids."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    first_call = next(n for n in graph.nodes if n.op != "placeholder")
    tokens: fx.Node | None = None
    for node in placeholders:
        role = node.meta["input"]
        if isinstance(role, StepInput) and role.name != "num_tokens":
            val = node.meta["val"]
            batch = val.dim() - 2
            with graph.inserting_before(first_call):
                batched = graph.call_function(torch.ops.aten.unsqueeze.default, (node, batch))
            batched.meta["val"] = val
            node.replace_all_uses_with(batched, delete_user_cb=lambda u, b=batched: u is not b)
            node.meta["val"] = val.squeeze(batch)
            if role.name == "token_ids":
                tokens = node
    if tokens is None:
        raise CompileError("the model does not read its token ids")
    sizes = [n for n in placeholders if n.meta["input"] == StepInput(name="num_tokens")]
    if sizes:
        after = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(after):
            size = graph.call_function(torch.ops.aten.sym_size.int, (tokens, 0))
        size.meta["val"] = tokens.meta["val"].shape[0]
        for node in sizes:
            node.replace_all_uses_with(size)
            graph.erase_node(node)


def _round_tables(graph: fx.Graph) -> None:
    """Cast constants that are known in a higher precision to the dtype that the model's code sees.

    The cast is in the graph, so that passes analyze the precise values.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in order if n.op == "placeholder" and n.users]:
        role, value = node.meta["input"], node.meta["val"]
        if isinstance(role, ConstantInput) and role.tensor.dtype != value.dtype:
            # insert it at the first reader: nodes are assigned to layers by their order
            with graph.inserting_before(min(node.users, key=order.__getitem__)):
                cast = graph.call_function(torch.ops.aten.to.dtype, (node, value.dtype))
            cast.meta["val"] = value
            node.replace_all_uses_with(cast, delete_user_cb=lambda u, c=cast: u is not c)
            node.meta["val"] = value.new_empty(value.shape, dtype=role.tensor.dtype)


def _constants_to_inputs(gm: fx.GraphModule) -> None:
    """Turn numbers that the model's code computed with numpy into inputs, like other constants."""
    graph = gm.graph
    mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes])
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = getattr(gm, str(node.target))
        is_known = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
        if not is_known or tensor.is_meta or mode is None:
            raise CompileError(
                f"the model's code makes a tensor of numbers ({node.target}) in a way that can't "
                "be captured; torch.tensor(numbers) could be"
            )
        fake = mode.from_tensor(tensor)
        node.replace_all_uses_with(
            add_input(graph, "constant", ConstantInput(tensor=tensor.clone()), fake)
        )
        graph.erase_node(node)


def _single_output(graph: fx.Graph, left: Sequence[LeftValue]) -> None:
    """Make the graph return the logits tensor itself, not a tuple that also has values that the
    model's code assigned to its own attributes (such as a table cast to another dtype)."""
    output = graph.output_node()
    found: list[fx.Node] = []
    fx.node.map_arg(output.args, found.append)
    values = list(dict.fromkeys(found))
    if len(values) > 1:
        values = [v for v in values if _reads_tokens(v)]
    if len(values) != 1:
        names = dict.fromkeys(f"{type(v.owner).__name__}.{v.attribute}" for v in left)
        why = f": {', '.join(names)} may be read by a later call" if names else ""
        raise CompileError(
            f"the captured graph returns {len(values)} values instead of logits{why}"
        )
    output.args = (values[0],)


def _reads_tokens(value: fx.Node) -> bool:
    seen: set[fx.Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node.meta.get("input") == StepInput(name="token_ids"):
            return True
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def _move_devices(graph: fx.Graph, device: torch.device) -> None:
    """Replace `meta`, the device of capture, with `device` in arguments and values."""

    def move(arg: Any) -> Any:
        return device if isinstance(arg, torch.device) and arg.type == "meta" else arg

    mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes])
    assert mode is not None
    made: dict[str, Tensor] = {}  # one of each kind: creating one takes a millisecond or more

    def move_val(val: Any) -> Any:
        if not isinstance(val, Tensor) or val.device.type != "meta":
            return val
        kind = f"{val.shape} {val.stride()} {val.dtype}"
        if kind not in made:
            with mode:
                made[kind] = torch.empty_strided(
                    val.shape, val.stride(), dtype=val.dtype, device=device
                )
        return made[kind]

    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = fx.node.map_aggregate(node.meta["val"], move_val)
        node.args = fx.node.map_aggregate(node.args, move)
        node.kwargs = fx.node.map_aggregate(node.kwargs, move)


def _strip_grad_mode(graph: fx.Graph) -> None:
    """Drop the changes of gradient mode that the model's decorators left behind."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)
