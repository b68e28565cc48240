"""`quantization_config` of config.json -> how the weights of a checkpoint are stored.

`_READERS` lists the formats by `quant_method`. The result determines how tensors are unpacked
(stored_weights.py); the captured model does not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmc.errors import CheckpointError
from llmc.weights.quantized.config_fields import (
    ALL,
    WAY_OUT,
    bad,
    block_size,
    check_pattern,
    group_size,
    is_at_start,
    mapping_in,
    names_in,
    one_of,
)

Layout = Literal[
    "plain", "packed", "gptq", "awq", "awq_gemv", "mxfp4", "fp4", "bnb4", "bnb8", "bitnet"
]
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # of a config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How the weights of some linears are stored.

    `layout`: "plain" is a weight of one byte per value under its own name, whatever its bits;
    "packed" is that of compressed-tensors; "fp4" has two e2m1 numbers in a byte; "bnb4" and "bnb8"
    are bitsandbytes', and "bitnet" has numbers of 2 bits, from four rows in a byte. `divides`: the
    scale of the whole weight is a divisor. `block`: (channels, inputs) that share a scale; None:
    determined by the scale's shape. `zeros_less_one`: stored zero points are one too low.
    `reorders`: groups can contain any inputs. `targets`: module names, `re:` patterns matched from
    the start, or classes.
    """

    layout: Layout
    bits: int
    block: tuple[int, int] | None
    is_float: bool = False
    symmetric: bool = True
    zeros_less_one: bool = False
    reorders: bool = False
    divides: bool = False
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """A parsed quantization_config. `plain_modules`: names and patterns of unquantized modules.
    `sorts_patterns`: of several matching patterns the first in alphabetical order counts."""

    method: str
    schemes: tuple[WeightScheme, ...]
    plain_modules: tuple[str, ...] = ()
    quantizes_activations: bool = False
    sorts_patterns: bool = False

    def schemes_of(self, module: str) -> tuple[WeightScheme, ...]:
        """The possible schemes of a module whose weight is stored quantized. There are several if
        they target classes, as a name does not tell the class: the tensors decide."""
        found = self.schemes if len(self.schemes) == 1 else self._targeting(module)
        if not found:
            raise CheckpointError(
                f"{module} is stored quantized, but no group of quantization_config targets it"
            )
        return found

    def expected(self, module: str, classes: Collection[str]) -> WeightScheme | None:
        """The scheme of a linear whose tensors are not available, with the names of its classes;
        None if it should be plain."""
        if any(_covers(pattern, module) for pattern in self.plain_modules):
            return None
        found = self._targeting(module)
        return next((s for s in found if len(found) == 1 or set(s.targets) & set(classes)), None)

    def _targeting(self, module: str) -> tuple[WeightScheme, ...]:
        """The scheme that targets a module; if only classes match, all that target one. Names take
        precedence over patterns, which take precedence over classes."""
        matching = (
            (target.startswith("re:"), target if self.sorts_patterns else "", i)
            for i, scheme in enumerate(self.schemes)
            for target in scheme.targets
            if _matches(module, target)
        )
        if (first := min(matching, default=None)) is not None:
            return (self.schemes[first[-1]],)
        return tuple(s for s in self.schemes if any(_is_class(target) for target in s.targets))


# For GGUF files, in which each tensor states its own format.
GGUF = StoredQuantization(method="gguf", schemes=())


def _covers(pattern: str, module: str) -> bool:
    """Whether a pattern covers a module: it includes all submodules, at any depth of the path."""
    return _matches(module, pattern) or f".{pattern}." in f".{module}."


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return is_at_start(target[3:], module)
    return module == target


def _is_class(target: str) -> bool:
    return target[:1].isupper() and "." not in target


