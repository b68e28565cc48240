"""Whether and how a checkpoint is served for pooling: the task, the method and the layers after it.

The task is the configured one, else it follows from the files: a classifier's architecture in
config.json, a sentence-transformers directory (modules.json, whose modules are read here), or an
encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmc.config import EngineConfig
from llmc.errors import CheckpointError, ConfigError
from llmc.pooling import DENSE, METHODS, Activation, Dense, Head, Method, PoolingInfo, Task
from llmc.startup.config_facts import ConfigFacts
from llmc.startup.model_files import (
    ModelFiles,
    json_or_nothing,
    parse_json,
    sentence_modules,
)

# Suffixes of their architectures.
_CLASSIFIERS: dict[Task, str] = {
    "classify": "ForSequenceClassification",
    "token_classify": "ForTokenClassification",
}
_IDENTITY = ("torch.nn.modules.linear.Identity", "torch.nn.Identity")
_DENSE_ACTIVATIONS: dict[str, Literal["identity", "tanh"]] = {
    **dict.fromkeys(_IDENTITY, "identity"),
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.Tanh": "tanh",
}
# The names in configs for a classifier's pooling; all other names mean the first token.
_CLASSIFIER_POOLING: dict[str, Method] = {"mean": "mean", "late": "mean", "last": "last"}
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_max_tokens": "max",
}
_LONG = {"lasttoken": "last", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a checkpoint is served for a task other than text generation."""

    task: Task
    method: Method
    head: Head
    normalize: bool = False
    activation: Activation | None = None  # None: by the number of scores
    labels: tuple[str, ...] = ()
    dense_folders: tuple[Path, ...] = ()  # with the weights of `head.dense`
    max_tokens: int | None = None  # limit on input tokens set by the checkpoint's authors

    def describe(self, size: int) -> PoolingInfo:
        """Describe it for clients. `size`: number of values in its vectors."""
        if self.task in ("embed", "token_embed"):
            return PoolingInfo(
                task=self.task,
                method=self.method,
                size=size,
                normalize=self.normalize,
                token_types=self.head.token_types,
            )
        named = self.labels if len(self.labels) == size else ()
        return PoolingInfo(
            task=self.task,
            method=self.method,
            size=size,
            activation=self.activation or ("sigmoid" if size == 1 else "softmax"),
            labels=named or tuple(f"LABEL_{i}" for i in range(size)),
            token_types=self.head.token_types,
        )


def find_pooling(config: EngineConfig, files: ModelFiles, facts: ConfigFacts) -> Pooling | None:
    """How to serve the checkpoint for pooling; None: it generates text. Only reads JSON files.

    Raises ConfigError for a task that the checkpoint does not support, CheckpointError if its
    sentence-transformers modules are not supported.
    """
    stated = json_or_nothing(files.path / "config.json")
    task, found = config.task, _own_task(files.path, stated)
    if task == "auto":
        task = found or ("embed" if facts.is_encoder else "generate")
    elif task in ("score", "pooling"):
        task = found or "embed"
    if task == "generate":
        if facts.is_encoder:
            raise ConfigError(
                f"{files.name} is an encoder, whose tokens attend to later ones, so it can't "
                "generate text; leave task out, or set task='embed' (--task embed)"
            )
        if config.pooling != "auto" or config.normalize is not None:
            raise ConfigError(
                "pooling and normalize are for models that return vectors; set task='embed' "
                "(--task embed)"
            )
        return None
    _check_options(config)
    if task in ("classify", "reward", "token_classify"):
        needed: Task = "token_classify" if task == "token_classify" else "classify"
        if found != needed:
            raise ConfigError(
                f"task {config.task!r} needs a classifier's checkpoint (an architecture "
                f"...{_CLASSIFIERS[needed]} in config.json), which {files.name} is not; to serve "
                "its hidden states, set task='embed' (--task embed)"
            )
        return _classifier(config, needed, stated, facts)
    return _embedder(config, task == "token_embed", files.path, facts)


def _own_task(path: Path, stated: dict[str, Any]) -> Task | None:
    """The task that a checkpoint was made for, if its files say so."""
    names = stated.get("architectures")
    for task, ending in _CLASSIFIERS.items():
        if isinstance(names, list) and any(str(name).endswith(ending) for name in names):
            return task
    if not (path / "modules.json").is_file():
        return None
    pools = any(kind == "Pooling" for kind, _ in sentence_modules(path))
    return "embed" if pools else "token_embed"  # per-token vectors, as for late interaction


