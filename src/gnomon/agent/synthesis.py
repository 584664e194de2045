"""Tasks guided by a graph of concepts: it grows from coarse to fine, keywords are drawn from it, passages found for them become questions
with answers that can be checked (report §4.2.2).

Who expands a concept and who writes a question is either a rule, which needs nothing, or a policy. Whoever writes, a question stands only
if the words of its answer are in a passage, literally, once, and the question does not say them. Read next: `tasks/synthesis.py`.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gnomon.agent.library import WORD, Library, Passage
from gnomon.agent.policy import Policy, Sampling
from gnomon.data.messages import Conversation, Message, Text
from gnomon.errors import DataError

LONGEST_ANSWER = 60
_COMMON = frozenset((
    "about", "after", "also", "and", "are", "because", "been", "before", "between", "both", "but", "can", "does", "each", "every",
    "for", "from", "has", "have", "here", "how", "into", "its", "more", "most", "not", "nothing", "one", "only", "other", "over",
    "same", "several", "some", "such", "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "two",
    "was", "were", "what", "when", "where", "which", "while", "who", "whose", "will", "with", "without", "would", "you", "your",
))
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def same_concept(name: str) -> str:
    """What two names of one concept have in common: case, order, plurals and punctuation do not count."""
    words = [word.casefold() for word in re.findall(r"\w+", name)]
    return " ".join(sorted(word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words))


class Graph:
    """Concepts, each with those it refines: directed, without circles. Names of one concept are one node."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.names: dict[str, str] = {}
        self.parents: dict[str, set[str]] = {}
        self.depth: dict[str, int] = {}
        for root in roots:
            if not same_concept(root):
                raise DataError(f"'roots': {root!r} names nothing")
            self._new(root, 0)

    def add(self, name: str, parent: str) -> bool:
        """A refinement of a concept; whether it is new. One that is known gets another parent, unless that would make a circle."""
        key, above = same_concept(name), same_concept(parent)
        if not key or key == above:
            return False
        new = key not in self.names
        if new:
            self._new(name, self.depth[above] + 1)
        if key not in self.ancestors(above):
            self.parents[key].add(above)
        return new

    def ancestors(self, key: str) -> set[str]:
        """All that a concept refines, itself included."""
        found, left = set(), [key]
        while left:
            if (each := left.pop()) not in found:
                found.add(each)
                left += self.parents[each]
        return found

    def at(self, depth: int) -> list[str]:
        """The names at a granularity, 0 the coarsest."""
        return [self.names[key] for key, level in self.depth.items() if level == depth]

    def _new(self, name: str, depth: int) -> None:
        key = same_concept(name)
        self.names.setdefault(key, name)
        self.parents.setdefault(key, set())
        self.depth.setdefault(key, depth)


class Expander(Protocol):
    """Names finer concepts."""

    async def finer(self, name: str, passages: Sequence[Passage]) -> list[str]:
        """Refinements of a concept, the best first."""
        ...


class Writer(Protocol):
    """Writes a question about a passage."""

    async def write(self, keywords: Sequence[str], passage: Passage) -> tuple[str, str] | None:
        """A question and its answer, or None."""
        ...


