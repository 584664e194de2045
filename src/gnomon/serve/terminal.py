"""`gnomon chat`: a conversation in the terminal with any server of OpenAI's chat completions.

Thinking is dim, a line says what each answer cost and what of it was cached. What a model says can move no cursor and change no colour.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import httpx
from rich.console import Console

from gnomon.errors import ConfigError, GnomonError
from gnomon.serve.access import KEYS_VARIABLE

HELP = """/image FILE shows a picture with the next message
/new begins anew · /again another answer · /back takes the last exchange away · /effort none|low|high|max · /system TEXT
/help · /quit or Ctrl-D ends · Ctrl-C stops an answer"""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is asked with every message; None is left to the server. `images` go with the first message."""

    model: str | None = None
    effort: str | None = None
    system: str | None = None
    tokens: int | None = None
    temperature: float | None = None
    images: tuple[Path, ...] = ()


@dataclass(slots=True)
class _Talk:
    client: httpx.Client
    console: Console
    options: Options
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)  # parts that go with the next message


def talk(url: str, options: Options, lines: TextIO, console: Console | None = None) -> None:
    """Read messages from `lines` and write answers until it ends. Raises `ConfigError` for a server that cannot be reached."""
    console = console or Console(highlight=False)
    key = os.environ.get("GNOMON_API_KEY") or os.environ.get("OPENAI_API_KEY") or _first(os.environ.get(KEYS_VARIABLE, ""))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10, read=600)) as client:
        model = options.model or _model(client, url)
        state = _Talk(client, console, options, model)
        people = lines.isatty()
        console.print(f"[bold]{model}[/bold] at {url}; /help says more", style="dim")
        for path in options.images:
            _attach(state, path)
        while True:
            try:
                text = _line(lines, console, people)
                if text is None or text in ("/quit", "/exit"):
                    return
                if text:
                    _do(state, text)
            except KeyboardInterrupt:
                console.print("  (Ctrl-D or /quit ends)", style="dim")


def _line(lines: TextIO, console: Console, people: bool) -> str | None:
    if people:
        try:
            return console.input("[bold]> [/bold]").strip()
        except EOFError:
            return None
    line = lines.readline()
    return line.strip() if line else None


def _do(state: _Talk, text: str) -> None:
    """A command, or a message."""
    word, _, rest = text.partition(" ")
    match word:
        case "/help":
            state.console.print(HELP, style="dim", markup=False)
        case "/new":
            state.messages.clear()
        case "/image":
            _attach(state, Path(rest.strip()).expanduser())
        case "/effort":
            state.options = replace(state.options, effort=rest.strip() or None)
        case "/system":
            state.options = replace(state.options, system=rest.strip() or None)
        case "/back":
            while state.messages and state.messages.pop()["role"] != "user":
                pass
        case "/again":
            if state.messages and state.messages[-1]["role"] == "assistant":
                state.messages.pop()
            if state.messages:
                _answer(state)
        case _ if word.startswith("/"):
            state.console.print(f"there is no {word}; /help lists what there is", style="dim", markup=False)
        case _:
            content = [*state.images, {"type": "text", "text": text}] if state.images else text
            state.images = []
            state.messages.append({"role": "user", "content": content})
            _answer(state)


def _attach(state: _Talk, path: Path) -> None:
    """Show a picture with the next message; the server says what it cannot read."""
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        state.console.print(f"{path}: {error.strerror}", style="red", markup=False)
        return
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    state.images.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
    state.console.print(f"{path.name} goes with the next message", style="dim", markup=False)


def _answer(state: _Talk) -> None:
    body: dict[str, Any] = {"model": state.model, "messages": state.messages, "stream": True, "stream_options": {"include_usage": True}}
    options = state.options
    if options.system:
        body["messages"] = [{"role": "system", "content": options.system}, *state.messages]
    more = {"reasoning_effort": options.effort, "max_tokens": options.tokens, "temperature": options.temperature}
    body |= {name: value for name, value in more.items() if value is not None}
    said: dict[str, str] = {"content": "", "reasoning_content": ""}
    usage: dict[str, Any] | None = None
    try:
        for chunk in _chunks(state.client, body):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                _show(state.console, choice["delta"], said)
    except KeyboardInterrupt:
        state.console.print("\n(stopped)", style="dim")
    except (GnomonError, httpx.HTTPError) as error:
        state.messages.pop()
        state.console.print(f"\n{error}", style="red", markup=False)
        return
    message = {"role": "assistant", "content": said["content"]}
    state.messages.append(message | ({"reasoning_content": said["reasoning_content"]} if said["reasoning_content"] else {}))
    state.console.print()
    if usage is not None:
        details = usage.get("prompt_tokens_details") or {}
        note = f" ({details['cache_note']})" if details.get("cache_note") else ""
        state.console.print(f"{usage['prompt_tokens']} tokens in, {details.get('cached_tokens') or 0} cached{note}, "
                            f"{usage['completion_tokens']} out", style="dim", markup=False)


def _show(console: Console, delta: dict[str, Any], said: dict[str, str]) -> None:
    for name, style in (("reasoning_content", "dim"), ("content", None)):
        text = delta.get(name)
        if text:
            if name == "content" and said["reasoning_content"] and not said["content"]:
                console.print("\n")
            said[name] += text
            console.print(plain(text), end="", style=style, markup=False, soft_wrap=True)
    for call in delta.get("tool_calls", ()):
        function = call.get("function", {})
        text = f"\n[calls {function['name']}] " if function.get("name") else ""
        console.print(plain(text + function.get("arguments", "")), end="", style="cyan", markup=False, soft_wrap=True)


def _chunks(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise GnomonError(_reason(response.read(), response.status_code))
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise GnomonError(str(chunk["error"]["message"]))
                yield chunk


def _model(client: httpx.Client, url: str) -> str:
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError(f"no server answers at {url}: {error}; start one with gnomon serve RUN") from None
    if response.status_code != 200:
        raise ConfigError(_reason(response.content, response.status_code))
    return str(response.json()["data"][0]["id"])


def _reason(body: bytes, status: int) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200].decode('utf-8', 'replace')}"


def plain(text: str) -> str:
    """Text without control characters, except line breaks and tabs: nothing a model says may steer a terminal."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _first(keys: str) -> str:
    return keys.partition(",")[0].rpartition(":")[2].strip()
