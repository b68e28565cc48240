"""Shrinks a model's config: the same architecture, with every branch reachable by short sequences.

Only counts and widths shrink (heads, experts, layers, vocabulary, and the widths in proportion to
the heads); head dimensions, ranks, rotary parameters and ratios stay unchanged. Numbers that count
tokens (windows, chunks, the length a rotary scaling was trained on) become far smaller than the
sequences of tokens.py, which therefore exceed each of them. The meaning of a number is inferred
from its name, without knowledge of any architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from llmc.compiler.interface import INDEXER_BUDGET

Config = dict[str, Any]

REACH = 32  # the longest sequence of tokens.py is more than twice as long
CONTEXT = 256  # longer than every sequence: nothing is served beyond a model's context
_BUDGET = 128  # likewise, for an indexer that returns a mask
_VOCABULARY = 512
_WINDOW, _FLOOR, _TRAINED, _SELECTED = 8, 4, 16, 2
_EXPERTS = 8
_INDEX_HEADS = 16  # with fewer, scores of exactly zero are common, and topk's order is undefined
_WIDTH = 256  # of a model without heads
_ROUND = 16

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embedding_dim", "emb_dim")
_KV_HEADS = re.compile(r"key_value_heads$|kv_(n_)?heads$")
_SHARED_LAYERS = re.compile(r"shared_layers$")  # the last layers, which share keys and values
_NUM_HEADS = re.compile(r"heads$|(^|_)n_head$|heads_per_layer$")
_WIDTHS = re.compile(
    r"hidden_size$|n_embd|d_model$|emb(edding|ed)?_dim$|emb_dim$|intermediate_size|n_inner$|ffn_dim"
    r"|ffn_hidden_size|d_?ff$|dim_ff|feed_forward_size|d_inner$|_width$|_d_ssm$|proj_dim$"
    r"|expert\w*_size$|dim_model_base|hidden_size_per_layer"
)
_KEPT = re.compile(  # numbers that do not count tokens of a sequence
    r"head_?dim|head_size|channel|_rank$|state|theta|scalar|softcap|soft_cap|clip|beta|_scale$|multiplier"
    r"|kernel|d_conv|factor|(qk|rope|nope|v)_\w*dim|rotary|num_buckets|_id$|_ids$|seed|multiple_of"
    r"|iters$|kv_channels|d_head|dim_head|^dim$|_dim$|_size$|_heads$"
)
_NUM_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_TOP_EXPERTS = re.compile(r"experts?_per_tok(en)?$|^(moe_)?top_?k(_experts)?$|^moe_k$")
_CONTEXTS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length"
    r"|seq_length|max_seq_length|model_max_length)$"
)
_NO_LENGTHS = re.compile(r"pattern|layers|use_|_id$|theta|_type")
_LENGTHS = (
    # a repeated token ties with itself, and torch.topk's order is undefined for ties
    (re.compile(r"keep_window"), CONTEXT),
    (re.compile(r"original_max_position"), _TRAINED),
    (re.compile(r"max_distance|max_inference_chunk"), _TRAINED),
    (re.compile(r"floor_scale"), _FLOOR),
    (re.compile(r"index_topk$"), _WINDOW),
    (re.compile(r"topk_blocks"), _SELECTED),
    (re.compile(r"index_block_size|compress_rate"), _FLOOR),
    (re.compile(r"window|chunk|block_size|n_floor|extent|^local_attention$|sink_size"), _WINDOW),
)
_PATTERNS = re.compile(r"interval|period|_every|pattern|_step$|offset|frequency|layers?($|_)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunken:
    """`notes` name the limits that no compared sequence reaches."""

    config: Config
    notes: tuple[str, ...]


def shrink(config: Mapping[str, Any], *, text: str = "", narrow: bool = True) -> Shrunken:
    """Shrink a config. `text`: the field with the text model's config; "" if it is `config` itself.

    The depth is unchanged: see `keep_layers`. Without `narrow`, widths, heads and experts are too.
    """
    parts = [config[text], config] if text else [config]
    plan = _Plan.of(parts[0], narrow=narrow)
    small: Config = {}
    for name, value in config.items():
        if name == "quantization_config":
            continue
        if name == text and text:
            small[name] = plan.fields(parts[0])
        elif text and name.endswith("_config") and isinstance(value, dict):
            small[name] = _one_layer(value)
        else:
            small[name] = plan.change(name, value)
    inner = small[text] if text else small
    notes = (
        f"{name} = {number}: no compared text is longer"
        for name, number in dict(numbers(inner)).items()
        if out_of_reach(name, number)
    )
    return Shrunken(config=small, notes=tuple(notes))


def num_layers(config: Mapping[str, Any]) -> int:
    """The number of layers; 0 if no field states it."""
    return _first(config, _LAYERS)


def shared_layers(config: Mapping[str, Any]) -> int:
    """How many of the last layers use the keys and values of earlier layers."""
    found = (v for n, v in config.items() if _SHARED_LAYERS.search(n) and _is_number(v))
    return next(found, 0)


def keep_layers(config: Mapping[str, Any], kept: Sequence[int]) -> Config:
    """Keep only these layers, also in fields that the config lists by layer."""
    total = num_layers(config)
    first_shared = total - shared_layers(config)

    def cut(name: str, value: Any) -> Any:
        if name in _LAYERS and value == total:
            return len(kept)
        if _SHARED_LAYERS.search(name) and _is_number(value):
            return sum(1 for layer in kept if layer >= first_shared)
        if isinstance(value, list) and len(value) == total and "factor" not in name:
            return [value[layer] for layer in kept]
        if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
            return {str(kept.index(int(k))): v for k, v in value.items() if int(k) in kept}
        is_numbers = isinstance(value, list) and value and all(_is_number(v) for v in value)
        if is_numbers and re.search(r"indices|idxs?$|_layers$|layer_ids$", name):
            return [kept.index(v) for v in value if v in kept]
        return value

    return {name: cut(name, value) for name, value in config.items()}


def numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """All numbers of a config, with the innermost field name."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from walk(name if _is_list(name, key) else str(key), inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from walk(name, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value

    for name, value in config.items():
        if name not in ("id2label", "label2id"):
            yield from walk(name, value)


