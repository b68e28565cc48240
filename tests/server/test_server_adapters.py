"""Adapters as models of their own names, and loading them over HTTP where that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fake_adapters import Loader
from live_server import Live, live_server
from scripted_engine import make_scripted

from llmc.async_llm import AsyncLLM
from llmc.errors import ConfigError
from llmc.server.app import create_app
from llmc.server.run import Server, bind_socket
from llmc.server.settings import ServerSettings

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def directory(path: Path) -> str:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}", encoding="utf-8")
    return str(path)


@pytest.fixture
def loader() -> Loader:
    return Loader(2)


@pytest.fixture
def live(tmp_path: Path, loader: Loader) -> Iterator[Live]:
    settings = ServerSettings(
        lora_modules={"poems": directory(tmp_path / "fixed")},
        runtime_lora_dir=str(tmp_path / "runtime"),
    )
    directory(tmp_path / "runtime" / "one")
    with live_server(settings, adapters=loader) as made:
        yield made
        made.wait_idle()


def names(live: Live) -> list[str]:
    return [card["id"] for card in live.client.get("/v1/models").json()["data"]]


def test_an_adapter_is_a_model(live: Live, loader: Loader) -> None:
    card = live.client.get("/v1/models/poems").json()
    assert (card["id"], card["parent"]) == ("poems", "scripted")
    assert card["root"].endswith("fixed")
    assert live.client.get("/v1/models/scripted").json()["parent"] is None
    assert len(loader.begun) == 1, "before requests are accepted"
    for send in (live.complete, live.chat):
        loader.asked_for.clear()
        assert send(model="scripted").json()["model"] == "scripted"
        assert not loader.asked_for
        assert send(model="poems").json()["model"] == "poems"
        assert loader.asked_for == ["poems"] and len(loader.begun) == 1
    wrong = live.complete(model="prose")
    assert wrong.status_code == 404
    assert "available: scripted, poems" in wrong.json()["error"]["message"]


def test_ollamas_clients_find_the_adapters(live: Live) -> None:
    for path in ("/api/tags", "/api/ps"):
        cards = live.client.get(path).json()["models"]
        assert [card["name"] for card in cards] == ["scripted", "poems"] == names(live)


def test_raw_prompts_of_ollamas_clients_use_the_adapter_too(live: Live, loader: Loader) -> None:
    body = {"prompt": "count", "raw": True, "stream": False, "options": {"num_predict": 2}}
    for model, adapters in (("scripted", []), ("poems", ["poems"])):
        loader.asked_for.clear()
        answer = live.post("/api/generate", {**body, "model": model}).json()
        assert answer["model"] == model and loader.asked_for == adapters


def test_prefixes_are_not_shared_between_models(live: Live) -> None:
    def hits(model: str) -> int:
        stats = live.scripted.engine.stats
        before = stats().prefix_cache_hits
        body = {"prompt": "count " * 20, "max_tokens": 1, "model": model}
        assert live.post("/v1/completions", body).status_code == 200
        return stats().prefix_cache_hits - before

    assert [hits("scripted"), hits("poems"), hits("scripted") > 0, hits("poems") > 0] == [
        0, 0, True, True,
    ]  # fmt: skip


def test_load_use_unload(live: Live) -> None:
    assert live.post(LOAD, {"lora_name": "new", "lora_path": "one"}).status_code == 200
    assert names(live) == ["scripted", "poems", "new"]
    assert live.complete(model="new").json()["model"] == "new"
    for taken in ("new", "poems", "scripted"):
        again = live.post(LOAD, {"lora_name": taken, "lora_path": "one"})
        assert again.status_code == 400 and "already" in again.json()["error"]["message"]
    assert live.post(UNLOAD, {"lora_name": "new", "lora_int_id": 7}).status_code == 200
    assert live.complete(model="new").status_code == 404
    assert live.post(UNLOAD, {"lora_name": "new"}).status_code == 404


def test_an_adapter_is_replaced_on_request(live: Live, loader: Loader, tmp_path: Path) -> None:
    """It is another adapter for the engine, which keeps neither its weights nor its prefixes."""
    directory(tmp_path / "runtime" / "two")
    body = {"lora_name": "new", "load_inplace": True}
    for number, path in enumerate(("one", "two"), 2):  # after the one that is served
        assert live.post(LOAD, {**body, "lora_path": path}).status_code == 200
        assert len(loader.begun) == number
        assert live.client.get("/v1/models/new").json()["root"].endswith(path)
    assert names(live) == ["scripted", "poems", "new"]
    taken = live.post(LOAD, {**body, "lora_name": "scripted", "lora_path": "one"})
    assert taken.status_code == 400 and "already" in taken.json()["error"]["message"]


def test_an_adapter_in_another_format_is_listed_as_it_was_given(live: Live, tmp_path: Path) -> None:
    folder = tmp_path / "runtime" / "old"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    torch.save({"base_model.model.q.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.bin")
    assert live.post(LOAD, {"lora_name": "new", "lora_path": "old"}).status_code == 200
    assert live.client.get("/v1/models/new").json()["root"] == str(folder)
    assert live.post(UNLOAD, {"lora_name": "new"}).status_code == 200


def test_an_adapter_that_the_engine_refuses_is_not_served(live: Live) -> None:
    refused = live.post(LOAD, {"lora_name": "refused", "lora_path": "one"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "no such adapter"
    assert names(live) == ["scripted", "poems"]


def test_paths_stay_inside_and_names_are_names(live: Live, tmp_path: Path) -> None:
    (tmp_path / "runtime" / "link").symlink_to(tmp_path / "fixed")
    for path in ("..", "../fixed", str(tmp_path / "fixed"), ".", "link", "nowhere", "one\0", "/"):
        answer = live.post(LOAD, {"lora_name": "new", "lora_path": path})
        assert answer.status_code == 400, path
        assert "--runtime-lora-dir" in answer.json()["error"]["message"]
    for name in ("../x", "", "a b", "x" * 300):
        answer = live.post(LOAD, {"lora_name": name, "lora_path": "one"})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == "lora_name"
    assert names(live) == ["scripted", "poems"]


def test_off_unless_it_is_asked_for(shared: Live) -> None:
    for path in (LOAD, UNLOAD):
        answer = shared.post(path, {"lora_name": "a", "lora_path": "b"})
        assert answer.status_code == 404
        assert "--runtime-lora-dir" in answer.json()["error"]["message"]


def test_an_adapter_that_the_engine_refuses_ends_the_start(tmp_path: Path) -> None:
    scripted = make_scripted(adapters=Loader(2))
    given = {name: directory(tmp_path / name) for name in ("good", "refused")}
    settings = ServerSettings(lora_modules=given)
    llm = AsyncLLM.from_started(scripted, scripted.config, scripted.tokenizer)  # type: ignore[arg-type]
    server = Server(create_app(llm, settings), settings)
    why = r"--lora-modules refused=.*refused: no such adapter"
    with closing(bind_socket("127.0.0.1", 0)) as sock, pytest.raises(ConfigError, match=why):
        server.run([sock])


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    given = {"a": directory(tmp_path / "a")}
    wrong = (
        (make_scripted(), ServerSettings(lora_modules=given), "--enable-lora"),
        (
            make_scripted(adapters=Loader(1)),
            ServerSettings(lora_modules={"a": str(tmp_path)}),
            "not a directory with an adapter_config.json",
        ),
        (
            make_scripted(adapters=Loader(1)),
            ServerSettings(lora_modules={"scripted": given["a"]}),
            "already",
        ),
    )
    for over, settings, reason in wrong:
        with pytest.raises(ConfigError, match=reason), live_server(settings, over=over):
            raise AssertionError("it started")
    with pytest.raises(ConfigError, match="several API processes"):
        ServerSettings(runtime_lora_dir="x", api_workers=2)
