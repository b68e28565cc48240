"""`llmc serve --config`: options in YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.cli import serve_run
from llmc.cli.config_file import expand
from llmc.cli.main import main
from llmc.cli.ported_flags import port
from llmc.errors import ConfigError
from llmc.server.settings import ServerSettings

OPPOSITES = {"--no-access-log"}


def write(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_options_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "model: org/name\nport: 9000\nuvicorn_log_level: info\nenforce-eager: true\n"
        "access_log: false\nserved-model-name: [a, b]\nspeculative_config: {method: ngram}\n",
    )
    words = expand(["--config", file, "--port", "9001"], OPPOSITES)
    assert words[0] == "org/name" and words[-2:] == ["--port", "9001"]
    assert words[1:-2] == [
        "--port=9000",
        "--uvicorn-log-level=info",
        "--enforce-eager",
        "--no-access-log",
        "--served-model-name=a",
        "--served-model-name=b",
        '--speculative-config={"method": "ngram"}',
    ]
    assert "--log-level" in port(words).words
    assert expand(["mine", f"--config={file}"], OPPOSITES)[:2] == ["mine", "--port=9000"]
    assert expand(["mine", "--port", "1"], OPPOSITES) == ["mine", "--port", "1"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b\n", "must be lines of"),
        ("a: [", "not YAML"),
        ("1: 2", "must be lines of"),
        ("model: [a]", "model must be a string"),
        ("!!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_what_is_no_mapping_of_options_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        expand(["--config", write(tmp_path, text)], OPPOSITES)


def test_a_file_that_is_not_there_or_is_given_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(tmp_path / "no.yaml")]) == 2
    assert "can't be read" in capsys.readouterr().err
    file = write(tmp_path, "port: 1")
    assert main(["serve", "--config", file, "--config", file]) == 2
    assert "given twice" in capsys.readouterr().err
    assert main(["serve", "--config", write(tmp_path, "no_such_option: 1")]) == 2
    assert "no-such-option" in capsys.readouterr().err


def test_a_switch_of_serve_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = list[ServerSettings]()
    monkeypatch.setattr(
        serve_run, "run_server", lambda _, settings, **more: served.append(settings)
    )
    for text in ("port: 1", "access_log: false"):
        assert main(["serve", "--config", write(tmp_path, text)]) == 0
    assert [settings.access_log for settings in served] == [True, False]
