"""Which hosts a sandbox may reach: rules by name and port, and addresses that no rule opens.

A name is compared as it is written; an address decides once more after the name was looked up, whatever the rule says, so that a name that
turns into an inner address reaches nothing. Read next: `network.py`, the proxy that asks here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Self

from gnomon.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBERS = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?")
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "100.100.100.200", "192.0.0.192")))  # Azure, Alibaba, Oracle
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_EMBEDDING = (ipaddress.ip_network("::/96"), _TRANSLATED)
_NEVER = (ipaddress.ip_network("64:ff9b:1::/48"), ipaddress.ip_network("fec0::/10"), ipaddress.ip_network("192.88.99.0/24"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One entry of `Network.allow`: a host, `*.domain` for what is below a domain, or `*`; a port, or `None` for every port."""

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """`host:port`, `*.domain:port`, `host:*`, `[v6]:port`, `*:port`. Raises `ConfigError` naming the entry."""
        name, colon, port = text.rpartition(":")
        wanted = f"network.allow: '{text}': "
        if not colon or not name or ("*" in name and not re.fullmatch(r"\*(\.[^*]+)?", name)):
            raise ConfigError(f"{wanted}write host:port, *.domain:port or host:*")
        if port != "*" and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"{wanted}the port is a number from 1 to 65535, or *")
        star = name.startswith("*.")
        host = name if name == "*" else normal(name.removeprefix("*."))
        if host is None:
            raise ConfigError(f"{wanted}'{name}' is no host; write a name, an IPv4 address in four decimal parts, or [an IPv6 address]")
        address = literal(host)
        if address is not None and (star or (why := closed(address)) is not None):
            raise ConfigError(f"{wanted}{'an address has nothing below it' if star else why}; no rule can open it")
        return cls(host=f"*.{host}" if star else host, port=None if port == "*" else int(port))

    def fits(self, host: str, port: int) -> bool:
        """Whether the rule names a host, in its normal form, and a port."""
        if self.port is not None and self.port != port:
            return False
        if self.host == "*":
            return True
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


def normal(host: str) -> str | None:
    """A host as rules write it: small letters, ASCII, no final dot, addresses in their usual form; `None` for what is no host.

    `2130706433`, `0x7f.1`, `127.1` and the like are no hosts here: they are addresses written so as not to look like one.
    """
    text = host.strip().rstrip(".").lower()
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]") if text.startswith("[") else text))
    if _NUMBERS.fullmatch(text):
        return None
    with contextlib.suppress(UnicodeError):
        text = text.encode("idna").decode("ascii") if not text.isascii() else text
    if not text or len(text) > 253 or not all(_LABEL.fullmatch(label) for label in text.split(".")):
        return None
    return text


def literal(host: str) -> Address | None:
    """The address that a host is, if it is one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def closed(address: Address) -> str | None:
    """Why no sandbox may reach an address, or `None`. An IPv6 address that carries an IPv4 one is judged by both."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id:
            return f"{address} is an address of this machine's links"
        inner = _embedded(address)
        if inner is not None and (why := closed(inner)) is not None:
            return why
        if inner is not None and (address.ipv4_mapped is not None or address in _TRANSLATED):
            return None
    for told, says in ((address.is_loopback, "this machine itself"), (address.is_unspecified, "this machine itself"),
                       (address.is_link_local, "link-local, where clouds keep their credentials"),
                       (address in _METADATA, "a cloud's own service"), (address.is_multicast, "for many receivers"),
                       (address.is_private, "private"), (any(address in network for network in _NEVER), "not public"),
                       (not address.is_global or address.is_reserved, "not public")):
        if told:
            return f"{address} is {says}"
    return f"{address} is this machine's own" if _own(address) else None


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address leads to: mapped, compatible, translated, 6to4, Teredo."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if int(address) > 1 and any(address in network for network in _EMBEDDING):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _own(address: Address) -> bool:
    """Whether this machine has the address: what it sends there then comes from there. Nothing is sent to find out."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:  # no way there
        return False
