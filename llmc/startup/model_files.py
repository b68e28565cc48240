"""A model's name -> a directory with its files: the default model, a local path, or a hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmc.config import EngineConfig
from llmc.errors import CheckpointError, ConfigError, reason_of
from llmc.startup.config_overrides import new_fields, with_overrides
from llmc.startup.default_model import default_model, default_model_path
from llmc.startup.gguf_files import is_new, model_directory
from llmc.startup.hub import HubName, download_gguf, downloading
from llmc.text.tokenizer import TOKENIZER_FILES
from llmc.weights.gguf.files import first_part, is_gguf, is_gguf_file, name_of
from llmc.weights.quantized.quantization_config import (
    GGUF,
    QUANTIZATION_KEYS,
    StoredQuantization,
    read_quantization,
)
from llmc.weights.weight_files import ADAPTER_CONFIG, only_an_adapter

_ADDED_TOKENS = re.compile(r'"added_tokens":\s*')
# Where tools state the quantization if not in config.json: its method, and the field with the rest.
_QUANTIZATION_FILES: dict[str, tuple[str, str | None]] = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quantize_config.json": ("gptq", None),
    "quant_config.json": ("awq", None),
}
# A repository's folders have the model in other formats; `consolidated` is a vendor's own format.
_NOT_DOWNLOADED = ["*/*.safetensors", "consolidated*.safetensors"]
# A model is built before its weights are read; each layer takes memory then.
_MOST = {"vocab_size": 10**8, "num_hidden_layers": 4096, "hidden_size": 10**8}
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "LICENSE*"]
_PICKLED_WEIGHTS = ["pytorch_model*.bin"]  # of repositories without any other weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model's directory and name. A local one is named by its last path component only."""

    name: str
    path: Path
    is_default: bool
    added_fields: Sequence[str] = ()  # to config.json, by hf_overrides

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)


def resolve_model(config: EngineConfig) -> ModelFiles:
    """Find the model's files, downloading a hub id. CheckpointError if there is no usable model."""
    return (locate(config) or fetch(config)).files()


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A model on this machine: a directory, or a GGUF file, which is converted to a directory at
    its first start (`sampling`: parameters to write there). `overrides`: see config_overrides."""

    name: str
    path: Path
    is_default: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @property
    def is_new(self) -> bool:
        """Whether `files` takes seconds, because it has to read a GGUF file with transformers."""
        return self.is_gguf and is_new(self.path, self.sampling)

    def files(self) -> ModelFiles:
        """Raises CheckpointError for a GGUF file that can't be read or served, and for overrides
        of a config that can't be read."""
        path = model_directory(self.path, self.sampling) if self.is_gguf else self.path
        added: tuple[str, ...] = ()
        if self.overrides:
            added = tuple(new_fields(parse_json(path / "config.json"), self.overrides))
            path = with_overrides(path, self.overrides)
        return ModelFiles(name=self.name, path=path, is_default=self.is_default, added_fields=added)


def locate(config: EngineConfig) -> Location | None:
    """Find a local model without reading it. None for a hub id, CheckpointError for a bad path."""
    found = _locate(config)
    return None if found is None else replace(found, overrides=config.hf_overrides or {})


def _locate(config: EngineConfig) -> Location | None:
    if config.model in (None, default_model().name):
        chosen = default_model()
        return Location(
            name=chosen.name, path=default_model_path(), is_default=True, sampling=chosen.sampling
        )
    assert config.model is not None
    path = Path(config.model).expanduser()
    if config.model and path.exists():  # "" would be the current directory
        name = path.resolve().name or config.model  # the root directory has no name
        gguf = _gguf_in(path)
        if gguf is not None:
            # not the name that a link leads to: in the hub's cache that is a hash
            name = path.name if path.is_file() else name
            return Location(name=name_of(name), path=gguf)
        return Location(name=name, path=_checked(path))
    if HubName.parse(config.model) is None:
        raise CheckpointError(
            f"no model at {config.model!r}: give a directory with config.json and safetensors, "
            "a .gguf file, a hub id like `owner/name` or `owner/name:Q4_K_M`, or no model for the "
            "default one"
        )
    return None


def fetch(config: EngineConfig) -> Location:
    """A model of the hub, after its download. CheckpointError if there is no usable model."""
    assert config.model is not None, "no name means the default model, which is local"
    path = download(config)
    is_page = "://" in config.model
    return Location(
        name=str(HubName.parse(config.model)) if is_page else config.model,
        path=path if path.is_file() else _checked(path),
        overrides=config.hf_overrides or {},
    )


