"""Files and batches over HTTP: rows, errors, limits, and servers that end in the middle."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from live_server import Live, live_server
from scripted_engine import SCRIPTS, make_scripted

from llmc.errors import ConfigError
from llmc.server import batch_runner, batch_store
from llmc.server.errors import ApiError
from llmc.server.settings import ServerSettings

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("batches")
    with live_server(ServerSettings(batch_dir=str(folder))) as live:
        yield live


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = body or {"prompt": "count", "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def text_of(lines: list[Any]) -> str:
    return "".join(json.dumps(one) + "\n" if isinstance(one, dict) else one for one in lines)


def upload(live: Live, lines: list[Any], **options: Any) -> str:
    files = {"file": ("in.jsonl", text_of(lines).encode())}
    response = live.client.post("/v1/files", data={"purpose": "batch"}, files=files, **options)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def begin(live: Live, lines: list[Any], endpoint: str = "/v1/completions") -> str:
    body = {"input_file_id": upload(live, lines), "endpoint": endpoint, "completion_window": "24h"}
    response = live.post("/v1/batches", body)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def wait(live: Live, name: str, *statuses: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found: dict[str, Any] = live.client.get(f"/v1/batches/{name}").json()
        if found["status"] in (statuses or ("completed", "failed", "cancelled", "expired")):
            return found
        time.sleep(0.01)
    raise AssertionError(f"the batch is {found['status']}")


def rows(live: Live, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = live.client.get(f"/v1/files/{file_id}/content").text
    found = [json.loads(one) for one in text.splitlines()]
    return {one["custom_id"]: one for one in found}


def test_a_batch_answers_as_the_routes_do(live: Live) -> None:
    bad = line("bad", prompt="count", max_tokens=0)
    lines = [*(line(f"r{i}") for i in range(9)), bad, "\n"]
    found = wait(live, begin(live, lines))
    assert found["status"] == "completed" and found["errors"] is None
    assert found["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
    assert found["in_progress_at"] <= found["completed_at"]
    good = rows(live, found["output_file_id"])
    assert set(good) == {f"r{i}" for i in range(9)}
    want = live.complete(max_tokens=3).json()
    for row in good.values():
        assert row["error"] is None and row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"] == want["choices"]
        assert row["response"]["body"]["usage"] == want["usage"]
    failed = rows(live, found["error_file_id"])
    assert failed["bad"]["response"]["body"]["error"]["param"] == "max_tokens"
    listed = live.client.get("/v1/batches", params={"limit": 1}).json()
    assert listed["data"][0]["id"] == found["id"]
    card = live.client.get(f"/v1/files/{found['output_file_id']}").json()
    assert card["purpose"] == "batch_output" and card["bytes"] > 0


def test_a_batch_of_responses(tmp_path: Path) -> None:
    """Also where requests of batches get a priority."""
    over = make_scripted()
    over.config = dataclasses.replace(over.config, scheduling_policy="priority")
    with live_server(ServerSettings(batch_dir=str(tmp_path)), over=over) as live:
        lines = [line(name, RESPONSES, input="count", store=False) for name in "ab"]
        found = wait(live, begin(live, lines, RESPONSES))
        assert found["request_counts"] == {"total": 2, "completed": 2, "failed": 0}, found
        for row in rows(live, found["output_file_id"]).values():
            [item] = row["response"]["body"]["output"]
            assert item["content"][0]["text"] == SCRIPTS["count"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no requests"),
        (["{\n"], "line 1: the body is not valid JSON"),
        ([line("a"), line("a")], "line 2: custom_id 'a' was already used"),
        ([line("a"), line("b", "/v1/chat/completions")], "line 2: url"),
        ([line("a", prompt="count", stream=True)], "a batch can't stream"),
        ([{"custom_id": "a"}], "line 1: url"),
    ],
)
def test_a_batch_of_bad_lines_fails_by_name(live: Live, lines: list[Any], message: str) -> None:
    found = wait(live, begin(live, lines))
    assert found["status"] == "failed" and found["output_file_id"] is None
    assert message in found["errors"]["data"][0]["message"]


def test_files_are_kept_listed_and_deleted(live: Live) -> None:
    content = text_of([line("a")]) + "\r\n--\r\n-- is no boundary"
    files = {"file": ("näme.jsonl", content.encode())}
    made = live.client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
    assert made["filename"] == "näme.jsonl" and made["bytes"] == len(content.encode())
    assert live.client.get(f"/v1/files/{made['id']}").json() == made
    assert live.client.get(f"/v1/files/{made['id']}/content").content == content.encode()
    other = upload(live, [line("b")])
    ids = [one["id"] for one in live.client.get("/v1/files?purpose=batch").json()["data"]]
    assert {made["id"], other} <= set(ids)
    first = live.client.get("/v1/files?limit=1&order=asc").json()
    after = live.client.get(f"/v1/files?after={first['last_id']}&order=asc").json()
    assert first["has_more"] and first["last_id"] not in [one["id"] for one in after["data"]]
    deleted = live.client.delete(f"/v1/files/{made['id']}").json()
    assert deleted == {"id": made["id"], "object": "file", "deleted": True}
    for path in (made["id"], "../../lock", "file-" + "0" * 32):
        assert live.client.get(f"/v1/files/{path}").status_code == 404


def form(*parts: bytes, end: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(b"--xyz\r\n" + part + b"\r\n" for part in parts) + end


FILE = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\ndata'
PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
ANCHOR = b'Content-Disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at'
SECONDS = b'Content-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600'
PARAM_SECONDS = "expires_after[seconds]"


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (form(FILE, PURPOSE), "multipart/form-data; boundary=xyz", 200, None),
        (form(FILE, PURPOSE), 'multipart/form-data; boundary="xyz"', 200, None),
        (form(FILE, PURPOSE), "application/json", 415, None),
        (form(FILE, PURPOSE), "multipart/form-data", 400, None),
        (form(FILE, PURPOSE, end=b""), "multipart/form-data; boundary=xyz", 400, None),
        (form(FILE), "multipart/form-data; boundary=xyz", 400, "purpose"),
        (form(FILE, PURPOSE, ANCHOR, SECONDS), "multipart/form-data; boundary=xyz", 200, None),
        (form(FILE, PURPOSE, ANCHOR), "multipart/form-data; boundary=xyz", 400, PARAM_SECONDS),
        (form(FILE, PURPOSE, ANCHOR, SECONDS.replace(b"3600", b"3599")),
         "multipart/form-data; boundary=xyz", 400, PARAM_SECONDS),
        (form(FILE, PURPOSE, SECONDS), "multipart/form-data; boundary=xyz", 400,
         "expires_after[anchor]"),
        (form(PURPOSE), "multipart/form-data; boundary=xyz", 400, "file"),
        (form(FILE, FILE, PURPOSE), "multipart/form-data; boundary=xyz", 400, "file"),
        (form(b"Content-Disposition: form-data\r\n\r\n"), "multipart/form-data; boundary=xyz", 400,
         None),
        (form(FILE, PURPOSE.replace(b"purpose", b"other")), "multipart/form-data; boundary=xyz",
         400, "other"),
        (form(*[PURPOSE] * 17), "multipart/form-data; boundary=xyz", 400, None),
        (b"x" * 20_000, "multipart/form-data; boundary=xyz", 400, None),
        (b"--xyz\r\nA: " + b"x" * 20_000, "multipart/form-data; boundary=xyz", 400, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_forms(
    live: Live, body: bytes, kind: str, status: int, param: str | None, step: int
) -> None:
    """However they are cut into pieces."""
    if step == 1 and len(body) > 1000:
        step = 4096
    chunks = (body[i : i + step] for i in range(0, len(body), step))
    response = live.client.post("/v1/files", content=chunks, headers={"content-type": kind})
    assert response.status_code == status, response.text
    if status == 200:
        content = live.client.get(f"/v1/files/{response.json()['id']}/content")
        assert content.content == b"data"
    elif status == 400:
        assert response.json()["error"]["param"] == param


def test_what_is_refused(live: Live) -> None:
    stored = upload(live, [line("a")])
    good = {
        "input_file_id": stored,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    for changes, status, param in (
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
        ({"other": 1}, 400, "other"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400,
         "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400,
         "output_expires_after.anchor"),
    ):  # fmt: skip
        response = live.post("/v1/batches", {**good, **changes})
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == param
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert live.client.get(f"/v1/files?{query}").status_code == 400
    with mock.patch.object(batch_store, "MAX_FILES", 1):
        files = {"file": ("a", b"x")}
        response = live.client.post("/v1/files", data={"purpose": "batch"}, files=files)
        assert response.json()["error"]["code"] == "too_many_files"
    with mock.patch("llmc.server.files.MAX_FILE_BYTES", 10):
        files = {"file": ("a", b"x" * 11)}
        response = live.client.post("/v1/files", data={"purpose": "batch"}, files=files)
        assert response.status_code == 413
    with mock.patch("llmc.server.batch_runner.MAX_LINES", 1):
        found = wait(live, begin(live, [line("a"), line("b")]))
        assert found["errors"]["data"][0]["code"] == "batch_too_large"


def test_uploads_at_the_same_time_count(tmp_path: Path) -> None:
    store = batch_store.BatchStore(tmp_path)
    room = 2 * batch_store.MAX_FILE_BYTES
    with mock.patch.object(batch_store, "MAX_FOLDER_BYTES", room), contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(store.new_file("batch", ""))
        with pytest.raises(ApiError) as caught, store.new_file("batch", ""):
            pass
        assert caught.value.code == "too_many_files"
    store.close()


def test_a_server_without_a_folder_says_which_flag() -> None:
    with live_server() as live:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/batches")):
            response = live.client.request(method, path)
            assert response.status_code == 404 and "--batch-dir" in response.text


def test_callers_see_their_own_alone(tmp_path: Path) -> None:
    settings = ServerSettings(batch_dir=str(tmp_path), api_keys=["one", "two"])
    with live_server(settings) as live:
        name = begin(live, [line("a")])
        found = wait(live, name)
        theirs = httpx.Headers({"authorization": "Bearer two"})
        for path in (f"/v1/batches/{name}", f"/v1/files/{found['output_file_id']}/content"):
            assert live.client.get(path).status_code == 200
            assert live.client.get(path, headers=theirs).status_code == 404
        assert live.client.get("/v1/files", headers=theirs).json()["data"] == []
        with pytest.raises(ConfigError, match="in use by another server"):
            batch_store.BatchStore(tmp_path)


def test_a_batch_goes_on_after_a_restart_and_can_be_cancelled(tmp_path: Path) -> None:
    """A slow first server ends in the middle, half a row is left, and the next one goes on."""
    settings = ServerSettings(batch_dir=str(tmp_path), shutdown_timeout_s=1)
    lines = [line(f"r{i}", prompt="count", max_tokens=60) for i in range(30)]
    slow = make_scripted()
    slow.runner.delay_s = 0.002
    with live_server(settings, over=slow) as live:
        name = begin(live, lines)
        later = begin(live, lines)
        while wait(live, name, "in_progress")["request_counts"]["completed"] < 3:
            time.sleep(0.01)
        with pytest.raises(httpx.HTTPStatusError):
            stored = live.client.get(f"/v1/batches/{name}").json()["input_file_id"]
            live.client.delete(f"/v1/files/{stored}").raise_for_status()
        assert live.post(f"/v1/batches/{later}/cancel", {}).json()["status"] == "cancelling"
    gathered = tmp_path / "batches" / f"{name}.output"
    before = gathered.read_bytes()
    assert 3 <= before.count(b"\n") < 30
    gathered.write_bytes(before + b'{"custom_id": "r2')
    with live_server(settings) as live:
        found = wait(live, name)
        assert found["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        content = live.client.get(f"/v1/files/{found['output_file_id']}/content").content
        assert content.startswith(before)
        assert set(rows(live, found["output_file_id"])) == {f"r{i}" for i in range(30)}
        assert content.count(b"\n") == 30
        assert wait(live, later)["status"] == "cancelled"
        again = live.post(f"/v1/batches/{later}/cancel", {})
        assert again.status_code == 400 and "is cancelled" in again.text


def test_a_batch_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    slow = make_scripted()
    slow.runner.delay_s = 0.002
    with live_server(ServerSettings(batch_dir=str(tmp_path)), over=slow) as live:
        lines = [line(f"r{i}", prompt="count", max_tokens=40) for i in range(6)]
        first, second, third = (begin(live, lines) for _ in range(3))
        assert live.post(f"/v1/batches/{second}/cancel", {}).json()["status"] == "cancelling"
        wait(live, third, "in_progress")
        assert wait(live, first)["request_counts"]["completed"] == 6
        cancelled = wait(live, second)
        assert cancelled["status"] == "cancelled" and cancelled["output_file_id"] is None
        live.post(f"/v1/batches/{third}/cancel", {})
        ended = wait(live, third)
        done = ended["request_counts"]["completed"]
        assert ended["status"] == "cancelled" and done < 6
        assert len(rows(live, ended["output_file_id"])) == done
        live.wait_idle()


def test_the_rows_of_a_batch_that_goes_on_are_read_beside_the_event_loop(tmp_path: Path) -> None:
    """There may be gigabytes of them, and other calls wait for the loop."""
    read, threads = batch_runner._custom_ids, set()

    def custom_ids(path: Path) -> set[str]:
        threads.add(threading.current_thread())
        return read(path)

    settings = ServerSettings(batch_dir=str(tmp_path))
    with (
        mock.patch.object(batch_runner, "_custom_ids", custom_ids),
        live_server(settings) as live,
    ):
        assert wait(live, begin(live, [line("a")]))["status"] == "completed"
        assert threads and live.thread not in threads


def test_batches_run_although_their_folder_could_not_be_read_at_first(tmp_path: Path) -> None:
    read, faults = batch_store.BatchStore.batches, [OSError(errno.EIO, "input/output error")]

    def batches(store: batch_store.BatchStore, caller: str | None = None) -> Any:
        if faults:
            raise faults.pop()
        return read(store, caller)

    with (
        mock.patch.object(batch_store.BatchStore, "batches", batches),
        mock.patch.object(batch_runner, "_DISK_RETRY_S", 0.01),
        live_server(ServerSettings(batch_dir=str(tmp_path))) as live,
    ):
        name = begin(live, [line("a")])
        assert wait(live, name)["status"] == "completed" and not faults


def test_the_calls_of_a_cancelled_batch_no_longer_count_as_running(tmp_path: Path) -> None:
    """Each of them would keep its whole answer in memory, too."""
    slow = make_scripted()
    slow.runner.delay_s = 0.01
    settings = ServerSettings(batch_dir=str(tmp_path), admin_api_key="admin")
    with live_server(settings, over=slow) as live:
        name = begin(live, [line(f"r{i}", prompt="count", max_tokens=200) for i in range(4)])
        while not slow.engine.has_work:
            time.sleep(0.005)
        live.post(f"/v1/batches/{name}/cancel", {})
        assert wait(live, name)["request_counts"]["completed"] == 0
        live.wait_idle()
        everything = {"all": True}
        operator = {"authorization": "Bearer admin"}
        assert live.post("/abort_requests", everything, headers=operator).json() == {"aborted": []}


def test_the_sdk_of_openai(live: Live) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    url = f"http://127.0.0.1:{live.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        text = text_of([line("a"), line("b")]).encode()
        stored = client.files.create(
            file=("in.jsonl", text),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert stored.expires_at == stored.created_at + 3600
        made = client.batches.create(
            input_file_id=stored.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"for": "me"},
            output_expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert made.expires_at == made.created_at + 24 * 3600
        wait(live, made.id)
        found = client.batches.retrieve(made.id)
        output = client.files.retrieve(found.output_file_id)
        assert output.expires_at == output.created_at + 7200
        assert found.metadata == {"for": "me"} and found.request_counts.completed == 2
        assert len(client.files.content(found.output_file_id).text.splitlines()) == 2
        assert made.id in [one.id for one in client.batches.list(limit=5)]
        assert client.files.delete(stored.id).deleted


class Clock:
    """The dates of files and batches, which go on by hand."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        self.now += 1e-3  # what is made later is newer
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(batch_store, "time", made)
    monkeypatch.setattr(batch_runner, "CLOCK_S", 0.01)
    return made


