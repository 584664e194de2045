"""What was sampled is never encoded again: a conversation that comes back keeps the ids that the policy chose (report App. F).

A format writes the whole conversation as ids. Where one of its messages is an answer that was sampled in the same session, the ids of that
answer take the place of what the format wrote, between the same two ends of messages. What a client changed (another text, thinking left
out, a cut answer sent back) is given text: its ids are new, and the record sees a branch. Read next: `record.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gnomon.agent.same import Rolling, Words, words
from gnomon.data.chat import ChatFormat, Encoded, Reply
from gnomon.data.messages import Conversation, Image, Message
from gnomon.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A conversation as ids, ready for the next answer.

    The first `known` of `token_ids` are exactly what the model had read and said when an earlier answer ended. `opening` are the last ids:
    those that open the answer. `images` are in the order of their pads.
    """

    conversation: Conversation
    token_ids: tuple[int, ...]
    opening: tuple[int, ...]
    known: int = 0
    images: tuple[Image, ...] = ()


@dataclass(slots=True)
class _Session:
    """Whole answers by their words, and then by the fingerprint of what was read before them; and fingerprints of whole contexts."""

    answers: dict[tuple[bool, Words], dict[bytes, tuple[int, ...]]] = field(default_factory=dict)
    contexts: set[bytes] = field(default_factory=set)

    def find(self, thinking: bool, message: Message, before: bytes) -> tuple[int, ...] | None:
        """The ids of an answer: the one that was given here, else the latest of these words."""
        found = self.answers.get((thinking, words(message)))
        if found is None:
            return None
        return found.get(before) or next(reversed(found.values()))


class Ledger:
    """The ids of all sessions of one policy. `images` says whether pictures may be shown to it.

    A session costs memory for what was sampled in it, until `forget`.
    """

    def __init__(self, chat: ChatFormat, *, images: bool = False) -> None:
        self.chat = chat
        self._images = images
        self._sessions: dict[str, _Session] = {}

    def prepare(self, session: str, conversation: Conversation) -> Prompt:
        """A conversation as ids. Raises `ConfigError` for what the format cannot say, `DataError` for text that is no Unicode."""
        encoded = self.chat.encode(conversation, generate=True, images=self._images)
        known = self._sessions.get(session, _Session())
        said = [message for message in conversation.messages if message.role == "assistant"]
        places = list(answers(encoded))
        if len(said) != len(places):
            raise DataError(f"chat format '{self.chat.name}' wrote {len(said)} answers as {len(places)}; ids cannot be kept with it")
        ids: list[int] = []
        rolling, at, longest = Rolling(), 0, 0

        def add(run: tuple[int, ...]) -> None:
            ids.extend(run)
            rolling.add(run)

        for message, (start, stop) in zip(said, places, strict=True):
            add(encoded.tokens[at:start])
            add(known.find(conversation.thinking, message, rolling.digest) or encoded.tokens[start:stop])
            at = stop
            if rolling.digest in known.contexts:
                longest = len(ids)
        ids += encoded.tokens[at:]
        ends = (0, *encoded.boundaries)
        return Prompt(conversation=conversation, token_ids=tuple(ids), opening=encoded.tokens[ends[-2]:], known=longest,
                      images=encoded.images)

    def took(self, session: str, prompt: Prompt, sampled: Sequence[int]) -> Reply:
        """What ids that were sampled after a prompt say; they are kept. A reply that is not whole is no message of the format, so one
        that comes back counts as given text."""
        parser = self.chat.parser(prompt.conversation)
        for token in sampled:
            parser.feed(token)
        reply = parser.finish()
        if reply.complete:
            before = prompt.token_ids[: len(prompt.token_ids) - len(prompt.opening)]
            self._keep(session, before, (*prompt.opening, *sampled), (prompt.conversation.thinking, words(reply.message)))
        return reply

    def recall(self, session: str, context: Sequence[int], sampled: Sequence[int], message: Message) -> None:
        """Take up an answer that another process recorded: the ids that were read before it, those that were sampled, and what they say.
        One that was cut, or that another format opened, counts as given text."""
        context, sampled = tuple(context), tuple(sampled)
        for thinking in (True, False):
            conversation = Conversation(messages=(Message(role="user", content=()),), thinking=thinking)
            encoded = self.chat.encode(conversation, generate=True)
            opening = encoded.tokens[(0, *encoded.boundaries)[-2]:]
            if context[len(context) - len(opening):] != opening:
                continue
            parser = self.chat.parser(conversation)
            for token in sampled:
                parser.feed(token)
            if parser.finish().complete:
                self._keep(session, context[: len(context) - len(opening)], (*opening, *sampled), (thinking, words(message)))

    def _keep(self, session: str, before: tuple[int, ...], run: tuple[int, ...], said: tuple[bool, Words]) -> None:
        """Remember a whole answer: what was read before its opening, and its ids with that."""
        kept = self._sessions.setdefault(session, _Session())
        rolling = Rolling(before)
        same = kept.answers.setdefault(said, {})
        same.pop(rolling.digest, None)
        same[rolling.digest] = run
        rolling.add(run)
        kept.contexts.add(rolling.digest)

    def forget(self, session: str) -> None:
        """Nothing of a session is kept; one that is not known is no error."""
        self._sessions.pop(session, None)


def answers(encoded: Encoded) -> Iterator[tuple[int, int]]:
    """Where the messages of assistants stand, their opening tags included: [start, stop) in the order of the conversation."""
    start = 0
    for stop in encoded.boundaries:
        if stop and encoded.mask[stop - 1]:
            yield start, stop
        start = stop


def spoken(chat: ChatFormat, message: Message, opening: tuple[int, ...], *, thinking: bool) -> tuple[int, ...]:
    """The ids that a model would sample for a message, as the format writes it: those after `opening`, through the end of the message.

    For policies that pretend. Raises `DataError` for a message that no model can say, one with a name for instance.
    """
    encoded = chat.encode(Conversation(messages=(message,), thinking=thinking), generate=False)
    [(start, stop)] = answers(encoded)
    if encoded.tokens[start : start + len(opening)] != opening:
        raise DataError(f"an answer that the format '{chat.name}' does not begin as it opens one: leave out its name")
    return encoded.tokens[start + len(opening) : stop]