def out_of_reach(name: str, number: float) -> bool:
    """Whether a number may be a token count that no compared sequence reaches."""
    if number <= REACH or number != number or number == float("inf") or number != int(number):
        return False
    if name == INDEXER_BUDGET or _CONTEXTS.search(name) or "vocab" in name:
        return False
    known = (_KEPT, _WIDTHS, _PATTERNS)
    is_length = any(rule.search(name) for rule, _ in _LENGTHS) and not _NO_LENGTHS.search(name)
    return is_length or not any(rule.search(name) for rule in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How much to shrink the numbers of one model."""

    ratio: Fraction  # of heads, and of widths with them
    old_heads: int  # 0: the model has none
    vocabulary: int
    experts: int  # before shrinking; 0 if there are none
    narrow: bool

    @staticmethod
    def of(config: Mapping[str, Any], *, narrow: bool) -> _Plan:
        heads, hidden = _first(config, _HEADS), _first(config, _HIDDEN)
        kv_fields = (v for n, v in config.items() if _KV_HEADS.search(n) and _is_number(v))
        if not narrow:
            ratio = Fraction(1)
        elif heads:
            ratio = _ratio(heads, next(kv_fields, heads), hidden)
        else:
            ratio = min(Fraction(1), Fraction(_WIDTH, hidden or _WIDTH))
        vocabulary = _first(config, ("vocab_size",))
        experts = (int(v) for n, v in numbers(config) if _NUM_EXPERTS.search(n))
        return _Plan(
            ratio=ratio,
            old_heads=heads,
            vocabulary=min(vocabulary or _VOCABULARY, _VOCABULARY),
            experts=max(experts, default=0),
            narrow=narrow,
        )

    def fields(self, config: Mapping[str, Any]) -> Config:
        return {n: self.change(n, v) for n, v in config.items() if n != "quantization_config"}

    def change(self, name: str, value: Any) -> Any:
        """A field's value, shrunk according to its name; keys that are layer numbers are kept."""
        if isinstance(value, Mapping):
            return {
                key: self.change(name if _is_list(name, key) else str(key), inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.change(name, inner) for inner in value]
        if not _is_number(value) or value <= 0:
            return value
        return self._number(name, value)

    def _number(self, name: str, value: int) -> int:
        if "vocab" in name:
            return min(value, self.vocabulary)
        if re.search(r"token_(id|ids|index)$", name):
            return value % self.vocabulary
        if name == INDEXER_BUDGET:
            return min(value, _BUDGET)
        if _CONTEXTS.search(name):
            return min(value, CONTEXT)
        if not _NO_LENGTHS.search(name):
            for rule, length in _LENGTHS:
                if rule.search(name):
                    return min(value, length)
        return self._size(name, value) if self.narrow else value

    def _size(self, name: str, value: int) -> int:
        if self.experts:
            if _NUM_EXPERTS.search(name):
                return min(value, _EXPERTS)
            if _TOP_EXPERTS.search(name) and value <= self.experts:
                return min(value, 2)
            if name in ("n_group", "num_expert_group"):
                return min(value, 2)
            if name == "topk_group":
                return 1
            if re.search(r"shared_experts$|zero_expert_num$", name):
                return min(value, 2)
        if re.search(r"n_?groups$", name):
            return min(value, 2)
        if _KV_HEADS.search(name) and value != self.old_heads and self.ratio < 1:
            return min(value, 2)
        if name == "index_n_heads":
            return min(value, _INDEX_HEADS)
        if _NUM_HEADS.search(name):
            return int(value * self.ratio) if value * self.ratio % 1 == 0 else value
        if _WIDTHS.search(name) and value >= 2 * _ROUND:
            exact = value * self.ratio
            return int(exact) if exact % 1 == 0 else max(1, round(exact / _ROUND)) * _ROUND
        return value


def _ratio(heads: int, kv_heads: int, hidden: int) -> Fraction:
    """The shrinking factor of heads: keep two KV heads if there is more than one, and the fewest
    query heads per KV head that are still several: at least two, an odd number if theirs is odd."""
    kept = heads if kv_heads in (0, heads) else min(kv_heads, 2)
    group = heads // kept if kept != heads else 1
    is_odd = kept != heads and (heads // kv_heads) % 2
    if kept == heads:
        choices = range(min(heads, 4), heads)
    else:
        choices = range(kept * min(group, 3 if is_odd else 2), heads, kept * (2 if is_odd else 1))
    for fewer in choices:
        if (hidden * fewer) % (8 * heads) == 0:
            return Fraction(fewer, heads)
    return Fraction(1)


def _one_layer(config: Mapping[str, Any]) -> Config:
    """The config of an image or audio part, cut to one layer: it is built but never run."""

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _one_layer(value)
        is_depth = re.search(r"(^|_)(depth|num_layers|num_hidden_layers|n_layer|n_layers)$", name)
        return 1 if is_depth and _is_number(value) and value > 1 else value

    return {name: cut(str(name), value) for name, value in config.items()}


def _is_list(name: str, key: Any) -> bool:
    """Whether a mapping's keys only state which layers its numbers apply to."""
    return str(key).isdigit() or "rates" in name


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((config[n] for n in names if _is_number(config.get(n))), 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