def read_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """Parse a config.json; None if weights are plain. CheckpointError if it is not supported."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    for part in parts:
        mlx = part.get("quantization")  # which newer versions repeat as quantization_config
        if isinstance(mlx, Mapping) and mlx.keys() >= {"bits", "group_size"}:
            raise CheckpointError(
                "config.json has the field `quantization` of MLX, whose format llmc can't read; "
                + WAY_OUT
            )
        for key in QUANTIZATION_KEYS:
            if part.get(key):
                return _read(part[key])
    return None


def _read(fields: Any) -> StoredQuantization:
    if not isinstance(fields, Mapping):
        raise bad(f"is {fields!r} instead of an object")
    method = fields.get("quant_method")
    if method is None and "config_groups" in fields:
        method = "compressed-tensors"
    if method is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        method = "bitsandbytes"  # transformers before 4.32 did not name it
    if not isinstance(method, str) or method not in _READERS:
        raise bad(f"quant_method is {method!r}; llmc supports {', '.join(_READERS)}; {WAY_OUT}")
    found = _READERS[method](fields)
    for name in (*found.plain_modules, *(t for scheme in found.schemes for t in scheme.targets)):
        if name.startswith("re:"):
            check_pattern(name[3:])
    return found


_FP4_EXPERTS = WeightScheme(
    layout="fp4", bits=4, block=(1, 32), is_float=True, targets=(r"re:.*\.experts\.\d+\.",)
)


def _fp8(fields: Mapping[str, Any]) -> StoredQuantization:
    one_of(fields, "fmt", "e4m3", ("e4m3", "e5m2"))
    experts = one_of(fields, "expert_dtype", "fp8", ("fp8", "fp4"))
    activations = one_of(fields, "activation_scheme", "dynamic", ("dynamic", "static"))
    block = None
    if fields.get("weight_block_size") is not None:
        block = block_size(fields, "weight_block_size")
    return StoredQuantization(
        method=str(fields["quant_method"]),
        schemes=(
            WeightScheme(layout="plain", bits=8, block=block, is_float=True),
            *([_FP4_EXPERTS] if experts == "fp4" else []),
        ),
        plain_modules=names_in(fields, "modules_to_not_convert")
        or names_in(fields, "ignored_layers"),
        quantizes_activations=bool(activations),
    )


def _mxfp4(fields: Mapping[str, Any]) -> StoredQuantization:
    return StoredQuantization(
        method="mxfp4",
        schemes=(WeightScheme(layout="mxfp4", bits=4, block=(1, 32), is_float=True),),
        plain_modules=names_in(fields, "modules_to_not_convert"),
    )


def _gptq(fields: Mapping[str, Any]) -> StoredQuantization:
    form = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise bad(f"checkpoint_format is {form!r}; llmc supports gptq, gptq_v2; {WAY_OUT}")
    one_of(fields, "pack_dtype", "int32", ("int32", "torch.int32"))

    def scheme(own: Mapping[str, Any], target: str) -> WeightScheme:
        found = _gptq_scheme(own, target)
        return replace(found, reorders=bool(own.get("desc_act")), zeros_less_one=form == "gptq")

    schemes, plain = [], []
    for pattern, own in mapping_in(fields, "dynamic").items():
        is_plain = pattern.startswith("-:")
        target = f"re:{pattern.removeprefix('-:' if is_plain else '+:')}"
        if is_plain:
            plain.append(target)
        else:
            schemes.append(scheme(_overridden(fields, own), target))
    if not fields.get("lm_head"):
        plain.append("lm_head")
    schemes.append(scheme(fields, "Linear"))
    return StoredQuantization(method="gptq", schemes=tuple(schemes), plain_modules=tuple(plain))


def _auto_round(fields: Mapping[str, Any]) -> StoredQuantization:
    """Layouts of other tools; modules in `extra_config` have their own bits or are plain."""
    if fields.get("rotation_config"):
        raise bad(f"rotation_config rotates the inputs, which is not supported; {WAY_OUT}")
    scheme = _AUTO_ROUND[
        one_of(fields, "packing_format", _format_of_backend(fields), tuple(_AUTO_ROUND))
    ]
    schemes, plain = [], ["lm_head"]
    for name, own in mapping_in(fields, "extra_config").items():
        asked = _overridden(fields, own)
        target = name if re.fullmatch(r"[\w.]+", name) else f"re:{name}"
        bits = asked.get("bits")
        if isinstance(bits, int) and bits >= 16:
            plain.append(target)
        else:
            schemes.append(scheme(asked, target))
    schemes.append(scheme(fields, "Linear"))
    activation_bits = fields.get("act_bits")
    return StoredQuantization(
        method="auto-round",
        schemes=tuple(schemes),
        plain_modules=tuple(plain),
        quantizes_activations=isinstance(activation_bits, int) and activation_bits < 16,
    )


def _format_of_backend(fields: Mapping[str, Any]) -> str:
    """The packing format of configs without one: older ones only name the kernels,
    `auto_round:gptq:...`, and weights of float8 or FP4 are stored in one way."""
    if fields.get("data_type", "int") != "int":
        return "auto_round:fp8"
    backend = str(fields.get("backend") or "")
    if "awq" in backend:
        return "auto_round:auto_awq"
    is_own = backend.startswith("auto_round") and "gptq" not in backend
    return "auto_round" if is_own else "auto_round:auto_gptq"


def _auto_round_integers(
    read: Callable[[Mapping[str, Any], str], WeightScheme],
) -> Callable[[Mapping[str, Any], str], WeightScheme]:
    def scheme(fields: Mapping[str, Any], target: str) -> WeightScheme:
        one_of(fields, "data_type", "int", ("int",))
        return read(fields, target)

    return scheme


def _auto_round_floats(fields: Mapping[str, Any], target: str) -> WeightScheme:
    """The layouts of compressed-tensors and of `fp8`."""
    kind = one_of(fields, "data_type", None, ("fp", "mx_fp", "nv_fp"))
    bits = one_of(fields, "bits", None, {"fp": (8,), "mx_fp": (4, 8), "nv_fp": (4,)}[kind])
    if kind == "fp":
        one_of(fields, "fmt", "e4m3", ("e4m3",))
        has_blocks = fields.get("weight_block_size") is not None
        block = block_size(fields, "weight_block_size") if has_blocks else None
    else:
        size = 16 if kind == "nv_fp" else 32
        block = (1, one_of(fields, "group_size", size, (size,)))
    return WeightScheme(
        layout="fp4" if bits == 4 else "plain",
        bits=bits,
        block=block,
        is_float=True,
        divides=kind == "nv_fp",
        targets=(target,),
    )


def _gptq_v2_scheme(fields: Mapping[str, Any], target: str) -> WeightScheme:
    return replace(_gptq_scheme(fields, target), zeros_less_one=False)


def _gptq_scheme(fields: Mapping[str, Any], target: str) -> WeightScheme:
    return WeightScheme(
        layout="gptq",
        bits=one_of(fields, "bits", None, (2, 3, 4, 8)),
        block=(1, group_size(fields, "group_size")),
        symmetric=fields.get("sym") is True,  # zero points are stored either way
        zeros_less_one=True,
        targets=(target,),
    )


def _awq_scheme(
    fields: Mapping[str, Any],
    target: str,
    bits: str = "bits",
    group: str = "group_size",
    layout: Layout = "awq",
) -> WeightScheme:
    """`bits` and `group`: the names of the fields."""
    return WeightScheme(
        layout=layout,
        bits=one_of(fields, bits, None, (4,)),
        block=(1, group_size(fields, group)),
        symmetric=False,
        targets=(target,),
    )


def _overridden(fields: Mapping[str, Any], own: Any) -> Mapping[str, Any]:
    """The fields for modules that override some of them with their `own`."""
    return {**fields, **(own if isinstance(own, Mapping) else {})}


_AWQ: dict[str, Layout] = {"gemm": "awq", "gemv": "awq_gemv"}  # by `version`


def _awq(fields: Mapping[str, Any]) -> StoredQuantization:
    form = fields.get("version") or fields.get("checkpoint_format") or fields.get("format")
    version = str(form or "gemm").lower()
    if version not in _AWQ:
        raise bad(f"version is {form!r}; llmc supports {', '.join(_AWQ)}; {WAY_OUT}")
    bits = "bits" if "bits" in fields else "w_bit"
    group = "group_size" if "group_size" in fields else "q_group_size"
    return StoredQuantization(
        method="awq",
        schemes=(_awq_scheme(fields, "Linear", bits, group, _AWQ[version]),),
        plain_modules=names_in(fields, "modules_to_not_convert") or ("lm_head",),
    )


def _bitsandbytes(fields: Mapping[str, Any]) -> StoredQuantization:
    if fields.get("load_in_4bit"):
        scheme = WeightScheme(layout="bnb4", bits=4, block=None, is_float=True)
    else:
        scheme = WeightScheme(layout="bnb8", bits=8, block=(1, ALL))
    return StoredQuantization(
        method="bitsandbytes",
        schemes=(scheme,),
        plain_modules=names_in(fields, "llm_int8_skip_modules") or ("lm_head",),
        quantizes_activations=scheme.layout == "bnb8",
    )


def _bitnet(fields: Mapping[str, Any]) -> StoredQuantization:
    one_of(fields, "quantization_mode", "offline", ("offline",))
    linear = one_of(fields, "linear_class", "bitlinear", ("bitlinear", "autobitlinear"))
    if fields.get("use_rms_norm"):
        raise bad(f"use_rms_norm adds norms to the model, which is not supported; {WAY_OUT}")
    return StoredQuantization(
        method="bitnet",
        schemes=(
            WeightScheme(layout="bitnet", bits=8, block=(ALL, ALL), divides=linear == "bitlinear"),
        ),
        plain_modules=names_in(fields, "modules_to_not_convert") or ("lm_head",),
        quantizes_activations=True,
    )


# The layout, bits and block.
_MODELOPT: dict[str, tuple[Layout, int, tuple[int, int] | None]] = {
    "NVFP4": ("fp4", 4, (1, 16)),
    "W4A16_NVFP4": ("fp4", 4, (1, 16)),
    "MXFP4": ("fp4", 4, (1, 32)),
    "MXFP8": ("plain", 8, (1, 32)),
    "FP8": ("plain", 8, None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("plain", 8, None),
}


def _modelopt(fields: Mapping[str, Any]) -> StoredQuantization:
    """Modules have an algorithm each where `quantized_layers` lists them."""
    if fields.get("quant_algo") == "MIXED_PRECISION":
        layers = mapping_in(fields, "quantized_layers")
        schemes = tuple(
            _modelopt_scheme(own, name, f"quantized_layers.{name}.") for name, own in layers.items()
        )
        if not schemes:
            raise bad(f"quant_algo is MIXED_PRECISION without quantized_layers; {WAY_OUT}")
    else:
        schemes = (_modelopt_scheme(fields, "Linear"),)
    plain = names_in(fields, "ignore") or names_in(fields, "exclude_modules")
    return StoredQuantization(
        method="modelopt",
        schemes=schemes,
        plain_modules=tuple(map(_with_wildcards, plain)),
        quantizes_activations=True,
    )


def _modelopt_scheme(fields: Any, target: str, where: str = "") -> WeightScheme:
    if not isinstance(fields, Mapping):
        raise bad(f"{where.removesuffix('.')} is {fields!r} instead of an object")
    algorithm = str(fields.get("quant_algo")).upper()  # it writes some in small letters
    known = one_of({"quant_algo": algorithm}, "quant_algo", None, tuple(_MODELOPT), where)
    layout, bits, block = _MODELOPT[known]
    if block is not None:
        one_of(fields, "group_size", block[1], (block[1],), where)
    return WeightScheme(layout=layout, bits=bits, block=block, is_float=True, targets=(target,))


def _with_wildcards(name: str) -> str:
    """The pattern of a name in which a star stands for anything."""
    return "re:" + ".*".join(map(re.escape, name.split("*"))) + "$"


def _quark(fields: Mapping[str, Any]) -> StoredQuantization:
    export = mapping_in(fields, "export")
    one_of(export, "weight_format", "real_quantized", ("real_quantized",), "export.")
    own = mapping_in(fields, "layer_quant_config")
    plain = [name for name, given in own.items() if not mapping_in(own, name).get("weight")]
    schemes = [
        _quark_scheme(given, _with_wildcards(name), f"layer_quant_config.{name}.weight.")
        for name, given in own.items()
        if name not in plain
    ]
    if mapping_in(fields, "layer_type_quant_config"):
        raise bad(f"layer_type_quant_config is not supported; {WAY_OUT}")
    usual = mapping_in(fields, "global_quant_config")
    schemes.append(_quark_scheme(usual, "Linear", "global_quant_config.weight."))
    return StoredQuantization(
        method="quark",
        schemes=tuple(schemes),
        plain_modules=tuple(map(_with_wildcards, (*names_in(fields, "exclude"), *plain))),
        quantizes_activations=bool(usual.get("input_tensors")),
    )


def _quark_scheme(fields: Mapping[str, Any], target: str, where: str) -> WeightScheme:
    weight = mapping_in(fields, "weight")
    kind = one_of(weight, "dtype", None, ("fp8_e4m3", "fp4", "mx"), where)
    if kind == "fp8_e4m3":
        one_of(weight, "qscheme", "per_tensor", ("per_tensor", "per_channel"), where)
        return WeightScheme(layout="plain", bits=8, block=None, is_float=True, targets=(target,))
    if kind == "mx":  # how older versions wrote fp4 in groups of 32
        one_of(weight, "mx_element_dtype", None, ("fp4",), where)
    size = one_of(weight, "group_size", 32, (32,), where)
    return WeightScheme(layout="fp4", bits=4, block=(1, size), is_float=True, targets=(target,))


_COMPRESSED = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FUSED = ("weight_input", "weight_output")  # the stored weights are rotated already


def _compressed(fields: Mapping[str, Any]) -> StoredQuantization:
    if any(location not in _FUSED for location in _rotations(fields)):
        raise bad(f"transform_config rotates the inputs, which is not supported; {WAY_OUT}")
    sparse = mapping_in(fields, "sparsity_config").get("format", "dense")
    if sparse != "dense":
        raise bad(f"sparsity_config has the format {sparse!r}; llmc supports dense; {WAY_OUT}")
    groups = mapping_in(fields, "config_groups")
    schemes, activations = [], False
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise bad(f"config_groups.{name} is {group!r} instead of an object")
        if group.get("weights"):
            form = group.get("format") or fields.get("format")
            schemes.append(_compressed_scheme(name, form, group))
        activations |= bool(group.get("input_activations"))
    return StoredQuantization(
        method="compressed-tensors",
        schemes=tuple(schemes),
        plain_modules=names_in(fields, "ignore"),
        quantizes_activations=activations,
        sorts_patterns=True,
    )


def _rotations(fields: Mapping[str, Any]) -> Iterator[Any]:
    """Where `transform_config` rotates; None where that can't be read."""
    transforms = mapping_in(fields, "transform_config")
    groups = transforms.get("config_groups")
    if not isinstance(groups, Mapping):
        yield from [None] if transforms else []
        return
    for group in groups.values():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for one in applied if isinstance(applied, list) else [None]:
            yield one.get("location") if isinstance(one, Mapping) else None


