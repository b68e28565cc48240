"""HTTPS, and a server behind a proxy that shows it under a path."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from live_server import live_server

from llmc.errors import ConfigError
from llmc.server.run import check_certificates
from llmc.server.settings import ServerSettings


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(certificate), str(key)


def test_answers_and_streams_over_https(pem: tuple[str, str]) -> None:
    settings = ServerSettings(ssl_certfile=pem[0], ssl_keyfile=pem[1])
    check_certificates(settings)
    with live_server(settings) as live:
        assert live.complete(max_tokens=3).status_code == 200
        assert live.events("/v1/completions", {"prompt": "count", "max_tokens": 3})
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{live.port}/health")


def test_clients_need_a_certificate_where_authorities_are_given(pem: tuple[str, str]) -> None:
    settings = ServerSettings(ssl_certfile=pem[0], ssl_keyfile=pem[1], ssl_ca_certs=pem[0])
    check_certificates(settings)
    with live_server(settings) as live:
        with pytest.raises(httpx.HTTPError):
            live.client.get("/health")
        context = ssl.create_default_context(cafile=pem[0])
        context.load_cert_chain(*pem)
        known = httpx.get(f"https://127.0.0.1:{live.port}/health", verify=context)
        assert known.status_code == 200


def test_files_that_serve_no_https_are_told_before_the_model_is_loaded(
    pem: tuple[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for certificate, key in ((str(broken), pem[1]), (pem[0], None), (str(tmp_path / "no"), None)):
        with pytest.raises(ConfigError, match="can't serve HTTPS with"):
            check_certificates(ServerSettings(ssl_certfile=certificate, ssl_keyfile=key))
    with pytest.raises(ConfigError, match="lacks the certificate or the private key"):
        check_certificates(ServerSettings(ssl_certfile=pem[1], ssl_keyfile=pem[0]))
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", pem[1], "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="has a password"):
        check_certificates(ServerSettings(ssl_certfile=pem[0], ssl_keyfile=str(locked)))
    with pytest.raises(ConfigError, match="need a certificate"):
        ServerSettings(ssl_keyfile=pem[1])


def test_a_proxy_may_leave_the_path_on_or_take_it_off() -> None:
    with live_server(ServerSettings(root_path="/llm", api_keys=["k"])) as live:
        for path in ("/llm/v1/models", "/v1/models"):
            assert live.client.get(path).status_code == 200
            assert httpx.get(f"http://127.0.0.1:{live.port}{path}").status_code == 401
        assert live.client.get("/llmv1/models").status_code == 404
        described = live.client.get("/llm/openapi.json").json()
        assert described["servers"] == [{"url": "/llm"}]
    for wrong in ("llm", "/llm/", "/a b", "//x"):
        with pytest.raises(ConfigError, match="root_path must be like"):
            ServerSettings(root_path=wrong)


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="--served-model-name must not be empty"):
        ServerSettings(served_model_names=("",))
