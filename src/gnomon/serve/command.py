"""`gnomon serve` and `gnomon chat`: their arguments, and what they do. Nothing heavy is imported until a verb runs.

Read next: `assembly.py`, `server.py`, `terminal.py`.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from gnomon.serve.settings import ServeSettings


def declare_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve` to its parser."""
    parser.add_argument("run", type=Path, help="run folder, or a checkpoint in a released layout")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields of recipes/serve.toml to change: port=9000")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="settings (default: those of recipes/serve.toml)")
    parser.add_argument("--replicas", type=int, default=1, metavar="N",
                        help="processes with the whole model behind a router that sends a conversation to the same one (default: 1)")


def declare_chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat` to its parser."""
    parser.add_argument("where", metavar="RUN|URL", help="run folder, checkpoint, or the address of a server")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="fields of serve.toml to change (run folders)")
    parser.add_argument("--model", metavar="NAME", help="the model to ask (default: the server's first)")
    parser.add_argument("--effort", choices=("none", "low", "medium", "high", "max"), help="how much the model is asked to think")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--image", type=Path, action="append", metavar="FILE", help="a picture that goes with the first message")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of an answer at most")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")


def serve(parsed: argparse.Namespace) -> None:
    """Serve a model until a signal comes. The address is taken before the model is loaded, so a port in use is known at once."""
    _need_packages()
    from rich.console import Console

    from gnomon.serve import server
    from gnomon.serve.access import api_keys
    from gnomon.serve.assembly import served
    from gnomon.serve.settings import load

    settings = load(parsed.recipe, parsed.overrides)
    keys = api_keys(settings)
    console = Console(stderr=True, highlight=False)
    if parsed.replicas != 1:
        _fleet(parsed, settings, console)
        return
    with ExitStack() as stack:
        bound = stack.enter_context(server.listen(settings.host, settings.port))
        console.print(f"loading {parsed.run} …")
        service = stack.enter_context(served(parsed.run, settings))
        if service.chat is None:
            console.print("the tokenizer names no markers of a chat format: /v1/completions answers, chat does not")

        def ready() -> None:
            url = server.address(bound)
            door = f"{len(keys)} API keys" if keys else "no API keys"
            console.print(f"serving {service.name} at {url} ({'chat page, ' if settings.page else ''}OpenAI: {url}/v1, "
                          f"Anthropic: {url}; {service.context:,} tokens of context; {door}). Ctrl-C ends it")

        server.serve(service, keys, bound, ready)


def _fleet(parsed: argparse.Namespace, settings: "ServeSettings", console: "Console") -> None:
    """Replicas on loopback ports, which share the budget of memory, and the router on the address that was asked for."""
    from gnomon.serve import fleet_processes, server
    from gnomon.serve.fleet import FleetSettings

    limits = settings.limits
    fleet = FleetSettings(replicas=parsed.replicas, body_bytes=limits.body_bytes, body_seconds=limits.body_seconds,
                          inside_bytes=limits.inside_bytes, stop_seconds=max(settings.drain_seconds, 1.0))
    share = settings.cache.budget_bytes // fleet.replicas if settings.cache.memory_bytes is None else settings.cache.memory_bytes
    recipe = [] if parsed.recipe is None else ["--recipe", str(parsed.recipe)]
    own = [sys.executable, "-m", "gnomon", "serve", *recipe, str(parsed.run), *parsed.overrides, "host=127.0.0.1",
           f"cache.memory_bytes={share}"]

    bound = server.listen(settings.host, settings.port)
    console.print(f"starting {fleet.replicas} replicas of {parsed.run} …")
    ready = f"{fleet.replicas} replicas answer behind {server.address(bound)}. Ctrl-C ends them"
    fleet_processes.run(lambda port: [*own, f"port={port}"], fleet, bound, lambda: console.print(ready))


def chat(parsed: argparse.Namespace) -> None:
    """Talk to a model in the terminal."""
    _need_packages()
    from gnomon.serve.terminal import Options, talk

    options = Options(model=parsed.model, effort=parsed.effort, system=parsed.system, tokens=parsed.tokens, temperature=parsed.temperature,
                      images=tuple(parsed.image or ()))
    if parsed.where.startswith(("http://", "https://")):
        talk(parsed.where.rstrip("/").removesuffix("/v1"), options, sys.stdin)
        return
    from gnomon.serve.assembly import served
    from gnomon.serve.server import Background
    from gnomon.serve.settings import load

    settings = load(None, ("log=none", "page=false", "drain_seconds=0", *parsed.overrides))
    with served(parsed.where, settings) as service, Background(service) as url:
        talk(url, options, sys.stdin)


def _need_packages() -> None:
    """Say in one line what is missing, if the packages of the API are not installed."""
    from importlib.util import find_spec

    from gnomon.errors import ConfigError

    missing = [name for name in ("fastapi", "uvicorn", "httpx", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}: pip install 'gnomon[serve]'")
