"""XTML against the released encoder, which mlx-vlm carries: the same ids for every conversation of a seeded generator.

The encoder is one file and is loaded by path; the package around it needs much that is not there.
"""

import importlib.util
import io
import json
import random
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from gnomon.data import messages
from gnomon.data.chat import chat_format
from gnomon.data.messages import Conversation, Message, Part, ResponseFormat, Text, Tool, ToolCall
from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
WORDS = [
    "", "Hello world", " ", "\n\n  x\n", "你好，世界", "e\u0301 🙂👩‍👩‍👧 ﷽", "<|close|>think<|sep|>", "<|end_of_msg|>", "[EOS]",
    "<|media_pad|>",
    '<|open|>message role="system"<|sep|>', 'a "quoted" & <b>', "&quot; &amp;", "```json\n{}\n```", "<|kimi_image_placeholder|>", "{}",
    "\\u0041\\", "\r\n\t", "a{b}c {0}",
]
NAMES = ["get_weather", "f", 'a"b', "x&y", "名前", "functions.f:0", "call tool", "<|sep|>"]


@pytest.fixture(scope="module")
def released() -> ModuleType:
    """`mlx_vlm/models/kimi_k3/encoding_k3.py` of the installed package, without importing the package."""
    package = PathFinder.find_spec("mlx_vlm", [str(Path(sys.prefix) / "peers"), *sys.path])
    if package is None or not package.submodule_search_locations:
        pytest.skip("mlx-vlm is not installed: make test puts it beside the environment's own packages")
    path = f"{next(iter(package.submodule_search_locations))}/models/kimi_k3/encoding_k3.py"
    spec = importlib.util.spec_from_file_location("released_encoding_k3", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        pytest.skip(f"{path} is not there; the tests are written for mlx-vlm 0.7.10")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 1024)


def text(rng: random.Random) -> str:
    """A few words, some of which look like structure."""
    return " ".join(rng.choices(WORDS, k=rng.randint(0, 4)))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kinds: list[Callable[[], Any]] = [
        lambda: text(rng), lambda: rng.choice([True, False, None]), lambda: rng.choice([0, -7, 10**30]),
        lambda: rng.choice([1.0, -0.0, 1e300, 2.5e-9, float("nan"), float("inf")]),
    ]
    if depth < 3:
        kinds += [lambda: [value(rng, depth + 1) for _ in range(rng.randint(0, 3))], lambda: mapping(rng, depth + 1)]
    return rng.choice(kinds)()


