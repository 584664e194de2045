"""`gnomon serve` and `gnomon chat` as people use them: a trained run, the official clients, a real engine, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gnomon import config as toml
from gnomon.serve.assembly import served
from gnomon.serve.server import Background, listen
from gnomon.serve.service import Service
from gnomon.serve.settings import ServeSettings
from gnomon.train.recipe import TrainRecipe

HELLO: Any = [{"role": "user", "content": "Where do options come from? " * 20}]
GNOMON = [sys.executable, "-m", "gnomon"]


@pytest.fixture(scope="module")
def real(base: TrainRecipe) -> Iterator[tuple[Service, str]]:
    """The small run, served."""
    settings = toml.from_dict(ServeSettings, {"log": "none", "name": "small", "cache": {"memory_bytes": 64 << 20}})
    with served(base.run, settings) as service, Background(service) as url:
        yield service, url


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_openai_ask_again_and_fork(real: tuple[Service, str]) -> None:
    api = client(real[1]).chat.completions
    options: Any = {"model": "small", "max_tokens": 24, "seed": 3, "temperature": 0.7}
    first = api.create(messages=HELLO, **options)
    again = api.create(messages=HELLO, **options)
    text = [answer.choices[0].message.model_dump() for answer in (first, again)]
    assert text[0] == text[1]  # cached and not, the same tokens
    assert first.usage and again.usage and again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 64 > 0
    streamed = api.create(messages=HELLO, stream=True, **options)
    pieces = [chunk.choices[0].delta for chunk in streamed if chunk.choices]
    assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == text[0].get("reasoning_content", "")
    fork: Any = [*HELLO, {"role": "assistant", "content": "From argparse."}, {"role": "user", "content": "And from where else?"}]
    forked = api.create(messages=fork, **options)
    assert forked.usage and forked.usage.prompt_tokens_details and (forked.usage.prompt_tokens_details.cached_tokens or 0) > 64
    several = api.create(messages=HELLO, n=3, **options)
    assert several.choices[0].message.model_dump() == text[0] and len(several.choices) == 3


def test_openai_completions_and_responses(real: tuple[Service, str]) -> None:
    api = client(real[1])
    greedy: Any = {"model": "small", "prompt": "import ", "temperature": 0, "max_tokens": 12}
    whole = api.completions.create(**greedy, logprobs=2)
    assert whole.choices[0].logprobs and len(whole.choices[0].logprobs.token_logprobs or ()) == 12
    assert "".join(chunk.choices[0].text for chunk in api.completions.create(**greedy, stream=True)) == whole.choices[0].text
    assert api.completions.create(**greedy | {"stop": whole.choices[0].text[2:4]}).choices[0].text == whole.choices[0].text[:2]
    reply = api.responses.create(model="small", input="hello", temperature=0, max_output_tokens=8)
    assert reply.status == "incomplete" and reply.usage and reply.usage.output_tokens == 8
    events = list(api.responses.create(model="small", input="hello", temperature=0, max_output_tokens=8, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"


def test_structured_output_is_what_the_schema_says(real: tuple[Service, str]) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["ok", "n"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options: Any = {"model": "small", "messages": HELLO, "reasoning_effort": "none", "max_tokens": 120}
    answer = client(real[1]).chat.completions.create(response_format=wanted, **options)
    found = json.loads(answer.choices[0].message.content or "")
    assert isinstance(found["ok"], bool) and 0 <= found["n"] <= 99 and answer.choices[0].finish_reason == "stop"
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?<=a)b"}}}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client(real[1]).chat.completions.create(model="small", messages=HELLO, response_format=bad)


def test_anthropic(real: tuple[Service, str]) -> None:
    greedy: Any = {"temperature": 0}
    api = anthropic.Anthropic(base_url=real[1], api_key="none", max_retries=0, timeout=60)
    counted = api.messages.count_tokens(model="small", messages=[{"role": "user", "content": "hello"}])
    whole = api.messages.create(model="small", extra_body=greedy, max_tokens=8, messages=[{"role": "user", "content": "hello"}])
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == counted.input_tokens and whole.usage.output_tokens == 8
    assert whole.stop_reason == "max_tokens"
    with api.messages.stream(model="small", extra_body=greedy, max_tokens=8, messages=[{"role": "user", "content": "hello"}]) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 8
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(model="claude", max_tokens=8, messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(anthropic.BadRequestError, match="context"):
        api.messages.create(model="small", max_tokens=10**9, messages=[{"role": "user", "content": "hello"}])


def test_clients_that_leave_give_the_memory_back(real: tuple[Service, str]) -> None:
    service, url = real
    for _ in range(5):
        body = {"model": "small", "messages": HELLO, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
    end = time.monotonic() + 20
    while service.engine.stats().running or service.admission.running:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        time.sleep(0.02)
    assert service.engine.stats().cache.live_bytes == 0  # type: ignore[attr-defined]


def start(run: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*GNOMON, "serve", str(run), "port=0", *words], stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def end(process: subprocess.Popen[str]) -> None:
    """Leave nothing of it."""
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "http://" in line:
            return "http" + line.partition("http")[2].split()[0]
    raise AssertionError("it did not start")


def test_the_command_serves_and_ends_in_order(base: TrainRecipe) -> None:
    process = start(base.run, "name=mine", GNOMON_API_KEYS="me:secret-key")
    try:
        url = url_of(process)
        assert httpx.get(url + "/health").json()["model"] == "mine" and httpx.get(url + "/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret-key"}
        body = {"model": "mine", "prompt": "import ", "max_tokens": 200, "stream": True, "temperature": 0, "logit_bias": {}}
        with httpx.stream("POST", url + "/v1/completions", json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)  # who is inside may finish
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        record = next(json.loads(line) for line in process.stderr.read().splitlines() if '"/v1/completions"' in line)
        assert record["key"] == "me" and record["status"] == 200 and record["output_tokens"] > 0 and "secret" not in json.dumps(record)
    finally:
        end(process)


def test_a_port_in_use_is_one_line(base: TrainRecipe) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = subprocess.run([*GNOMON, "serve", str(base.run), f"port={port}"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and f"127.0.0.1:{port}: the port is in use" in result.stderr


@pytest.mark.parametrize(("words", "said"), [
    (("host=0.0.0.0",), "can be reached from other machines"), (("prot=1",), "unknown key"), (("limits.max_tokens=0",), "positive number"),
    (("access.keys_file=nowhere",), "cannot be read"),
])
def test_what_cannot_be_served_is_one_line(
        base: TrainRecipe, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gnomon.cli import main

    assert main(["serve", str(base.run), *words]) == 2
    assert said in capsys.readouterr().err


def test_chat_in_the_terminal(real: tuple[Service, str], base: TrainRecipe) -> None:
    command = [*GNOMON, "chat", real[1], "--tokens", "8", "--temperature", "0", "--effort", "none"]
    result = subprocess.run(command, input="hello\n/again\n/help\n/nothing\n", capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.count("8 out") == 2 and "/effort" in result.stdout and "there is no /nothing" in result.stdout
    command = [*GNOMON, "chat", str(base.run), "--tokens", "4", "--temperature", "0"]
    inside = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=60, check=True)
    assert "4 out" in inside.stdout
    lost = subprocess.run([*GNOMON, "chat", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False)
    assert lost.returncode == 2 and "no server answers" in lost.stderr


def test_show_explains_the_settings(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gnomon.cli import main

    assert main(["show", str(repository / "recipes" / "serve.toml"), "port=9"]) == 0
    assert "port = 9  # port to listen on" in capsys.readouterr().out


def test_a_signal_while_nobody_asks(base: TrainRecipe) -> None:
    process = start(base.run, "log=none")
    try:
        url_of(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        end(process)
