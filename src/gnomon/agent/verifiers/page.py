"""Is a web page what was asked for? It is built, opened in a browser, and the document that results is looked at.

Settings: `path`, the page's file; `build`, a command before; `elements`, each `{"selector": "table tr", "least": 3, "most": 9,
"text": "…"}`; `expressions`, JavaScript that must come out true in the page, awaited in order; `browser`, a program. A build that fails, an
error in the page's scripts, or an element that is not there, is 0. Selectors know tags, `#id`, `.class`, `[attribute=value]` and descent.
Elements are looked for in the document and not by the page's own scripts; expressions run among those and trust them.
"""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from gnomon.agent.fields import Fields
from gnomon.agent.task import Task
from gnomon.agent.trajectory import Score, Trajectory
from gnomon.agent.verifier import Machine, settings
from gnomon.agent.verifiers.files import read
from gnomon.errors import DataError, VerifierError
from gnomon.sandbox.sandbox import Command, Sandbox

BROWSERS = ("/usr/lib/chromium/chromium", "/usr/bin/chromium-browser", "/opt/google/chrome/chrome", "/usr/bin/google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
         "--user-data-dir=/tmp/judge-browser", "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom")
SECONDS = 120.0
_PART = re.compile(r"([a-zA-Z][\w-]*|\*)?((?:[#.][\w-]+|\[[\w-]+(?:=[^\]]*)?\])*)")
_PIECE = re.compile(r"#[\w-]+|\.[\w-]+|\[[\w-]+(?:=[^\]]*)?\]")
_EMPTY = frozenset(("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"))
_ERROR = re.compile(r"CONSOLE[^\]]*\] \"(Uncaught.*?)\", source", re.DOTALL)


