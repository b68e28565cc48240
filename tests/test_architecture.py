"""The shape of the code, read off its syntax: who imports whom, and what never appears where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"llmc": "llmc", "passes": "llmc.passes", "kernels": "llmc.kernels", "cli": "llmc.cli"}

ENTRIES = ("llmc.cli.main", "llmc.__main__")  # of the command line

# Everything of ours that a package may import; itself is always allowed.
LEAVES = (
    "llmc.errors",
    "llmc.config",
    "llmc.sampling_params",
    "llmc.json_schema",
    "llmc.structured_outputs",
    "llmc.speculative_config",
    "llmc.lora_request",
    "llmc.outputs",
    "llmc.model_info",
    "llmc.image_input",
    "llmc.background_thread",
    "llmc.cache_dir",
    "llmc.garbage",
    "llmc.pooling",
    "llmc.logs",
    "llmc.resource_limits",
    "llmc.parent_watch",
    "llmc.control_groups",
    "llmc.host_memory",
)
MAY_IMPORT = {
    "llmc.errors": (),
    "llmc.config": LEAVES,
    "llmc.sampling_params": LEAVES,
    "llmc.json_schema": (),
    "llmc.structured_outputs": ("llmc.errors", "llmc.json_schema"),
    "llmc.speculative_config": ("llmc.errors",),
    "llmc.lora_request": ("llmc.errors",),
    "llmc.structured": (
        "llmc.errors",
        "llmc.resource_limits",
        "llmc.structured_outputs",
        "llmc.text",
    ),
    "llmc.outputs": LEAVES,
    "llmc.model_info": ("llmc.pooling",),
    "llmc.image_input": (),
    "llmc.pooling": ("llmc.errors",),
    "llmc.background_thread": (),
    "llmc.cache_dir": ("llmc.errors",),
    "llmc.garbage": (),
    "llmc.logs": (),
    "llmc.parent_watch": (),
    "llmc.resource_limits": (),
    "llmc.control_groups": (),
    "llmc.host_memory": ("llmc.control_groups",),
    "llmc.kernels": (
        "llmc.errors",
        "llmc.background_thread",
        "llmc.cache_dir",
        "llmc.control_groups",
    ),
    "llmc.passes": ("llmc.errors", "llmc.pooling", "llmc.kernels"),
    "llmc.engine": LEAVES,
    "llmc.weights": (
        "llmc.errors",
        "llmc.cache_dir",
        "llmc.resource_limits",
        "llmc.lora_request",
        "llmc.passes",
        "llmc.kernels",
    ),
    "llmc.compiler": (
        "llmc.errors",
        "llmc.cache_dir",
        "llmc.pooling",
        "llmc.weights",
        "llmc.passes",
        "llmc.kernels",
    ),
    "llmc.runner": (
        *LEAVES,
        "llmc.engine.plan",
        "llmc.compiler",
        "llmc.weights",
        "llmc.passes",
        "llmc.kernels",
    ),
    "llmc.startup": (
        *LEAVES,
        "llmc.engine",
        "llmc.runner",
        "llmc.compiler",
        "llmc.weights",
        "llmc.passes",
        "llmc.kernels",
        "llmc.structured",
        "llmc.text",
    ),
    "llmc.frontend": (*LEAVES, "llmc.engine", "llmc.startup", "llmc.text", "llmc.structured"),
    "llmc.processes": (
        *LEAVES,
        "llmc.engine.messages",
        "llmc.startup",
        "llmc.frontend",
        "llmc.__version__",
    ),
    "llmc.text": LEAVES,
    "llmc.server": (
        *LEAVES,
        "llmc.async_llm",
        "llmc.engine.admission",
        "llmc.engine.messages",
        "llmc.frontend",
        "llmc.processes",
        "llmc.startup.adapter_files",
        "llmc.startup.architecture_certificate",
        "llmc.startup.model_files",
        "llmc.text",
        "llmc.weights.gguf.files",
        "llmc.__version__",
    ),
}
NEVER = {  # ours that a package must not import, where the list above is silent
    "llmc.cli": ("llmc.passes", "llmc.kernels", "llmc.compiler", "llmc.runner"),
    "llmc.integrations": ("llmc.cli",),
    **dict.fromkeys(
        ("llmc.llm", "llmc.async_llm", "llmc.load_test"),
        ("llmc.cli", "llmc.integrations"),
    ),
    "llmc": ("llmc.cli",),
}
SERVER = ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "prometheus_client")
THIRD_PARTY = {  # name -> the only modules that may import it
    "torch": (
        "llmc.kernels",
        "llmc.passes",
        "llmc.compiler",
        "llmc.runner",
        "llmc.weights",
        "llmc.startup",
        "llmc.load_test",
        "llmc.inspect",
        "llmc.check",
        "llmc.cli.collect_env",
    ),
    "triton": ("llmc.kernels.triton",),
    "transformers": (
        "llmc.check.reference",
        "llmc.compiler",
        "llmc.weights",
        "llmc.startup.model_files",
        "llmc.text",
    ),
    "typer": ("llmc.cli",),
    "rich": ("llmc.cli", "llmc.frontend.progress"),  # the bar of LLM.generate
    "prompt_toolkit": ("llmc.cli",),
    "zmq": (
        "llmc.processes.remote_engine",
        "llmc.processes.engine_host",
        "llmc.processes.engine_main",
    ),
    "msgspec": ("llmc.processes.wire",),
    "llguidance": ("llmc.structured",),
    "ray": ("llmc.integrations.ray", "llmc.startup.ray_ranks"),
    **dict.fromkeys(SERVER, ("llmc.server",)),
    **dict.fromkeys(("starlette", "pydantic"), ("llmc.server", "llmc.integrations.ray")),
    # patterns: it matches them in linear time
    "pydantic_core": ("llmc.server", "llmc.weights.patterns"),
    "regex": ("llmc.weights.patterns",),
}
FAMILIES = (
    "llama|qwen|gemma|mistral|mixtral|deepseek|falcon|olmo|granite|mamba|phi_?[234]|gpt_?neox|gpt_?2"
    "|gpt_?oss|bloom|starcoder|cohere|exaone|smollm|ernie|glm4?|jamba|minimax|kimi"
)
FAMILY = re.compile(rf"(?<![a-z])(?:{FAMILIES})(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`target` as written: a module, or a name in it. `lazy` when inside a function."""

    target: str
    line: int
    lazy: bool