def _compressed_scheme(name: str, form: Any, group: Mapping[str, Any]) -> WeightScheme:
    where = f"config_groups.{name}."
    if form not in _COMPRESSED:
        raise bad(f"{where}format is {form!r}; llmc supports {', '.join(_COMPRESSED)}; {WAY_OUT}")
    weights = group["weights"]
    if not isinstance(weights, Mapping):
        raise bad(f"{where}weights is {weights!r} instead of an object")
    where += "weights."
    kind = one_of(weights, "type", "int", ("int", "float"), where)
    packed = form == "pack-quantized"
    if packed and kind == "float":
        raise bad(f"{where}type is 'float', which is never packed; {WAY_OUT}")
    if form in _FP4:
        one_of(weights, "num_bits", None, (4,), where)
        if weights.get("symmetric") is False:
            raise bad(f"{where}symmetric is false, which is not supported for {form}; {WAY_OUT}")
        return WeightScheme(
            layout="fp4",
            bits=4,
            block=(1, one_of(weights, "group_size", None, (16, 32), where)),
            is_float=True,
            divides=True,
            targets=names_in(group, "targets") or ("Linear",),
        )
    bits = one_of(weights, "num_bits", 8, (4, 8) if packed or kind == "int" else (8,), where)
    has_groups = weights.get("group_size") not in (None, -1)
    strategy = one_of(
        weights,
        "strategy",
        "group" if has_groups else "channel" if weights.get("group_size") == -1 else "tensor",
        ("tensor", "channel", "group", "block"),
        where,
    )
    blocks = {"tensor": (ALL, ALL), "channel": (1, ALL)}
    if strategy == "group":
        block = (1, group_size(weights, "group_size", where))
    elif strategy == "block":
        block = block_size(weights, "block_structure", where)
    else:
        block = blocks[strategy]
    return WeightScheme(
        layout="packed" if packed else "plain",
        bits=bits,  # unpacked, 4 bits take a byte
        block=block,
        is_float=kind == "float",
        symmetric=weights.get("symmetric", True) is not False,
        reorders=weights.get("actorder") in (True, "group", "dynamic"),
        targets=names_in(group, "targets") or ("Linear",),
    )


