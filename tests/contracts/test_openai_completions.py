"""OpenAI's plain completions: prompts of four kinds, log-probabilities, and what is refused."""

import json
from typing import Any

import pytest

from gnomon.data.chat import Reply, TextDelta
from gnomon.data.dialects import openai_completions
from gnomon.data.dialects.asked import Asked, Choice, Cost, Ending, Head, Refused, TokenLogprob

HEAD = Head(id="x1", created=5, model="m")
REPLY = Reply(reasoning="", text="abü", tool_calls=(), complete=True)
COST = Cost(prompt_tokens=2, output_tokens=3)


def read(**fields: Any) -> Asked:
    return openai_completions.read({"model": "m", "prompt": "hi"} | fields)


@pytest.mark.parametrize(("prompt", "prompts"), [
    ("hi", ("hi",)), ("", ("",)), ([1, 2], ((1, 2),)), (["a", "b"], ("a", "b")), ([[1], [2, 3]], ((1,), (2, 3))),
])
def test_prompts(prompt: Any, prompts: tuple[Any, ...]) -> None:
    asked = read(prompt=prompt)
    assert asked.prompts == prompts and asked.conversation is None and asked.max_tokens == 16


@pytest.mark.parametrize(("fields", "place"), [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": 3}, "prompt"), ({"prompt": ["a", 3]}, "prompt[1]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a"] * 129}, "prompt"), ({"prompt": [True]}, "prompt[0]"), ({"max_tokens": 0}, "max_tokens"),
    ({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"logprobs": 21}, "logprobs"), ({"messages": []}, "messages"),
])
def test_what_is_refused(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(Refused) as error:
        read(**fields)
    assert error.value.field == place


def test_scoring_a_prompt_needs_no_token() -> None:
    assert read(echo=True, max_tokens=0, logprobs=1).max_tokens == 0


def test_whole_and_streamed_say_the_same() -> None:
    tokens = [TokenLogprob(id=7, raw=b"ab", logprob=None), TokenLogprob(id=8, raw="ü".encode(), logprob=-0.5,
                                                                        top=(TokenLogprob(id=9, raw=b"x", logprob=-1.0),))]
    asked = read(stream=True, logprobs=1, stream_options={"include_usage": True})
    ending = Ending(reason="stop", stop_string="!")
    body = openai_completions.whole(asked, HEAD, [Choice(index=0, reply=REPLY, ending=ending, logprobs=tuple(tokens))], COST)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abü", "stop", "!")
    assert choice["logprobs"] == {"tokens": ["ab", "ü"], "token_logprobs": [None, -0.5], "top_logprobs": [None, {"x": -1.0}],
                                  "text_offset": [0, 2], "token_ids": [7, 8]}
    stream = openai_completions.stream(asked, HEAD)
    sent = [*stream.start(COST), *stream.delta(0, TextDelta(text="ab"), tokens[:1]), *stream.delta(0, TextDelta(text="ü"), tokens[1:]),
            *stream.finish(0, REPLY, ending), *stream.end(COST)]
    chunks = [json.loads(json.dumps(event.data)) for event in sent[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == "abü"
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [2] and chunks[2]["choices"][0]["stop_reason"] == "!"
    assert chunks[3]["usage"]["total_tokens"] == 5 and sent[-1].data == "[DONE]"
