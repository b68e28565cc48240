"""The `llmc` command as a user meets it: instant help, one clear line for every mistake."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmc import __version__
from llmc.cli.main import main
from llmc.kernels.cpu.levels import supported

HEAVY = (
    "torch",
    "transformers",
    "fastapi",
    "httpx",
    "numpy",
    "prompt_toolkit",
    "uvicorn",
    "pydantic",
)


def run_main(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", [["serve", "--help"], ["bench", "latency", "-h"]])
def test_help_loads_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    script = (
        "import sys, llmc.cli.main\n"
        f"code = llmc.cli.main.main({words!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert code == 0 and not loaded, (code, loaded)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout


@pytest.mark.parametrize(
    "words",
    [["--help"], ["-h"], ["serve", "--help"], ["chat", "--help"], ["bench", "--help"],
     ["bench", "serve", "--help"], ["bench", "throughput", "-h"], ["bench", "latency", "--help"],
     ["inspect", "--help"], ["check", "--help"], ["collect-env", "--help"]],
)  # fmt: skip
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run_main(capsys, *words)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: llmc")


@pytest.mark.parametrize(
    "command", [["serve"], ["chat"], ["inspect"], ["check"], ["bench", "throughput"]]
)
def test_help_shows_groups_and_whole_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run_main(capsys, *command, "--help")
    for heading in ("Model:", "Batching and memory:", "Compiler:"):
        assert f"\n{heading}\n" in out
    assert "--max-num-batched-tokens TOKENS" in out
    assert "--no-enable-prefix-caching" in out
    assert max(map(len, out.splitlines())) <= 80


def test_q_is_quick_in_the_chat_and_quantization_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, err = run_main(capsys, "chat", "-q", "")
    assert "--quick needs a question" in err
    _, out, _ = run_main(capsys, "chat", "--help")
    assert "-q, --quick QUESTION" in out and "--quantization" in out
    _, _, err = run_main(capsys, "serve", "-q", "int5")
    assert "unknown quantization 'int5'" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(capsys, "--version") == (0, f"llmc {__version__}\n", "")


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_API_KEY", "very secret")
    monkeypatch.setenv("LLMC_DTYPE", "float32")
    code, out, _ = run_main(capsys, "collect-env")
    assert code == 0
    assert "torch " in out and "transformers " in out and "LLMC_DTYPE" in out
    assert "very secret" not in out


def test_collect_env_shows_the_instruction_set_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supported():
        pytest.skip("this processor has no level of instructions")
    lowest, *others = [level.name for level in supported()]
    monkeypatch.setenv("LLMC_CPU_TARGET", lowest)
    _, out, _ = run_main(capsys, "collect-env")
    assert re.search(rf"^cpu target +{lowest} \(of {', '.join([lowest, *others])}\)$", out, re.M)
    monkeypatch.setenv("LLMC_CPU_TARGET", "native")
    code, out, _ = run_main(capsys, "collect-env")
    assert code == 0 and "cpu target" in out and "is not an instruction set level" in out


def test_collect_env_shows_the_compiler_that_would_build_the_ops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "echo mine")  # answers --version
    _, out, _ = run_main(capsys, "collect-env")
    assert re.search(r"^c\+\+ compiler +echo mine \(mine --version\)$", out, re.M)
    monkeypatch.setenv("CXX", "/nowhere/c++")  # in which case no other one is used
    _, out, _ = run_main(capsys, "collect-env")
    assert re.search(r"^c\+\+ compiler +not found", out, re.M)


MISTAKES = {
    "unknown flag": (["serve", "--max-model-length", "9"], "did you mean --max-model-len?"),
    "vllm flag": (["serve", "--pipeline-parallel-size", "2"], "use --tensor-parallel-size"),
    "elsewhere": (["check", "-pp", "2"], "hint: pipeline parallelism is not supported"),
    "no typo": (["serve", "--quantum-leap"], "hint: see `llmc serve --help`"),
    "short vllm flag": (["serve", "-pp", "2"], "does not support -pp 2"),
    "eager": (["check", "--enforce-eager"], "hint: write -O0"),
    "unknown command": (["server"], "Did you mean 'serve'?"),
    "not a number": (["serve", "--max-model-len", "many"], "--max-model-len"),
    "port": (["serve", "--port", "abc"], "--port must be an integer, got 'abc'"),
    "timeout": (["serve", "--shutdown-timeout", "x"], "must be a number, got 'x'"),
    "mid-sentence": (["serve", "--ssl-keyfile", "x"], "certificate: --ssl-certfile"),
    "out of range": (["serve", "--max-num-seqs", "-1"], "--max-num-seqs must be a positive"),
    "unknown dtype": (["chat", "--dtype", "int3", "hi"], "unknown dtype 'int3'"),
    "temperature": (["chat", "--temperature", "-1", "hi"], "temperature must be"),
    "no question": (["chat", "--quick", ""], "--quick needs a question"),
    "chat url": (["chat", "--url", "localhost:1", "hi"], "--url must start with http"),
    "chat no server": (["chat", "--url", "http://127.0.0.1:1", "hi"], "no server answers"),
    "bench no server": (["bench", "serve", "--port", "1"], "no server answers"),
    "bench backend": (["bench", "serve", "--backend", "grpc"], "unknown backend 'grpc'"),
    "bench rate": (["bench", "serve", "--request-rate", "0"], "--request-rate must be above 0"),
    "bench goodput": (["bench", "serve", "--goodput", "ttft"], "NAME:MILLISECONDS"),
    "bench metrics": (["bench", "serve", "--percentile-metrics", "x"], "unknown metrics"),
    "bench json": (["bench", "throughput", "--output-json", "/nowhere/x.json"], "/nowhere"),
    "bench batch": (["bench", "latency", "--batch-size", "99"], "exceeds --max-num-seqs 64"),
}


@pytest.mark.parametrize(
    "variable, value, expected",
    [("LLMC_PORT", "abc", "an integer"), ("LLMC_VERIFY", "maybe", "1 or 0")],
)
def test_a_wrong_environment_variable_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    expected: str,
) -> None:
    monkeypatch.setenv(variable, value)
    code, _, err = run_main(capsys, "serve")
    assert (code, err.splitlines()[0]) == (
        2,
        f"error: {variable} must be {expected}, got {value!r}",
    )


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words, expected = MISTAKES[name]
    code, out, err = run_main(capsys, *words)
    assert code == 2
    assert expected in err
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:]) and len(lines) <= 2
    assert out == ""


@pytest.mark.parametrize("words", [(), ("bench",)])
def test_a_bare_command_shows_its_help(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, err = run_main(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: llmc") and "\n\nCommands:\n" in err


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_main(capsys, "serve", "--max-num-seqs", "0", "--debug")
    assert code == 2
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: ")


def test_a_bug_is_called_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("llmc.cli.chat.find_question", broken)
    code, _, err = run_main(capsys, "chat", "hi")
    assert code == 1
    assert err.startswith("error: RuntimeError: first line second line\nhint: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (
            RuntimeError("can't start new thread"),  # of `threading`
            1,
            "error: no further thread may be started\nhint: raise the limit of processes",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            2,
            "error: no folder for temporary files is writable\nhint: set TMPDIR to one that is\n",
        ),
    ],
)
def test_a_limit_of_the_system_is_no_bug(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    told: str,
) -> None:
    def limited(*args: object) -> None:
        raise error

    monkeypatch.setattr("llmc.cli.chat.find_question", limited)
    done, _, err = run_main(capsys, "chat", "hi")
    assert done == code and err.startswith(told)


@pytest.mark.parametrize(
    "missing, expected",
    [
        ("nowhere", "error: this needs the Python package nowhere, which is not installed\n"),
        ("nowhere.inside", "error: this needs the Python package nowhere, which is"),
        ("json.nowhere", "error: ModuleNotFoundError: "),  # json is there: a bug
    ],
)
def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    expected: str,
) -> None:
    monkeypatch.setattr("llmc.cli.chat.find_question", lambda *_: importlib.import_module(missing))
    code, _, err = run_main(capsys, "chat", "hi")
    assert err.startswith(expected), err
    assert (code == 2) == ("hint: `llmc doctor` lists" in err) == (missing != "json.nowhere")


@pytest.mark.parametrize("words, code", [(["--version"], 0), (["serve", "/nothing"], 2)])
def test_the_process_ends_without_losing_anything(
    tmp_path: Path, words: list[str], code: int
) -> None:
    """Output is flushed, threads are joined and exit handlers run; only the interpreter's cleanup,
    which would print "cleaned up", is skipped."""
    script = (
        "import atexit, sys, threading, time\n"
        "from llmc.cli.main import run\n"
        "class Cleanup:\n"
        "    def __del__(self, write=sys.stderr.write): write('cleaned up')\n"
        "sys.kept = Cleanup()\n"
        "def late(): time.sleep(0.3); print('thread')\n"
        "def on_exit(): print('handler')\n"
        f"sys.argv[1:] = {words!r}\n"
        "threading.Thread(target=late).start()\n"
        "from llmc.cli import main as module\n"
        "given = module.main\n"
        "def with_handler():\n"
        "    code = given()\n"
        "    atexit.register(on_exit)\n"
        "    return code\n"
        "module.main = with_handler\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-2:] == ["thread", "handler"]
    assert "cleaned up" not in done.stderr
    assert ("/nothing" in done.stderr) == (code == 2)


def test_an_output_that_nobody_reads_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -P -m llmc.cli serve --help | true"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("closed", "shown"),
    [("<&-", "0 1 2\n"), (">&-", ""), ("2>&-", "0 1 2\n"), ("<&- >&- 2>&-", "")],
)
def test_closed_standard_streams_are_opened(tmp_path: Path, closed: str, shown: str) -> None:
    """So that no file that is opened later takes their numbers."""
    script = (
        "import sys\n"
        "from llmc.cli import __main__, main\n"
        "def descriptors():\n"
        "    sys.stdin.isatty()\n"
        "    with open(sys.argv[1], 'w') as later:\n"
        "        later.write(str(later.fileno()))\n"
        "    print(sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno())\n"
        "    return 0\n"
        "main.main = descriptors\n"
        "__main__.main()\n"
    )
    later = tmp_path / "later"
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-P", "-c", script, str(later)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")
    assert int(later.read_text()) > 2


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", b"caf\xe9 ?\n"), ("utf-8", "café 日\n".encode())]
)
def test_a_character_that_the_terminal_lacks_does_not_end_an_answer(
    encoding: str, shown: bytes
) -> None:
    script = "from llmc.cli.main import print_any_text; print_any_text(); print('caf\\xe9 \\u65e5')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (done.stdout, done.stderr) == (shown, b"")


def test_sigterm_unwinds_the_command_and_then_ends_it() -> None:
    """So the terminal gets its settings back, and folders and processes of a start end with it."""
    script = (
        "import atexit, time\n"
        "from llmc.cli import main as module\n"
        "def slow():\n"
        "    atexit.register(print, 'handler')\n"
        "    try:\n"
        "        print('runs', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('restored')\n"
        "module.main = slow\n"
        "module.run()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (out, err) == (b"restored\nhandler\n", b"")
    assert process.returncode == -signal.SIGTERM


def test_ctrl_c_during_the_imports_is_no_traceback() -> None:
    script = (
        "import builtins, os, signal\n"
        "given = builtins.__import__\n"
        "def interrupted(name, *more):\n"
        "    if name == 'llmc.cli.main':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return given(name, *more)\n"
        "from llmc.cli.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "builtins.__import__ = interrupted\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