# Their zero points are stored, but 0.
_TORCHAO_SYMMETRIC = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_TORCHAO_MODULES = ("FqnToConfig", "ModuleFqnToConfig")  # a config for each of some modules


def _torchao(fields: Mapping[str, Any]) -> StoredQuantization:
    """One byte per value, whatever the bits; the tensors tell the kinds and blocks of modules."""
    default = mapping_in(mapping_in(fields, "quant_type"), "default")
    options, own = mapping_in(default, "_data"), {}
    if default.get("_type") in _TORCHAO_MODULES:
        own = dict(
            mapping_in(options, "fqn_to_config") or mapping_in(options, "module_fqn_to_config")
        )
        default = mapping_in(own, "_default")
        own.pop("_default", None)
    schemes = [
        _torchao_scheme(mapping_in(own, name), _torchao_target(name))
        for name in own
        if own[name] is not None
    ]
    usual = _torchao_scheme(default, "Linear")
    float8 = WeightScheme(layout="plain", bits=8, block=None, is_float=True)
    plain = [_torchao_target(name) for name in own if own[name] is None]
    kinds = [str(config.get("_type")) for config in (default, *own.values()) if config]
    return StoredQuantization(
        method="torchao",
        schemes=(*schemes, *([float8] if not usual.is_float else []), usual),
        plain_modules=(*names_in(fields, "modules_to_not_convert"), *plain),
        quantizes_activations=any("DynamicActivation" in kind for kind in kinds),
    )