def _check_options(config: EngineConfig) -> None:
    """Raise ConfigError for options that do not apply to models that don't generate tokens."""
    given = {
        "speculative_config": config.speculative_config is not None,
        "logits_processors": bool(config.logits_processors),
        "enable_lora": config.enable_lora,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(f"{name} is for models that generate text; leave it out")


def _classifier(
    config: EngineConfig, task: Task, stated: dict[str, Any], facts: ConfigFacts
) -> Pooling:
    of_tokens = task == "token_classify"
    method = "last" if of_tokens else _CLASSIFIER_POOLING.get(facts.classifier_pooling, "cls")
    if config.pooling not in ("auto", method):
        raise ConfigError(
            f"this classifier has {method!r} pooling, as in transformers; pooling "
            f"{config.pooling!r} is for embeddings"
        )
    activation: Activation | None = None
    transformed = stated.get("sentence_transformers")
    chosen = stated.get("sbert_ce_default_activation_function")  # in older directories
    if isinstance(transformed, dict):
        chosen = transformed.get("activation_fn", chosen)
    if config.task == "reward" or chosen in _IDENTITY:
        activation = "none"
    elif stated.get("problem_type") == "multi_label_classification":
        activation = "sigmoid"
    elif stated.get("problem_type") == "regression":
        activation = "none"
    return Pooling(
        task=task,
        method=method,
        head=_head(facts, kind="token_score" if of_tokens else "score"),
        activation=activation,
        labels=_labels(stated.get("id2label")),
    )


def _labels(named: object) -> tuple[str, ...]:
    """Labels by number, from JSON's string keys in any order; () if some have no name."""
    if not isinstance(named, dict) or any(str(i) not in named for i in range(len(named))):
        return ()
    return tuple(str(named[str(i)]) for i in range(len(named)))


def _head(facts: ConfigFacts, **fields: Any) -> Head:
    types = facts.is_encoder and facts.num_token_types > 1
    return Head(encoder=facts.is_encoder, token_types=types, **fields)


def _embedder(config: EngineConfig, of_tokens: bool, path: Path, facts: ConfigFacts) -> Pooling:
    """Pooling for embeddings, as given by the modules of a sentence-transformers directory.

    Without one, vectors are normalized: the last token of a decoder, the mean over an encoder's
    tokens. With `of_tokens`, each token gets a normalized vector, computed by the modules before
    the pooling.
    """
    if of_tokens and config.pooling != "auto":
        raise ConfigError(
            f"pooling {config.pooling!r} is for task 'embed': with 'token_embed' each token gets "
            "its own vector, without pooling"
        )
    chosen, normalize = _method_named("last" if of_tokens else config.pooling), True
    method = chosen or ("mean" if facts.is_encoder else "last")
    dense: list[Dense] = []
    folders: list[Path] = []
    max_tokens = None
    if (path / "modules.json").is_file():
        normalize = of_tokens
        for kind, folder in sentence_modules(path):
            if kind == "Transformer":
                stated = json_or_nothing(folder / "sentence_bert_config.json")
                if stated.get("do_lower_case"):
                    raise CheckpointError(
                        "sentence_bert_config.json sets do_lower_case, which is not supported"
                    )
                limit = stated.get("max_seq_length")
                max_tokens = limit if isinstance(limit, int) and limit > 0 else None
            elif kind == "Pooling" and of_tokens:
                break  # later modules apply to the pooled vector
            elif kind == "Pooling":
                method = chosen or _stated_method(folder)
            elif kind == "Dense":
                dense.append(_dense(folder))
                folders.append(folder)
            elif kind == "Normalize":
                normalize = True
            else:
                raise CheckpointError(f"modules.json has a module {kind}, which is not supported")
    return Pooling(
        task="token_embed" if of_tokens else "embed",
        method=method,
        head=_head(facts, kind="hidden", dense=tuple(dense)),
        normalize=normalize if config.normalize is None else config.normalize,
        dense_folders=tuple(folders),
        max_tokens=max_tokens,
    )


def _stated_method(folder: Path) -> Method:
    stated = parse_json(folder / "config.json")
    named = stated.get("pooling_mode")  # in newer directories; older ones have a flag per mode
    modes = named if isinstance(named, list) else [named] if named else []
    modes = modes or [name for field, name in _MODES.items() if stated.get(field)] or ["mean"]
    found = _method_named(_LONG.get(str(modes[0]), str(modes[0]))) if len(modes) == 1 else None
    if found is None:
        raise CheckpointError(
            f"{folder.name}/config.json sets {' and '.join(map(str, modes))} pooling; "
            f"supported is one of {', '.join(METHODS)} (choose one with --pooling)"
        )
    return found


def _method_named(name: str) -> Method | None:
    return next((method for method in METHODS if method == name), None)


def _dense(folder: Path) -> Dense:
    stated = parse_json(folder / "config.json")
    sizes = [stated.get(name) for name in ("in_features", "out_features")]
    activation = _DENSE_ACTIVATIONS.get(str(stated.get("activation_function")))
    is_sized = all(type(n) is int and 0 < n < _MAX_WIDTH for n in sizes)
    if activation is None or not is_sized or stated.get("use_residual"):
        raise CheckpointError(
            f"{folder.name}/config.json is not a supported Dense module (sizes {sizes}, "
            f"activation {stated.get('activation_function')!r}, use_residual "
            f"{stated.get('use_residual', False)!r})"
        )
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder.name} has no model.safetensors")
    return Dense(
        inputs=int(sizes[0] or 0),
        outputs=int(sizes[1] or 0),
        bias=stated.get("bias") is not False,
        activation=activation,
    )


def dense_names(pooling: Pooling | None) -> dict[str, tuple[Path, str]]:
    """Parameters of Dense layers -> the folder that has each, and its name in that folder."""
    if pooling is None:
        return {}
    return {
        f"{DENSE.format(i)}.{part}": (folder, f"linear.{part}")
        for i, folder in enumerate(pooling.dense_folders)
        for part in (("weight", "bias") if pooling.head.dense[i].bias else ("weight",))
    }
