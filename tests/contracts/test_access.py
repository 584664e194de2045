"""Who may ask: keys from file and environment, pages of the web, and what reaches the log."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gnomon import config as toml
from gnomon.errors import ConfigError
from gnomon.serve.access import Access, api_keys, is_loopback
from gnomon.serve.errors import Rejected
from gnomon.serve.logs import RequestLog
from gnomon.serve.server import Background, listen
from gnomon.serve.service import Service
from gnomon.serve.settings import AccessSettings, ServeSettings


def settings(**table: Any) -> ServeSettings:
    return toml.from_dict(ServeSettings, table)


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# people\nann:secret-of-ann\n\nnameless-key\n")
    found = api_keys(settings(access={"keys_file": str(tmp_path / "keys")}), {"GNOMON_API_KEYS": "bob:secret-of-bob"})
    assert found == {"bob": "secret-of-bob", "ann": "secret-of-ann", "key-3": "nameless-key"}
    assert api_keys(settings(), {}) == {}


@pytest.mark.parametrize(("table", "environment", "words"), [
    ({"host": "0.0.0.0"}, {}, "can be reached from other machines"), ({"host": "example.org"}, {}, "can be reached"),
    ({}, {"GNOMON_API_KEYS": "short"}, "fewer than 8"), ({"access": {"keys_file": "/nowhere"}}, {}, "cannot be read"),
])
def test_what_is_not_safe_is_refused(table: dict[str, Any], environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        api_keys(settings(**table), environment)


def test_two_keys_of_one_name_are_refused() -> None:
    for keys in ("ann:0123456789,ann:9876543210", "key-2:0123456789,abcdefghij"):
        with pytest.raises(ConfigError, match="two API keys are named"):
            api_keys(settings(), {"GNOMON_API_KEYS": keys})
    assert list(api_keys(settings(), {"GNOMON_API_KEYS": "0123456789,ann:9876543210"})) == ["key-1", "ann"]


def test_an_open_address_needs_keys_or_the_word() -> None:
    assert api_keys(settings(host="0.0.0.0"), {"GNOMON_API_KEYS": "me:long-enough"})
    assert api_keys(settings(host="0.0.0.0", access={"without_keys": True}), {}) == {}


@pytest.mark.parametrize(("host", "loopback"), [
    ("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False),
])
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def may(access: Access, path: str = "/v1/models", **headers: str) -> str | None:
    return access.check(path, {name.replace("_", "-"): value for name, value in headers.items()})


def test_a_key_names_who_asks() -> None:
    access = Access(AccessSettings(), {"ann": "secret-of-ann", "bob": "secret-of-bob"})
    assert may(access, authorization="Bearer secret-of-bob") == "bob" and may(access, x_api_key="secret-of-ann") == "ann"
    assert may(access, "/health") is None and may(access, "/") is None
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret-of-ann"}, {"x_api_key": "secret-of-ann\udc80"}):
        with pytest.raises(Rejected) as rejected:
            may(access, **headers)
        assert rejected.value.status == 401 and "secret" not in str(rejected.value)


@pytest.mark.parametrize(("origin", "host", "keys", "allowed"), [
    ("http://127.0.0.1:8000", "127.0.0.1:8000", False, True),
    ("http://localhost:8000", "localhost:8000", False, True),
    ("http://evil.example", "127.0.0.1:8000", False, False),
    ("http://evil.example:8000", "evil.example:8000", False, False),  # a name that was bent to this address
    ("http://evil.example:8000", "evil.example:8000", True, True),
    ("null", "null", False, False),
    ("https://chat.example.org", "127.0.0.1:8000", False, True),
])
def test_pages_of_the_web(origin: str, host: str, keys: bool, allowed: bool) -> None:
    access = Access(AccessSettings(origins=("https://chat.example.org",)), {"me": "secret-key"} if keys else {})
    if allowed:
        assert may(access, "/health", origin=origin, host=host) is None
    else:
        with pytest.raises(Rejected, match=r"access\.origins"):
            may(access, "/health", origin=origin, host=host)


def test_over_http(service: Callable[..., Service]) -> None:
    made = service(access={"origins": ["https://chat.example.org"]})
    with Background(made, {"me": "secret-key"}) as url:
        assert httpx.get(url + "/v1/models").status_code == 401 and httpx.get(url + "/health").status_code == 200
        wrong = httpx.post(url + "/v1/messages", json={}, headers={"x-api-key": "nothing"})
        assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error" and wrong.json()["type"] == "error"
        asked = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
        assert httpx.options(url + "/v1/chat/completions", headers=asked).headers["access-control-allow-origin"] == "https://chat.example.org"
        evil = httpx.get(url + "/health", headers={"origin": "http://evil.example"})
        assert evil.status_code == 403 and "access-control-allow-origin" not in evil.headers


def test_the_log_is_lines_of_json() -> None:
    out = io.StringIO()
    log = RequestLog("json", out)
    log.record(level="info", request="r1", seconds=0.123456, key=None, note="ü\n")
    log.close()
    record = json.loads(out.getvalue())
    assert record["request"] == "r1" and record["seconds"] == 0.1235 and "key" not in record and record["note"] == "ü\n"
    text = io.StringIO()
    log = RequestLog("text", text)
    log.record(status=200, path="/a\nforged=1 \x1b[2J", session="x" * 100_000)
    log.close()
    [line] = text.getvalue().splitlines()
    assert "status=200" in line and r'path="/a\nforged=1 \u001b[2J"' in line and len(line) < 5000


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("gone")

    log = RequestLog("json", Gone())
    for _ in range(20_000):
        log.record(a=1)
    log.close()


def test_a_port_can_be_taken_once() -> None:
    with listen("127.0.0.1", 0) as bound, pytest.raises(ConfigError, match="the port is in use"):
        listen("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(ConfigError, match="no such address"):
        listen("192.0.2.1", 0)