@cache
def modules() -> tuple[Module, ...]:
    """Every Python file that is installed, under the name that it is installed by."""
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            found.append(Module(name=".".join((package, *parts)), path=path, tree=tree))
    return tuple(found)


def under(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def _only_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(module: Module) -> Iterator[Import]:
    """What a module imports when it runs; imports for type checkers alone are left out."""

    def walk(nodes: list[ast.stmt], lazy: bool) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(target=alias.name, line=node.lineno, lazy=lazy)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = module.package.split(".")
                    base = ".".join([*above[: len(above) - node.level + 1], *filter(None, [base])])
                for alias in node.names:
                    yield Import(target=f"{base}.{alias.name}", line=node.lineno, lazy=lazy)
            elif not _only_for_types(node):
                inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for body in ("body", "orelse", "finalbody"):
                    yield from walk(getattr(node, body, []), inner)
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body, inner)

    yield from walk(module.tree.body, False)


def violations(rule: object) -> list[str]:
    """`file:line imports target` for every import of ours that `rule(module, import)` rejects."""
    return [
        f"{m.path.relative_to(ROOT)}:{i.line} imports {i.target}"
        for m in modules()
        for i in imports(m)
        if rule(m, i)  # type: ignore[operator]
    ]


def test_the_tree_was_found() -> None:
    names = {m.name for m in modules()}
    for name in (
        "llmc",
        "llmc.startup.start",
        "llmc.passes.pipeline",
        "llmc.kernels",
        "llmc.cli.main",
    ):
        assert name in names