LINES = [line(f"r{i}", prompt="count", max_tokens=60) for i in range(30)]


def begin_slowly(live: Live) -> str:
    """A batch of LINES of which some are answered."""
    name = begin(live, LINES)
    while wait(live, name, "in_progress")["request_counts"]["completed"] < 3:
        time.sleep(0.01)
    return name


def slow() -> Any:
    made = make_scripted()
    made.runner.delay_s = 0.002
    return made


def check_expired(live: Live, found: dict[str, Any], *, at_least: int) -> None:
    """Every request has one row: its answer, or the error that it was too late."""
    assert found["status"] == "expired" and found["completed_at"] is None
    assert found["expires_at"] == found["created_at"] + batch_store.WINDOW_S
    assert found["expired_at"] >= found["expires_at"]
    done, late = rows(live, found["output_file_id"]), rows(live, found["error_file_id"])
    counts = found["request_counts"]
    assert counts == {"total": 30, "completed": len(done), "failed": len(late)}
    assert at_least <= len(done) < 30
    assert not set(done) & set(late) and set(done) | set(late) == {f"r{i}" for i in range(30)}
    for row in late.values():
        assert row["response"] is None and row["error"]["code"] == "batch_expired"
    for kind in ("output_file_id", "error_file_id"):
        text = live.client.get(f"/v1/files/{found[kind]}/content").text
        assert text.count("\n") == len(rows(live, found[kind]))


