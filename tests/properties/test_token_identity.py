"""No token is lost or made up: over tool conversations in every dialect, what is on record is what was sent to the model and sampled.

The spy samples ids as no tokenizer writes them, in random pieces, and keeps its own log; a client of each dialect talks through the
gateway's own reading and writing, sends its history back as such clients do, and sometimes changes it.
"""

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.agent import gateway_speech as speech
from gnomon.agent.gateway_visit import Visit
from gnomon.agent.ledger import Ledger
from gnomon.agent.policy import Completion, Sampling, Spent
from gnomon.agent.record import Recorder
from gnomon.agent.trajectory import Span, Trajectory
from gnomon.data.chat import chat_format
from gnomon.data.messages import Conversation
from gnomon.data.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))], 600)
CHAT = chat_format(TOKENIZER)
OPEN, CLOSE, SEP, END = (TOKENIZER.special_ids[name] for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))
WORDS = ["look", " at ", "<|open|>", "<|end_of_msg|>", "\n", "é☃", '"', "{", "&amp;", " the file", "  ", "<|close|>think<|sep|>"]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "number"}}}


class Spy:
    """A model: says random things in random pieces of text, and logs (ids read, ids sampled, log-probabilities)."""

    name = "spy"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = Ledger(CHAT)
        self.log: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []

    async def complete(self, session: str, conversation: Conversation, sampling: Sampling) -> Completion:
        prompt = self.ledger.prepare(session, conversation)
        ids = tuple(self._speech(conversation.thinking))
        logprobs = tuple(-self.random.random() for _ in ids)
        self.log.append((prompt.token_ids, ids, logprobs))
        reply = self.ledger.took(session, prompt, ids)
        assert reply.complete
        span = Span(token_ids=ids, logprobs=logprobs, loss_mask=(True,) * len(ids), policy_version=1)
        return Completion(message=reply.message, prompt_ids=prompt.token_ids, sampled=span, spent=Spent(output_tokens=len(ids)))

    async def close(self, session: str) -> None:
        self.ledger.forget(session)

    def _text(self, text: str) -> list[int]:
        """Text in pieces that a tokenizer would have joined: nothing that was sampled is what encoding its text gives."""
        ids: list[int] = []
        while text:
            cut = self.random.randint(1, len(text))
            ids += TOKENIZER.encode(text[:cut])
            text = text[cut:]
        return ids

    def _words(self, most: int) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randint(0, most)))

    def _tag(self, bracket: int, text: str) -> list[int]:
        return [bracket, *TOKENIZER.encode(text), SEP]

    def _speech(self, thinking: bool) -> list[int]:
        ids = [*self._text(self._words(4)), *self._tag(CLOSE, "think"), *self._tag(OPEN, "response")] if thinking else []
        calls = self.random.choice([0, 1, 1, 2])
        said = self._words(3) or ("" if calls else "so")  # an answer without a word is no item of the responses, and so is lost there
        ids += [*self._text(said), *self._tag(CLOSE, "response")]
        if calls:
            ids += self._tag(OPEN, "tools")
            for index in range(1, calls + 1):
                ids += self._tag(OPEN, f'call tool="bash" index="{index}"')
                ids += self._tag(OPEN, 'argument key="command" type="string"')
                ids += [*self._text(self._words(3)), *self._tag(CLOSE, "argument")]
                if self.random.random() < 0.5:
                    number = self.random.choice(["1", "1.0", "-2.50", "[1, 2]", '{"b": 1,  "a": null}'])
                    ids += [*self._tag(OPEN, 'argument key="n" type="number"'), *self._text(number), *self._tag(CLOSE, "argument")]
                ids += self._tag(CLOSE, "call")
            ids += self._tag(CLOSE, "tools")
        return [*ids, *self._tag(CLOSE, "message"), END]