def tokenizer_folder(config: EngineConfig) -> Path | None:
    """The directory with the model's tokenizer, without a download or the conversion of a GGUF
    file; None if one of them is still to come, or the model can't be served."""
    try:
        location = locate(config)
        if location is not None:
            return None if location.is_new else location.files().path
    except (ConfigError, OSError):
        return None
    from huggingface_hub import try_to_load_from_cache

    name = HubName.parse(config.model or "")
    if name is None or name.is_gguf:
        return None
    found = try_to_load_from_cache(name.repo, "config.json", revision=config.revision)
    return Path(found).parent if isinstance(found, str) else None


def served_name(config: EngineConfig) -> str:
    """The name of a model that may not exist (yet): as in ModelFiles, or the last component of the
    configured name."""
    try:
        location = locate(config)
    except (ConfigError, OSError):
        location = None
    return location.name if location is not None else Path(config.model or "").name


def _gguf_in(path: Path) -> Path | None:
    """The GGUF file at `path`, or in a directory that has no other weights."""
    if path.is_file():
        return path if is_gguf_file(path) else None
    return None if _has_weights(path) or not path.is_dir() else first_part(path)


def _checked(path: Path) -> Path:
    if not path.is_dir():
        what = "a file" if path.is_file() else "neither a file nor a directory"
        raise CheckpointError(
            f"{str(path)!r} is {what}; give a .gguf file, or the directory with config.json"
        )
    if not (path / "config.json").is_file() and (path / ADAPTER_CONFIG).is_file():
        raise only_an_adapter(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{str(path)!r} has no config.json, so it is not a model directory")
    return path


def download(config: EngineConfig) -> Path:
    """The model's directory or GGUF file in the hub's cache; what is missing is downloaded."""
    name = HubName.parse(config.model or "")
    assert name is not None, "paths are not downloaded"
    with downloading(str(config.model)):
        folder = None if name.is_gguf else _download_safetensors(name.repo, config)
        if folder is not None and (config.load_format == "dummy" or _has_weights(folder)):
            return folder
        file = download_gguf(name, config.revision)
        if file is not None:
            return file
        assert folder is not None, "a name that asks for a file has one"
        _download(name.repo, config, _PICKLED_WEIGHTS)
        return folder


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _download(
    repo: str, config: EngineConfig, patterns: list[str], ignored: list[str] | None = None
) -> Path:
    """The repository's folder in the hub's cache, with the files of these patterns."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo, revision=config.revision, allow_patterns=patterns, ignore_patterns=ignored
        )
    )


def _download_safetensors(repo: str, config: EngineConfig) -> Path:
    patterns = [p for p in _PATTERNS if config.load_format != "dummy" or "safetensors" not in p]
    if config.trust_remote_code:
        patterns.append("*.py")
    path = _download(repo, config, patterns, _NOT_DOWNLOADED)
    if dense := _dense_weights(path):
        _download(repo, config, dense)
    return path


def _dense_weights(path: Path) -> list[str]:
    """Weights of sentence-transformers' Dense modules, which are in separate folders."""
    if not (path / "modules.json").is_file():
        return []
    found = (folder.relative_to(path) for kind, folder in sentence_modules(path) if kind == "Dense")
    return [f"{folder}/model.safetensors" for folder in found]


def load_config(files: ModelFiles, config: EngineConfig) -> Any:
    """The model's transformers config. Code in the directory runs only with trust_remote_code."""
    from transformers import AutoConfig

    wanted = config.model or files.name  # errors quote what the user wrote
    fields = parse_json(files.path / "config.json")
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    stated = fields.get("dtype") or fields.get("torch_dtype")
    if isinstance(stated, str) and (stated == "auto" or stated.startswith("torch.")):
        # transformers has no such names, but uses the argument instead
        options["dtype"] = "float32" if stated == "auto" else stated.removeprefix("torch.")
    try:
        loaded = AutoConfig.from_pretrained(files.path, **options)
        if stated == "auto":
            loaded.dtype = None
    except Exception as e:  # transformers raises nearly every type here, from KeyError to OSError
        reason = reason_of(e)
        if "AutoConfig" in (fields.get("auto_map") or ()) and not config.trust_remote_code:
            reason = (
                f"transformers has no model_type {fields.get('model_type')!r}, and the model comes "
                "with its own Python code, which runs only with trust_remote_code "
                "(--trust-remote-code); read that code first"
            )
        raise CheckpointError(f"config.json of {wanted!r} can't be used: {reason}") from e
    if not config.trust_remote_code:
        _forget_code(loaded)
    text = getattr(loaded, "get_text_config", lambda: loaded)()
    if getattr(loaded, "is_encoder_decoder", False):
        raise CheckpointError(
            f"{wanted!r} is an encoder-decoder model ({loaded.model_type}); "
            "llmc serves decoder-only causal language models"
        )
    for part in (loaded, text):  # capture the model's unquantized code: see stored_weights
        for key in QUANTIZATION_KEYS:
            vars(part).pop(key, None)
    for name, most in _MOST.items():
        value = getattr(text, name, None)
        if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
            raise CheckpointError(f"config.json of {wanted!r}: {name} is {value!r}")
    return loaded


def _forget_code(config: Any) -> None:
    """Remove what names Python code in the directory, of configs inside a config too: transformers
    would ask on the terminal whether to run it."""
    from transformers import PretrainedConfig

    vars(config).pop("auto_map", None)
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            _forget_code(value)


def load_quantization(files: ModelFiles) -> StoredQuantization | None:
    """How the checkpoint's weights are quantized, if they are."""
    if is_gguf(files.path):
        return GGUF
    found = read_quantization(parse_json(files.path / "config.json"))
    for name, (method, part) in _QUANTIZATION_FILES.items():
        if found is None and (files.path / name).is_file():
            stated: Any = parse_json(files.path / name)
            stated = stated.get(part) if part else stated
            if isinstance(stated, dict):
                stated = {"quant_method": method, **stated}
            found = read_quantization({QUANTIZATION_KEYS[0]: stated})
    return found


def parse_json(path: Path) -> dict[str, Any]:
    """Read a JSON file. CheckpointError unless it contains an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path.name} can't be read: {str(e)[:200]}") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} has a {type(data).__name__} instead of an object")
    return data


def _module_class(kind: str) -> str:
    """The bare class name of a module of sentence-transformers, or of PyLate, which uses the same
    format for late interaction. Other classes keep their full name."""
    package, _, name = kind.rpartition(".")
    return name if package.partition(".")[0] in ("sentence_transformers", "pylate") else kind


def sentence_modules(path: Path) -> list[tuple[str, Path]]:
    """Class and folder of each module of sentence-transformers' modules.json, in order.

    CheckpointError if it can't be read.
    """
    try:
        listed = json.loads((path / "modules.json").read_text(encoding="utf-8"))
        found = [(_module_class(str(m["type"])), str(m["path"])) for m in listed]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"modules.json can't be read: {str(e)[:200]}") from e
    for _, folder in found:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"modules.json names {folder!r}, outside the model's folder")
    return [(kind, path / folder) for kind, folder in found]


def generation_defaults(files: ModelFiles) -> dict[str, Any]:
    """generation_config.json as a plain mapping; empty if it is missing or unusable."""
    return json_or_nothing(files.path / "generation_config.json")


def tokenizer_end(folder: Path) -> int | None:
    """Id of the end token according to the tokenizer's files, without loading the tokenizer."""
    settings = json_or_nothing(folder / "tokenizer_config.json")
    end = settings.get("eos_token") or json_or_nothing(folder / "special_tokens_map.json").get(
        "eos_token"
    )
    if isinstance(end, dict):
        end = end.get("content")
    stored = settings.get("added_tokens_decoder")
    added = list(stored.items()) if isinstance(stored, dict) else []
    added += [(token.get("id"), token) for token in _added_tokens(folder / "tokenizer.json")]
    older = json_or_nothing(folder / "added_tokens.json")  # from before the two above
    added += [(number, {"content": text}) for text, number in older.items()]
    for number, token in added:
        if isinstance(end, str) and isinstance(token, dict) and token.get("content") == end:
            return int(number) if re.fullmatch(r"[0-9]{1,9}", str(number)) else None
    return None


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json, without parsing its vocabulary of many MB."""
    try:
        text = path.read_text(encoding="utf-8")
        start = _ADDED_TOKENS.search(text)
        tokens = json.JSONDecoder().raw_decode(text, start.end())[0] if start else []
    except (OSError, ValueError, RecursionError):
        return []
    return [t for t in tokens if isinstance(t, dict)] if isinstance(tokens, list) else []


def json_or_nothing(path: Path) -> dict[str, Any]:
    """`parse_json`, but empty if the file is missing or unusable."""
    try:
        return parse_json(path)
    except CheckpointError:
        return {}