def test_a_batch_expires_with_the_rows_that_are_there(tmp_path: Path, clock: Clock) -> None:
    with live_server(ServerSettings(batch_dir=str(tmp_path)), over=slow()) as live:
        name = begin_slowly(live)
        waiting = begin(live, LINES[:4])
        clock.now += batch_store.WINDOW_S - 60
        assert wait(live, name, "in_progress")["expired_at"] is None
        later = begin(live, [line("a")])
        clock.now += 60
        check_expired(live, wait(live, name), at_least=3)
        behind = wait(live, waiting)
        assert behind["status"] == "expired" and behind["output_file_id"] is None
        assert behind["request_counts"] == {"total": 4, "completed": 0, "failed": 4}
        assert len(rows(live, behind["error_file_id"])) == 4
        assert wait(live, later)["status"] == "completed"
        refused = live.post(f"/v1/batches/{name}/cancel", {})
        assert refused.status_code == 400 and "is expired" in refused.text
        live.wait_idle()


def test_a_batch_expires_while_no_server_runs(tmp_path: Path, clock: Clock) -> None:
    settings = ServerSettings(batch_dir=str(tmp_path), shutdown_timeout_s=1)
    with live_server(settings, over=slow()) as live:
        name = begin_slowly(live)
    gathered = tmp_path / "batches" / f"{name}.output"
    before = gathered.read_bytes()
    gathered.write_bytes(before + b'{"custom_id": "r2')
    clock.now += batch_store.WINDOW_S
    with live_server(settings) as live:
        found = wait(live, name)
        check_expired(live, found, at_least=3)
        content = live.client.get(f"/v1/files/{found['output_file_id']}/content").content
        assert content == before


