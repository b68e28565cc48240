"""generation_config.json -> the model's recommended sampling, under the names of SamplingParams."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llmc.errors import ConfigError, InvalidRequestError
from llmc.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repeat_last_n")
_PENALTIES = ("repetition_penalty", "repeat_last_n")
_OVERRIDABLE = (*_NUMBERS, "presence_penalty", "frequency_penalty")
# Fields that change what transformers generates and that llmc does not apply, with the values (or
# None) that have no effect. The second group counts for sampling only.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
    "watermarking_config": (),
}
_NOT_SAMPLED_BY: Mapping[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "typical_p": (1,),
}


def recommended_sampling(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The model's default sampling parameters, from its parsed generation_config.json.

    Fields that llmc does not apply are logged with their values. Only their types are checked.
    """
    usable: dict[str, Any] = {name: stored[name] for name in _NUMBERS if _is_number(stored, name)}
    others = {**_NOT_APPLIED, **_NOT_SAMPLED_BY}
    if stored.get("do_sample") is False:  # what is not for sampling counts all the same
        penalty = {n: v for n, v in usable.items() if n in _PENALTIES}
        usable, others = {"temperature": 0.0, **penalty}, dict(_NOT_APPLIED)
    stop = _list_of(stored.get("stop_strings"))
    if stop and all(isinstance(text, str) for text in stop):
        usable["stop"] = stop
    if words := _never_generated(stored):
        usable["bad_words_token_ids"] = words
    _log_not_applied(stored, others)
    return usable


def check_override(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling defaults that replace the model's, {} for None. ConfigError if one is invalid."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            'override_generation_config must be a mapping such as {"temperature": 0.7}, '
            f"got {given!r:.200}"
        )
    for name, value in given.items():
        if name not in _OVERRIDABLE:
            raise ConfigError(
                f"override_generation_config can set {', '.join(_OVERRIDABLE)}; got {name!r:.80}"
            )
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            raise ConfigError(f"override_generation_config: {error}") from error
    return dict(given)


def _is_number(stored: Mapping[str, Any], name: str) -> bool:
    value = stored.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list_of(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _never_generated(stored: Mapping[str, Any]) -> list[list[int]]:
    """The token sequences that must not be generated, suppressed tokens included. An end token is
    no bad word in transformers either, but can be suppressed."""
    words = [[token] for token in _list_of(stored.get("suppress_tokens"))]
    ends = [[token] for token in _list_of(stored.get("eos_token_id"))]
    bad = (word for word in _list_of(stored.get("bad_words_ids")) if word not in ends)
    words += [word for word in bad if isinstance(word, list)]
    return [w for w in words if w and all(type(token) is int and token >= 0 for token in w)]


def _log_not_applied(stored: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    found = [
        f"{name}={stored[name]!r:.80}"
        for name, neutral in fields.items()
        if stored.get(name) is not None and stored[name] not in neutral
    ]
    if found:
        log.warning(
            "the model's generation_config.json sets %s, which llmc does not apply; answers can "
            "differ from those of transformers' generate()",
            ", ".join(found),
        )
