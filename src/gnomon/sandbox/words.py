"""The words of `gnomon sandbox` as values: a sandbox's description, pairs, an id by its first characters. Read `verbs.py` next."""

from __future__ import annotations

import argparse

from gnomon.errors import ConfigError
from gnomon.sandbox.registry import Registry
from gnomon.sandbox.rules import Rule
from gnomon.sandbox.sandbox import Limits, Network, Spec
from gnomon.units import parse_bytes, parse_seconds


def spec(parsed: argparse.Namespace) -> Spec:
    """The sandbox that the arguments of `run` describe. Raises `ConfigError` for one that cannot be."""
    for rule in parsed.allow:
        Rule.parse(rule)
    limits = Limits(memory_bytes=parse_bytes(parsed.memory), disk_bytes=parse_bytes(parsed.disk), cpus=parsed.cpus,
                    processes=parsed.processes)
    return Spec(image=parsed.image, limits=limits, network=Network(allow=tuple(parsed.allow)), env=pairs(parsed.env, "--env"),
                ttl_seconds=parse_seconds(parsed.timeout), workdir=parsed.workdir, user=parsed.user)


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` words. Raises `ConfigError` for one that is none."""
    for text in texts:
        if "=" not in text or text.startswith("="):
            raise ConfigError(f"{option} '{text}': write NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def one(registry: Registry, prefix: str) -> str:
    """The id that begins like this. Raises `ConfigError` where none or several do."""
    found = [record.id for record in registry.list() if record.id.startswith(prefix)]
    if prefix in found:
        return prefix
    if len(found) != 1:
        known = ", ".join(found or [record.id for record in registry.list()]) or "none"
        raise ConfigError(f"{'no sandbox is' if not found else 'several sandboxes are'} called '{prefix}' (sandboxes: {known})")
    return found[0]