class Verifier:
    """Builds, opens, looks."""

    machine: Machine = "fork"

    def __init__(self, table: Mapping[str, Any]) -> None:
        fields = settings(table)
        self.path, self.browser = fields.text("path"), fields.maybe("browser", fields.text)
        self.build, self.expressions = tuple(fields.rows("build")), [*map(str, fields.rows("expressions"))]
        self.elements = [_element(each) for each in fields.each("elements")]
        fields.done()
        if not self.path.startswith("/") or not (self.elements or self.expressions):
            raise DataError("'path' is absolute, and 'elements' or 'expressions' say what must be there")

    async def score(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        """1 when everything is there; `share` says how much is."""
        if sandbox is None:
            raise VerifierError("a page is opened in a machine, and there is none")
        if self.build:
            built = await sandbox.exec(Command(argv=self.build, timeout_seconds=SECONDS, cwd=task.workdir, user=task.user))
            if built.code or built.timed_out:
                said = (built.stdout + built.stderr)[-300:]
                return Score(reward=0.0, evidence=(f"the build ended with {built.code}: {said!r}",))
        page = await read(sandbox, self.path)
        if page is None:
            return Score(reward=0.0, evidence=(f"{self.path} is not there",))
        word = f"data-judged-{secrets.token_hex(8)}"
        target = self.path
        if self.expressions:
            target = f"{self.path.rpartition('/')[0]}/judged-{secrets.token_hex(8)}.html"
            await sandbox.write(target, page + _asking(self.expressions, word).encode())
        document, complaints = await self._opened(sandbox, target)
        wrong = [*complaints, *(why for element in self.elements if (why := _missing(document, element)))]
        wrong += _false(document, word, self.expressions)
        total = len(self.elements) + len(self.expressions)
        return Score(reward=float(not wrong), metrics={"share": max(0.0, 1 - len(wrong) / total)}, evidence=(*wrong,) or ("all is there",))

    async def _opened(self, sandbox: Sandbox, path: str) -> tuple[Node, list[str]]:
        """The document after its scripts, and what they complained of."""
        for browser in (self.browser,) if self.browser else BROWSERS:
            found = await sandbox.exec(Command(argv=("/bin/sh", "-c", 'test -x "$0"', str(browser)), timeout_seconds=30))
            if found.code == 0:
                break
        else:
            raise VerifierError(f"the machine has no browser ({self.browser or ', '.join(BROWSERS)}); use an image with Chromium")
        argv = (str(browser), *FLAGS, f"file://{path}")
        shown = await sandbox.exec(Command(argv=argv, timeout_seconds=SECONDS, max_output_bytes=4 << 20))
        if shown.timed_out:
            return parsed(""), [f"the page was not ready after {SECONDS:g} s"]
        if shown.code or not shown.stdout.strip():
            raise VerifierError(f"the browser ended with status {shown.code}: {shown.stderr[-300:].decode('utf-8', 'replace')}")
        errors = _ERROR.findall(shown.stderr.decode("utf-8", "replace"))
        return parsed(shown.text), [f"script error: {each[:200]}" for each in errors]


class Node:
    """An element: its tag, attributes, children in order, and text."""

    def __init__(self, tag: str, attributes: Mapping[str, str], parent: Node | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node] = []
        self.words: list[str] = []

    @property
    def text(self) -> str:
        """All text below it."""
        return " ".join(" ".join([*self.words, *(child.text for child in self.children)]).split())

    def below(self) -> list[Node]:
        """Every element below it."""
        return [node for child in self.children for node in (child, *child.below())]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.at = Node("", {}, None)
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(node)
        if tag not in _EMPTY and self.depth < 200:
            self.at, self.depth = node, self.depth + 1

    def handle_endtag(self, tag: str) -> None:
        node: Node | None = self.at
        steps = 0
        while node is not None and node.tag != tag:
            node, steps = node.parent, steps + 1
        if node is not None and node.parent is not None:
            self.at, self.depth = node.parent, self.depth - steps - 1

    def handle_data(self, data: str) -> None:
        if self.at.tag not in ("script", "style"):
            self.at.words.append(data)


def parsed(text: str) -> Node:
    """A document as elements."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.root


def selected(document: Node, selector: str) -> list[Node]:
    """The elements that a selector names."""
    parts = selector.split()
    return [node for node in document.below() if _is(node, parts[-1]) and _descends(node.parent, parts[:-1])]


def _descends(node: Node | None, parts: list[str]) -> bool:
    while parts and node is not None:
        if _is(node, parts[-1]):
            parts = parts[:-1]
        node = node.parent
    return not parts


def _is(node: Node, part: str) -> bool:
    match = _PART.fullmatch(part)
    if match is None or match[1] not in (None, "*", node.tag):
        return False
    for piece in _PIECE.findall(match[2]):
        name, _, value = piece[1:].rstrip("]").partition("=")
        if piece[0] == "#" and node.attributes.get("id") != name:
            return False
        if piece[0] == "." and name not in node.attributes.get("class", "").split():
            return False
        if piece[0] == "[" and (name not in node.attributes or ("=" in piece and node.attributes[name] != value.strip("'\""))):
            return False
    return True


def _element(fields: Fields) -> dict[str, Any]:
    selector = fields.text("selector")
    found = {"selector": selector, "least": fields.whole("least", 1), "most": fields.maybe("most", fields.whole),
             "text": fields.maybe("text", fields.text)}
    fields.done()
    if not selector.split() or not all(map(_PART.fullmatch, selector.split())):
        raise fields.wrong("selector", selector, "tags, #id, .class, [attribute=value], one below another")
    return found


def _missing(document: Node, element: Mapping[str, Any]) -> str:
    found = selected(document, element["selector"])
    if element["text"] is not None:
        found = [node for node in found if element["text"].casefold() in node.text.casefold()]
    right = len(found) >= element["least"] and (element["most"] is None or len(found) <= element["most"])
    said = f" with {element['text']!r}" if element["text"] is not None else ""
    wanted = f"{element['least']} to {element['most'] or 'any number'}"
    return "" if right else f"{element['selector']}{said}: {len(found)} found, wanted {wanted}"


def _asking(expressions: list[str], word: str) -> str:
    """A script that evaluates expressions once the page is there and leaves what they came to on the root element."""
    listed = json.dumps(expressions).replace("</", "<\\/")
    return (f"\n<script>window.addEventListener('load', async () => {{ const said = []; for (const text of {listed}) {{ try {{ "
            "said.push((await (0, eval)(text)) === true); } catch (error) { said.push(String(error)); } } "
            f"document.documentElement.setAttribute('{word}', JSON.stringify(said)); }});</script>\n")


def _false(document: Node, word: str, expressions: list[str]) -> list[str]:
    if not expressions:
        return []
    said = next((node.attributes[word] for node in document.below() if word in node.attributes), "[]")
    try:
        values = json.loads(html.unescape(said))
    except ValueError:
        values = []
    values = values if len(values) == len(expressions) else ["was not evaluated"] * len(expressions)
    return [f"{text}: {value if isinstance(value, str) else 'is not true'}"
            for text, value in zip(expressions, values) if value is not True]