def _torchao_target(name: str) -> str:
    """A name of a module or its weight, or a pattern, which has to match all of a name."""
    if not name.startswith("re:"):
        return name.removesuffix(".weight")
    check_pattern(name[3:])
    return f"re:(?:{name[3:]})$"


def _torchao_scheme(config: Mapping[str, Any], target: str) -> WeightScheme:
    kind, options = str(config.get("_type")), mapping_in(config, "_data")
    if "Int4Weight" in kind:
        packing = mapping_in(options, "int4_packing_format").get("_data")
        raise bad(
            f"quant_type is {kind} (int4_packing_format {packing!r}), which packs values for GPU "
            f"kernels; of torchao's formats llmc supports those with a value per byte; {WAY_OUT}"
        )
    if kind.startswith(("MX", "NVFP4")):  # prototypes; scales are stored in the order of a kernel
        raise bad(
            f"quant_type is {kind}; of torchao's formats llmc supports int8, integers of "
            f"fewer bits in bytes, and float8; {WAY_OUT}"
        )
    names = "mapping_type", "weight_mapping_type"
    mappings = [mapping_in(options, name).get("_data") for name in names if name in options]
    stored = str(mapping_in(options, "weight_dtype").get("_data"))
    return WeightScheme(
        layout="plain",
        bits=4 if stored in ("int1", "int2", "int3", "int4") else 8,
        block=None,
        is_float=kind.startswith("Float8"),
        symmetric=kind in _TORCHAO_SYMMETRIC or mappings == ["SYMMETRIC"],
        targets=(target,),
    )


_AUTO_ROUND = {  # by `packing_format`
    "auto_round:auto_gptq": _auto_round_integers(_gptq_scheme),
    "auto_round:auto_awq": _auto_round_integers(_awq_scheme),
    "auto_round:gptqmodel": _auto_round_integers(_gptq_v2_scheme),
    "auto_round": _auto_round_integers(_gptq_v2_scheme),
    "auto_round:llm_compressor": _auto_round_floats,
    "auto_round:fp8": _auto_round_floats,
    "auto_round:fp8_static": _auto_round_floats,
}
_READERS: dict[Any, Callable[[Mapping[str, Any]], StoredQuantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "modelopt": _modelopt,
    "quark": _quark,
    "bitsandbytes": _bitsandbytes,
    "bitnet": _bitnet,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