def test_imports_point_down() -> None:
    def rule(module: Module, found: Import) -> bool:
        if not under(found.target, "llmc"):
            return False
        for package, allowed in MAY_IMPORT.items():
            if under(module.name, package):
                return not under(found.target, package, *allowed)
        never = next((n for p, n in NEVER.items() if under(module.name, p)), ())
        return under(found.target, *never) and not under(module.name, *ENTRIES)

    assert violations(rule) == []


def test_nothing_below_the_command_line_imports_it() -> None:
    def rule(module: Module, found: Import) -> bool:
        return under(found.target, "llmc.cli") and not under(module.name, "llmc.cli", *ENTRIES)

    assert violations(rule) == []


def test_folders_are_never_imported_by_their_bare_names() -> None:
    assert violations(lambda m, i: under(i.target, "kernels", "passes", "cli")) == []


@pytest.mark.parametrize("package", sorted(THIRD_PARTY))
def test_third_party_packages_stay_where_they_belong(package: str) -> None:
    def rule(module: Module, found: Import) -> bool:
        allowed = under(module.name, *THIRD_PARTY[package])
        return under(found.target, package) and not allowed

    assert violations(rule) == []


def test_the_engine_imports_no_torch_even_lazily() -> None:
    heavy = ("torch", "numpy", "transformers", "llmc.runner", "llmc.compiler")
    assert violations(lambda m, i: under(m.name, "llmc.engine") and under(i.target, *heavy)) == []


def test_the_python_api_needs_no_server() -> None:
    """llmc.LLM and AsyncLLM work where FastAPI is not installed."""
    api = ("llmc.llm", "llmc.async_llm", "llmc.text", "llmc.frontend", "llmc.startup.start")
    heavy = (*SERVER, "llmc.server")
    assert violations(lambda m, i: under(m.name, *api) and under(i.target, *heavy)) == []


@pytest.mark.parametrize("entry", ["llmc", "llmc.cli.main"])
def test_starting_up_is_light(entry: str) -> None:
    """`--help` must be instant, so torch comes after the arguments are parsed."""
    heavy = ("torch", "transformers", "triton", "fastapi", "numpy")
    code = f"import sys, {entry}; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT.parent,
    )
    assert done.stdout.split() == []


def test_every_module_has_a_docstring() -> None:
    bare = [str(m.path.relative_to(ROOT)) for m in modules() if not ast.get_docstring(m.tree)]
    assert bare == []


def test_no_model_family_is_named_in_the_code() -> None:
    """A new architecture must run on the day it appears, so no code may know one by name."""
    named = []
    for module in modules():
        for number, line in enumerate(module.path.read_text(encoding="utf-8").splitlines(), 1):
            if FAMILY.search(line):
                named.append(f"{module.path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert named == []


def test_the_search_for_family_names_finds_them() -> None:
    for line in ("class LlamaRotary", "'qwen3'", "is_gpt_neox", "phi3_rope", "GPT2 style", "gemma"):
        assert re.search(FAMILIES, line, re.IGNORECASE), line
    for line in ("import collama", "egpt", "a bloomed", "delphi 3"):
        assert not FAMILY.search(line), line


def test_packages_list_is_complete() -> None:
    """An unlisted folder would silently be missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    folders = {m.package for m in modules()}
    assert sorted(listed) == sorted(folders)
    for package in folders:
        assert any(m.name == package for m in modules()), f"{package} has no __init__.py"


def test_no_code_runs_text_or_pickles() -> None:
    """eval, exec and pickle turn data into code; the one exec runs what lower.py wrote itself."""
    found = []
    for module in modules():
        for node in ast.walk(module.tree):
            name = getattr(getattr(node, "func", None), "id", "")
            if isinstance(node, ast.Call) and name in ("eval", "exec"):
                found.append(f"{module.name}: {name}")
    assert found in ([], ["llmc.compiler.lower: exec"])
    assert violations(lambda m, i: under(i.target, "pickle", "marshal", "dill", "shelve")) == []


def test_tests_keep_the_repository_off_the_import_path() -> None:
    """A root conftest or an __init__ in tests would put `kernels` and `cli` on sys.path."""
    assert not {str(ROOT), str(ROOT / "tests")} & set(sys.path)
    assert not (ROOT / "conftest.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