async def grow(graph: Graph, library: Library, expander: Expander, *, depth: int, width: int) -> Graph:
    """Expand level by level, each concept by at most `width` new ones, with what the library says about it."""
    for level in range(depth):
        for name in graph.at(level):
            fresh = 0
            for finer in await expander.finer(name, library.search(name, 12)):
                fresh += graph.add(finer, name)
                if fresh == width:
                    break
    return graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question whose answer stands in a passage."""

    text: str
    answer: str
    keywords: tuple[str, ...]
    passage: Passage


async def questions(graph: Graph, library: Library, writer: Writer, *, depth: int, keywords: int, count: int, seed: int) -> list[Question]:
    """Up to `count` questions: keywords of one granularity are drawn, passages found, questions written, checked and never given twice."""
    rng = random.Random(f"synthesis {seed}")
    concepts = graph.at(depth)
    found: dict[str, Question] = {}
    used: set[tuple[str, int]] = set()
    for _ in range(8 * count):
        if len(found) == count or not concepts:
            break
        drawn = tuple(rng.sample(concepts, min(keywords, len(concepts))))
        for passage in library.search(" ".join(drawn), 6):
            if (passage.document, passage.number) in used:
                continue
            used.add((passage.document, passage.number))
            written = await writer.write(drawn, passage)
            if written is not None and stands(*written, passage) and same_concept(written[0]) not in found:
                found[same_concept(written[0])] = Question(text=written[0], answer=written[1], keywords=drawn, passage=passage)
                break
    return [*found.values()]


def stands(question: str, answer: str, passage: Passage) -> bool:
    """Whether the answer is literally, and once, in the passage, short, and not in the question."""
    text, words = passage.text.casefold(), answer.strip().casefold()
    whole = re.findall(rf"(?<!\w){re.escape(words)}(?!\w)", text)
    return bool(words) and len(words) <= LONGEST_ANSWER and len(whole) == 1 and words not in question.casefold() and len(question) >= 20


class Rules:
    """Expands by the words that stand near a concept, and asks for a word that was taken out of a sentence. Deterministic."""

    async def finer(self, name: str, passages: Sequence[Passage]) -> list[str]:
        """Words of the passages, the more often the earlier."""
        known = same_concept(name).split()
        counted = Counter(word.casefold() for passage in passages for word in WORD.findall(passage.text)
                          if len(word) > 4 and word.casefold() not in _COMMON and same_concept(word) not in known)
        return [word for word, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]

    async def write(self, keywords: Sequence[str], passage: Passage) -> tuple[str, str] | None:
        """The sentence with a keyword, without its rarest long word or its number."""
        for sentence in re.split(r"(?<=[.!?;])\s+", passage.text):
            if not 40 <= len(sentence) <= 400 or not any(keyword.casefold() in sentence.casefold() for keyword in keywords):
                continue
            numbers = re.findall(r"(?<![\w.])\d[\d.,]*\d|(?<![\w.])\d(?![\w.])", sentence)
            words = {word for word in WORD.findall(sentence) if len(word) > 5 and word.casefold() not in _COMMON
                     and not any(same_concept(word) in same_concept(keyword) for keyword in keywords)}
            for answer in (*numbers, *sorted(words, key=lambda word: (-len(word), word))):
                gap = re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", "____", sentence)
                if gap.count("____") == 1:
                    return f"In a sentence of the documents one word or number is missing. Which? “{gap}”", answer
        return None


class Asked:
    """Expands and writes through a policy; an answer out of form is nothing. Raises `PolicyError` where it cannot be reached."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._number = 0

    async def finer(self, name: str, passages: Sequence[Passage]) -> list[str]:
        """What the policy names."""
        texts = "\n".join(passage.text[:400] for passage in passages[:4])
        value = await self._asked(f"Name up to ten finer concepts of “{name}” that these texts deal with, as a JSON list of short names."
                                  f"\n\n{texts}")
        return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []

    async def write(self, keywords: Sequence[str], passage: Passage) -> tuple[str, str] | None:
        """What the policy writes."""
        value = await self._asked(f"Write one question that only this passage answers, about {', '.join(keywords)}, as JSON: "
                                  '{"question": "…", "answer": "…"}. The answer is a few words that stand in the passage literally.\n\n'
                                  f"{passage.text}")
        if isinstance(value, Mapping) and isinstance(value.get("question"), str) and isinstance(value.get("answer"), str):
            return value["question"], value["answer"].strip()
        return None

    async def _asked(self, text: str) -> Any:
        self._number += 1
        session = f"synthesis-{self._number}"
        conversation = Conversation(messages=(Message(role="user", content=(Text(text=text),)),))
        try:
            reply = (await self.policy.complete(session, conversation, Sampling())).message.text
        finally:
            await self.policy.close(session)
        fenced = _FENCE.findall(reply)
        try:
            return json.loads(fenced[-1] if fenced else reply)
        except (ValueError, RecursionError):
            return None