@pytest.mark.parametrize("moved", ["none", "output", "both"])
def test_a_server_that_ends_while_a_batch_expires_loses_nothing(
    tmp_path: Path, clock: Clock, moved: str
) -> None:
    """As it is on disk after each of the steps that end a batch."""
    settings = ServerSettings(batch_dir=str(tmp_path), shutdown_timeout_s=1)
    with live_server(settings, over=slow()) as live:
        name = begin_slowly(live)
        clock.now += batch_store.WINDOW_S
        ended = wait(live, name)
    path = tmp_path / "batches" / f"{name}.json"
    kept = json.loads(path.read_text())
    path.write_text(
        json.dumps({**kept, "status": "finalizing", "output_file_id": None, "error_file_id": None})
    )
    data = {
        kind: tmp_path / "files" / f"{ended[key]}.data"
        for kind, key in (("output", "output_file_id"), ("errors", "error_file_id"))
    }
    if moved != "both":
        errors = data["errors"].read_bytes().splitlines(keepends=True)
        data["errors"].unlink()
        (tmp_path / "batches" / f"{name}.errors").write_bytes(b"".join(errors[:2]) + b'{"cust')
    if moved == "none":
        data["output"].rename(tmp_path / "batches" / f"{name}.output")
    with live_server(settings) as live:
        found = wait(live, name)
        check_expired(live, found, at_least=3)
        assert found["output_file_id"] == ended["output_file_id"]
        assert found["request_counts"] == ended["request_counts"]


