"""Who may ask: API keys, and which web pages a browser may speak for.

Keys are compared in constant time and kept as digests; a log has a key's name, never the key. A request with an `Origin` header comes from
a browser; without keys it must come from this server's own page under a loopback name (a page elsewhere, or a name that was bent to
this address, may not use the visitor's model), or from a page that the settings name. Read next: `api.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from gnomon.errors import ConfigError
from gnomon.serve.errors import Rejected
from gnomon.serve.settings import AccessSettings, ServeSettings

KEYS_VARIABLE = "GNOMON_API_KEYS"
ADMIN = "/admin/"
OPEN_PATHS = ("/", "/health", "/metrics", "/page.css", "/page.js", "/openapi.json")


class Access:
    """The rules of one server."""

    def __init__(self, settings: AccessSettings, keys: Mapping[str, str]) -> None:
        self._keys = [(name, _digest(key)) for name, key in keys.items()]
        self._admins = frozenset(settings.admins)
        self._origins = {origin.rstrip("/").lower() for origin in settings.origins}

    def check(self, path: str, headers: Mapping[str, str]) -> str | None:
        """The name of the key that a request has, None where none is needed. Raises `Rejected` for one that may not ask."""
        name = None
        if self._keys and path not in OPEN_PATHS:
            name = self._named(headers)
        if path.startswith(ADMIN) and name not in self._admins:
            raise Rejected(403, "this key may not change the server; name it in access.admins", "not_an_admin")
        origin = headers.get("origin")
        if origin is not None and not self._may(origin.lower(), headers.get("host", "")):
            raise Rejected(403, f"requests from the page {origin[:100]} are not allowed; name it in access.origins", "origin_not_allowed")
        return name

    def _may(self, origin: str, host: str) -> bool:
        if origin in self._origins:
            return True
        own = urlsplit(origin).netloc == host.lower() and origin != "null"
        return own and (bool(self._keys) or is_loopback(urlsplit(origin).hostname or ""))

    def _named(self, headers: Mapping[str, str]) -> str:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            raise Rejected(401, "an API key is required: 'Authorization: Bearer KEY' or 'x-api-key: KEY'", "missing_api_key",
                           {"www-authenticate": "Bearer"})
        digest, found = _digest(key), None
        for name, known in self._keys:  # all of them, always: the time must not tell which one was near
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Rejected(401, "the API key is not known here", "invalid_api_key", {"www-authenticate": "Bearer"})
        return found


def api_keys(settings: ServeSettings, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The keys by name, from the file and the environment. Raises `ConfigError` for a file that cannot be read, and for an address that
    other machines can reach without any key."""
    lines = (os.environ if environment is None else environment).get(KEYS_VARIABLE, "").split(",")
    path = settings.access.keys_file
    if path is not None:
        lines += _lines(path)
    keys: dict[str, str] = {}
    for line in (line.strip() for line in lines):
        if line and not line.startswith("#"):
            name, colon, key = line.partition(":")
            name, key = (name, key) if colon else (f"key-{len(keys) + 1}", name)
            if name in keys:
                raise ConfigError(f"two API keys are named '{name}', and the log would not tell them apart; give each a name of its own")
            keys[name] = key
    if any(len(key) < 8 for key in keys.values()):
        raise ConfigError("an API key has fewer than 8 characters; use long random ones: openssl rand -hex 24")
    unknown = sorted(set(settings.access.admins) - keys.keys())
    if unknown:
        raise ConfigError(f"access.admins names {', '.join(unknown)}, and no API key has that name; write NAME:KEY in access.keys_file or "
                          f"{KEYS_VARIABLE}")
    if not keys and not settings.access.without_keys and not is_loopback(settings.host):
        raise ConfigError(f"host = '{settings.host}' can be reached from other machines and there are no API keys; set access.keys_file or "
                          f"{KEYS_VARIABLE}, or access.without_keys=true")
    return keys


def is_loopback(host: str) -> bool:
    """Whether a name or address reaches this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"access.keys_file = '{path}' cannot be read: {error}") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