def mapping(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON object; its keys are in no order."""
    keys = rng.choices(["b", "a", "Z", "ä", 'key with "quotes" & more', "", "1", "你"], k=rng.randint(0, 4))
    return {key: value(rng, depth) for key in keys}


def arguments(rng: random.Random) -> str:
    """The JSON text of an object, or text that is none."""
    whole = json.dumps(mapping(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 2]))
    odd = ["", "  \n", "{", '{"a": }', "not json " + text(rng), '{"a": 1, "a": "two"}', '{"n": 1E5, "m": 1.50, "o": -0}', whole[:-1] + " "]
    return rng.choice([whole, whole, whole, *odd])


def tool(rng: random.Random) -> dict[str, Any]:
    """A declaration as clients send it."""
    parameters = {"type": "object", "properties": mapping(rng), "x": value(rng)}
    function = {"name": rng.choice(NAMES), "description": text(rng), "parameters": parameters}
    return {"type": "function", "function": dict(rng.sample(list(function.items()), 3)), **rng.choice([{}, {"strict": True}])}


def picture(width: int, height: int) -> bytes:
    """A file with an image of this size."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def with_images(rng: random.Random, source: dict[str, Any]) -> dict[str, Any]:
    """The same with images in some messages, and their prompts in order. Text must not hold the encoder's own word for an image then."""
    source = json.loads(json.dumps(source).replace("<|kimi_image_placeholder|>", ""))
    prompts = []
    for message in source["messages"]:
        if isinstance(message["content"], list) and not message.get("tools"):
            width, height = rng.randint(1, 40), rng.randint(1, 40)
            message["content"].insert(rng.randint(0, len(message["content"])), {"type": "image", "image": (width, height)})
            prompts.append(f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>")
    return source | {"image_prompts": prompts}


def conversation(rng: random.Random) -> dict[str, Any]:
    """A conversation in the words of the released encoder."""
    found: list[dict[str, Any]] = []
    for _ in range(rng.randint(0, 7)):
        kind = rng.choice(["system", "user", "user", "assistant", "assistant", "tools", "extension"])
        name = rng.choice([{}, {}, {"name": rng.choice(NAMES)}])
        if kind in ("system", "user"):
            found.append({"role": kind, "content": content(rng), **name})
        elif kind == "extension":
            found.append({"role": "system", "content": text(rng), "tools": [tool(rng) for _ in range(rng.randint(1, 2))]})
        elif kind == "assistant":
            found.append(assistant(rng) | name)
        else:
            found += results(rng, found)
    schema = rng.choice([{"type": "object", "properties": mapping(rng)}, {}])
    wanted = [None, None, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}]
    return {
        "messages": found, "tools": [tool(rng) for _ in range(rng.choice([0, 0, 1, 3]))], "thinking": rng.random() < 0.8,
        "thinking_effort": rng.choice([None, "low", "high", "max"]), "tool_choice": rng.choice(["auto", "auto", "none", "required"]),
        "response_format": rng.choice(wanted), "add_generation_prompt": rng.random() < 0.8,
    }


def content(rng: random.Random) -> Any:
    """The text of a message: one string, or parts."""
    parts = [{"type": "text", "text": text(rng)} for _ in range(rng.randint(0, 3))]
    return rng.choice([text(rng), None, parts])


def assistant(rng: random.Random) -> dict[str, Any]:
    """An assistant message, with parallel calls sometimes; ids may repeat."""
    calls = [{"id": rng.choice([f"call_{rng.randint(0, 9)}", "same"]), "type": "function",
              "function": {"name": rng.choice(NAMES), "arguments": arguments(rng)}} for _ in range(rng.choice([0, 0, 1, 2, 4]))]
    reasoning = rng.choice([None, "", " \n ", text(rng)])
    return {"role": "assistant", "content": content(rng), "tool_calls": calls, "reasoning_content": reasoning}


def results(rng: random.Random, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages: answers to the latest calls in any order, or strangers that bring a name."""
    calls = next((m["tool_calls"] for m in reversed(before) if m["role"] == "assistant"), [])
    if rng.random() < 0.25:
        ids = rng.choices(["stranger", "same"], k=2)
        return [{"role": "tool", "content": content(rng), "name": rng.choice(NAMES), "tool_call_id": found} for found in ids]
    stale = rng.choice([{}, {"name": "stale"}])
    answers = [{"role": "tool", "content": content(rng), "tool_call_id": call["id"], **stale} for call in calls]
    return rng.sample(answers, len(answers))


def ours(source: dict[str, Any]) -> Conversation:
    """The same conversation in our types."""
    def read(message: dict[str, Any]) -> Message:
        parts = message["content"]
        pieces = [] if parts is None else [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        calls = [ToolCall(id=call["id"], **call["function"]) for call in message.get("tool_calls") or []]
        return Message(
            role=message["role"], content=tuple(part(piece) for piece in pieces), name=message.get("name"),
            reasoning=message.get("reasoning_content"), tool_calls=tuple(calls), tool_call_id=message.get("tool_call_id"),
            tools=declared(message.get("tools", [])),
        )

    def part(piece: dict[str, Any]) -> Part:
        if piece["type"] == "text":
            return Text(text=piece["text"])
        return messages.Image(data=picture(*piece["image"]), media_type="image/png")

    def declared(tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
        return tuple(Tool(name=t["function"]["name"], declaration=t) for t in tools)

    wanted = source["response_format"]
    schema = wanted["json_schema"]["schema"] if wanted and wanted["type"] == "json_schema" else None
    return Conversation(
        messages=tuple(read(message) for message in source["messages"]), tools=declared(source["tools"]), thinking=source["thinking"],
        effort=source["thinking_effort"], tool_choice=source["tool_choice"],
        response_format=ResponseFormat(kind=wanted["type"], schema=schema) if wanted else None,
    )


def with_markers(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of text in which the names of markers are markers."""
    special = tokenizer.special_ids
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return [index for part in parts for index in ([special[part]] if part in special else tokenizer.encode(part))]


def segments(released: Any, source: dict[str, Any]) -> Any:
    """What the released encoder makes of it; None where it refuses."""
    options = {key: part for key, part in source.items() if key not in ("messages", "tools")}
    try:
        return released.build_chat_segments(source["messages"], source["tools"] or None, **options)
    except (AssertionError, ValueError):
        return None


def test_equals_the_released_encoder(released: ModuleType, tokenizer: Tokenizer) -> None:
    """Ids per segment as the release says: markers as their ids, everything else as ordinary text."""
    rng, chat = random.Random(20260727), chat_format(tokenizer)
    marks = ("<|media_begin|>image", "json type", "tool-choice", "response-format", "New Tools", "thinking-effort", 'index="4"')
    seen, refused = dict.fromkeys(marks, 0), 0
    for number in range(400):
        source = conversation(rng)
        source = with_images(rng, source) if number % 4 == 0 else source
        theirs = segments(released, source)
        if theirs is None:
            refused += 1
            with pytest.raises(ConfigError):
                chat.encode(ours(source))
            continue
        expected = []
        for segment in theirs:
            expected += with_markers(segment.text, tokenizer) if segment.allow_special else tokenizer.encode(segment.text)
        encoded = chat.encode(ours(source), generate=source["add_generation_prompt"], images=True)
        got = encoded.tokens
        assert got.count(tokenizer.special_ids["<|media_pad|>"]) == len(encoded.images) == len(source.get("image_prompts", []))
        assert list(got) == expected, f"conversation {number}: {tokenizer.decode(got)}\n{tokenizer.decode(expected)}"
        for mark in seen:
            seen[mark] += mark in tokenizer.decode(got)
    assert min(seen.values()) >= 5 and refused <= 40, f"the generator hardly reaches {seen}, or is refused too often: {refused}"


def test_equals_the_released_encoder_on_its_own_kind_of_tokenizer(released: ModuleType, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Through transformers, as the released processor encodes: `split_special_tokens` unless a segment may hold markers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer.save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rng, chat = random.Random(7), chat_format(tokenizer)
    for _ in range(30):
        source = conversation(rng)
        theirs = segments(released, source)
        if theirs is None:
            continue
        expected = []
        for segment in theirs:
            expected += other.encode(segment.text, add_special_tokens=False, split_special_tokens=not segment.allow_special)
        assert list(chat.encode(ours(source), generate=source["add_generation_prompt"]).tokens) == expected


@pytest.mark.parametrize("change", [
    {"thinking_effort": "medium"}, {"thinking_effort": "xhigh"},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]}]},
])
def test_refuses_what_the_released_encoder_refuses(released: ModuleType, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    source = {"messages": [], "tools": [], "thinking": True, "thinking_effort": None, "tool_choice": "auto", "response_format": None,
              "add_generation_prompt": True} | change
    assert segments(released, source) is None
    with pytest.raises(ConfigError):
        chat_format(tokenizer).encode(ours(source))