def test_a_full_disk_loses_no_batch_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(batch_runner, "_DISK_RETRY_S", 0.01)
    with live_server(ServerSettings(batch_dir=str(tmp_path))) as live:
        for place in ("write_atomically", "os.fsync"):
            with mock.patch(f"llmc.server.batch_store.{place}", side_effect=full):
                files = {"file": ("in.jsonl", b"{}")}
                answer = live.client.post("/v1/files", data={"purpose": "batch"}, files=files)
                assert answer.status_code == 503 and "disk is full" in answer.text
            assert not list((tmp_path / "files").iterdir())
        failures = iter([full, full])
        appender = batch_runner.BatchRunner._appender

        def append(*given: Any) -> Any:
            for failure in failures:
                raise failure
            return appender(*given)

        monkeypatch.setattr(batch_runner.BatchRunner, "_appender", append)
        found = wait(live, begin(live, LINES))
        assert next(failures, None) is None
        assert found["status"] == "completed" and not list(tmp_path.glob("*/.new-*"))


def test_files_expire(tmp_path: Path, clock: Clock) -> None:
    with live_server(ServerSettings(batch_dir=str(tmp_path)), over=slow()) as live:

        def upload_for_an_hour(lines: list[Any]) -> str:
            form = {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "3600",
            }
            files = {"file": ("in.jsonl", text_of(lines).encode())}
            card = live.client.post("/v1/files", data=form, files=files).json()
            assert card["expires_at"] == card["created_at"] + 3600
            return str(card["id"])

        unused, read, kept = (
            upload_for_an_hour([line("a")]), upload_for_an_hour(LINES), upload(live, [line("b")]),
        )  # fmt: skip
        body = {
            "input_file_id": read,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "output_expires_after": {"anchor": "created_at", "seconds": 7200},
        }
        name = live.post("/v1/batches", body).json()["id"]
        wait(live, name, "in_progress")
        clock.now += 3600
        listed = [one["id"] for one in live.client.get("/v1/files").json()["data"]]
        assert unused not in listed and {read, kept} <= set(listed)
        assert live.client.get(f"/v1/files/{unused}").status_code == 404
        assert not list((tmp_path / "files").glob(f"{unused}*"))
        found = wait(live, name)
        assert found["status"] == "completed" and found["request_counts"]["completed"] == 30
        assert live.client.get(f"/v1/files/{read}").status_code == 404
        output = f"/v1/files/{found['output_file_id']}"
        assert len(rows(live, found["output_file_id"])) == 30
        clock.now += 7200
        assert live.client.get(f"{output}/content").status_code == 404
        assert live.client.get(f"/v1/files/{kept}").status_code == 200