class Client:
    """A program that speaks one dialect, and keeps its history as it was told: JSON in, JSON out, written anew on the way."""

    def __init__(self, path: str, seed: int) -> None:
        self.path, self.dialect = path, speech.PATHS[path]
        self.random = random.Random(seed)
        self.history: list[Any] = [{"role": "user", "content": "begin"}]

    def body(self) -> dict[str, Any]:
        """What it sends."""
        history = json.loads(json.dumps(self.history))
        if self.path.endswith("completions"):
            tool = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
            return {"model": "m", "messages": history, "tools": [tool]}
        if self.path.endswith("responses"):
            return {"model": "m", "input": history, "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}]}
        return {"model": "m", "max_tokens": 9999, "messages": history, "tools": [{"name": "bash", "input_schema": SCHEMA}],
                "thinking": {"type": "enabled", "budget_tokens": 1024}}

    def hear(self, answer: dict[str, Any]) -> None:
        """Put an answer into the history, and what its calls gave, or what a user says next."""
        text = self.random.choice(["", "4\n", "<|sep|>", "result " * 5])
        if self.path.endswith("completions"):
            message = answer["choices"][0]["message"]
            self.history.append(message)
            calls = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in message.get("tool_calls") or ()]
        elif self.path.endswith("responses"):
            self.history += answer["output"]
            calls = [{"type": "function_call_output", "call_id": item["call_id"], "output": text}
                     for item in answer["output"] if item["type"] == "function_call"]
        else:
            self.history.append({"role": "assistant", "content": answer["content"]})
            results = [{"type": "tool_result", "tool_use_id": block["id"], "content": text}
                       for block in answer["content"] if block["type"] == "tool_use"]
            calls = [{"role": "user", "content": results}] if results else []
        self.history += calls or [{"role": "user", "content": f"go on {text}"}]

    def meddle(self) -> None:
        """Change what was said before: strip the thinking, or another beginning."""
        if self.random.random() < 0.5:
            self.history[0] = {"role": "user", "content": f"begin anew {self.random.random()}"}
            return
        for item in self.history:
            item.pop("reasoning_content", None)
            if isinstance(item.get("content"), list):
                item["content"] = [block for block in item["content"] if block.get("type") != "thinking"]
        self.history = [item for item in self.history if item.get("type") != "reasoning" and item.get("content") != []]


def talked(path: str, seed: int, turns: int, meddling: bool) -> tuple[Spy, Trajectory, list[int]]:
    """One conversation: the spy, the record, and the turns before which the client changed its history."""
    spy, client = Spy(seed), Client(path, seed)
    recorder = Recorder(spy, Trajectory(id="t", task_id="t"))
    visit = Visit(recorder, None, None)
    changed: list[int] = []

    async def run() -> None:
        for turn in range(turns):
            if meddling and turn and client.random.random() < 0.15:
                before = copy.deepcopy(client.history)
                client.meddle()
                changed.extend([turn] if client.history != before else [])
            asked = speech.read(client.dialect, client.body())
            completion = await visit.answer(asked, f"{turn}", False)
            client.hear(json.loads(json.dumps(speech.said(client.dialect, asked, completion))))

    asyncio.run(run())
    return spy, recorder.trajectory, changed


def check(path: str, seed: int, turns: int, meddling: bool) -> None:
    """What is on record is what the spy logged; a conversation that nobody changed is one line; training sees each token once."""
    spy, trajectory, changed = talked(path, seed, turns, meddling)
    assert len(trajectory.turns) == len(spy.log) == turns
    for index, (read, sampled, logprobs) in enumerate(spy.log):
        turn = trajectory.turns[index]
        assert trajectory.token_ids(index) == read + sampled
        assert turn.spans[-1].token_ids == sampled and turn.spans[-1].logprobs == logprobs and all(turn.spans[-1].loss_mask)
        assert not any(span.sampled for span in turn.spans[:-1])
        assert turn.parent == (index - 1 if index else None) or changed
    masked = [token for sample in trajectory.samples() for token, keep in zip(sample.token_ids, sample.loss_mask, strict=True) if keep]
    assert sorted(masked) == sorted(token for _, sampled, _ in spy.log for token in sampled)
    if not changed:
        [sample] = trajectory.samples()
        assert sample.token_ids == spy.log[-1][0] + spy.log[-1][1]


@settings(max_examples=24)
@given(path=st.sampled_from(sorted(speech.PATHS)), seed=st.integers(0, 2**32), meddling=st.booleans())
def test_what_is_stored_is_what_was_sent_and_sampled(path: str, seed: int, meddling: bool) -> None:
    check(path, seed, 20, meddling)


@pytest.mark.slow
@settings(max_examples=1000)
@given(path=st.sampled_from(sorted(speech.PATHS)), seed=st.integers(0, 2**32), meddling=st.booleans())
def test_over_a_thousand_conversations(path: str, seed: int, meddling: bool) -> None:
    check(path, seed, 20, meddling)
