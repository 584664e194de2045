"""Between messages and tokens: what a chat format is, what it makes of a conversation, and what comes out while a model answers.

A format writes a conversation as ids and reads sampled ids back as a reply. Ids that were sampled are never made from text again: what is
trained on is what was sampled. Read next: `formats/xtml.py`, K3's format (report App. F), and `formats/kimi_linear.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from gnomon import extend
from gnomon.data.messages import Conversation, Effort, Image, Message, Text, ToolCall
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import ConfigError

FORMATS = "gnomon.data.formats"
RECOGNISED = {"<|open|>": "xtml", "<|im_middle|>": "kimi_linear"}  # a marker that only one family names


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A conversation as tokens.

    `mask` [len(tokens)] is true for what assistants wrote: everything after the tag that opens their message, through the id that ends it.
    `fallback` are stretches [start, stop) of it that stand in for arguments that were no JSON; a model never writes those, so `learnt`
    leaves them out. `boundaries` are lengths of prefixes that other requests may share, in ascending order: the ends of messages.
    `images` are those of the messages, one for each image pad among the tokens, in their order (`model/multimodal.py` puts them in place).
    """

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    fallback: tuple[tuple[int, int], ...] = ()
    boundaries: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()

    @property
    def learnt(self) -> tuple[bool, ...]:
        """The loss mask of training [len(tokens)]: `mask` without the fallback stretches."""
        mask = list(self.mask)
        for start, stop in self.fallback:
            mask[start:stop] = [False] * (stop - start)
        return tuple(mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStarted:
    """A call of a tool begins; `index` counts the calls of this reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    json: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnded:
    """A call is whole. One that was cut off never ends, and its arguments stay cut: nobody should run them."""

    index: int


Delta = ReasoningDelta | TextDelta | CallStarted | CallArguments | CallEnded


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a model answered. `complete` says that the message is closed and ended exactly as the format writes it; one cut by a limit, or
    with markers out of place, is not. `tail` are the deltas that were still held back when the tokens ended."""

    reasoning: str
    text: str
    tool_calls: tuple[ToolCall, ...]
    complete: bool
    tail: tuple[Delta, ...] = ()

    @property
    def message(self) -> Message:
        """The reply as a message, to append to the conversation."""
        content = (Text(text=self.text),) if self.text else ()
        return Message(role="assistant", content=content, reasoning=self.reasoning or None, tool_calls=self.tool_calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallGrammar:
    """What a reply must be that has to call a tool: a grammar in Lark's notation, where `<[id]>` is a reserved id, from the place on where
    an answer begins; and the ids that must follow it before a stop id."""

    text: str
    closes: tuple[int, ...]


class Parser(Protocol):
    """Reads one reply, one sampled id at a time. Any ids are read: nothing raises, and text in no proper place is text of the answer."""

    def feed(self, token: int) -> list[Delta]:
        """What `token` adds; never half a character. Feed every sampled id, the one that stopped generation included."""
        ...

    def finish(self) -> Reply:
        """The reply, after the last token."""
        ...


class ChatFormat(Protocol):
    """How one family of models writes conversations. Built from a tokenizer: `Format(tokenizer)`.

    `stop_ids` end a reply. An answer that must match a grammar lies between `answer_opens`, ids that the model writes when it has thought
    (empty where nothing stands between), and `answer_closes`, the ids that must follow it before a stop id. `efforts` are how much
    one can tell the model to think, and `default_effort` is what the released tokenizer tells it where nobody says it.
    """

    name: str
    stop_ids: frozenset[int]
    answer_opens: tuple[int, ...]
    answer_closes: tuple[int, ...]
    efforts: tuple[Effort, ...]
    default_effort: Effort | None

    def encode(self, conversation: Conversation, *, generate: bool = True, images: bool = False) -> Encoded:
        """The ids of a conversation; with `generate`, ready for the next assistant message, without it the history alone.

        Only who can show images to the model asks for `images`; without it they are refused, since pads alone would be read as words.
        Raises ConfigError for what the format cannot say, DataError for text that is not Unicode and for bytes that are no picture.
        """
        ...

    def parser(self, conversation: Conversation) -> Parser:
        """A parser for the reply to `conversation`."""
        ...

    def calls(self, conversation: Conversation, *, parallel: bool = True) -> CallGrammar | None:
        """What the reply must be where `tool_choice` demands a call, of one tool or of any, with `parallel` of several; None where it
        demands none."""
        ...


def chat_format(tokenizer: Tokenizer, name: str | None = None) -> ChatFormat:
    """The format that `name` stands for, a file of `formats/` or a dotted path `your_pkg.module:Format`; by default the one whose markers
    the vocabulary names. Raises ConfigError when there is none, or when markers are missing."""
    if name is None:
        found = [kind for marker, kind in RECOGNISED.items() if marker in tokenizer.special_ids]
        if not found:
            raise ConfigError(f"the tokenizer names none of the markers {', '.join(RECOGNISED)}, so its chat format is unknown; "
                              f"name one of {', '.join(extend.kinds(FORMATS))}")
        name = found[0]
    return cast(ChatFormat, extend.find(FORMATS, name, "Format")(tokenizer))


def marker_ids(tokenizer: Tokenizer, markers: tuple[str, ...], format_name: str) -> tuple[int, ...]:
    """The ids of `markers`. Raises ConfigError naming those that the vocabulary lacks."""
    missing = [marker for marker in markers if marker not in tokenizer.special_ids]
    if missing:
        raise ConfigError(f"chat format '{format_name}' needs {', '.join(missing)}, which the tokenizer does not name")
    return tuple(tokenizer.special_ids[marker] for marker in markers)
