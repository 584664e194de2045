"""Teachers behind an address: what they say is what the model says, ids mean the same to both sides, and nothing is guessed."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from posttraining_fixtures import network, save, serving

from gnomon.data.tokenizer import Tokenizer, train_tokenizer
from gnomon.errors import ConfigError, PolicyError
from gnomon.posttrain.endpoint import Endpoint, EndpointConfig
from gnomon.posttrain.learner import Document
from gnomon.posttrain.remote_teacher import RemoteTeacher
from gnomon.posttrain.teachers import TeacherConfig, Teachers

CELLS = (("general", "low"), ("general", "max"))
DOCUMENTS = [Document(token_ids=(5, 77, 300, 399, 2, 2, 41), mask=(False, False, True, True, False, True, True)),
             Document(token_ids=(9, 9), mask=(False, True)), Document(token_ids=(1, 2, 3), mask=(False, False, False))]


@pytest.fixture(scope="module")
def folder(vocabulary: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the student's tokenizer is."""
    where = tmp_path_factory.mktemp("student") / "tokenizer"
    vocabulary.save(where)
    return where


@pytest.fixture(scope="module")
def url(vocabulary: Tokenizer) -> Iterator[str]:
    """A teacher that is served."""
    with serving(network(vocabulary.vocab_size, 7), vocabulary) as address:
        yield address


def expected(document: Document, vocabulary: Tokenizer) -> list[float]:
    """The teacher's log-probabilities, one forward pass for each place, without a batch."""
    model = network(vocabulary.vocab_size, 7).eval()
    found = []
    with torch.no_grad():
        for place, learnt in enumerate(document.mask):
            if learnt:
                logits = model.head(model.hidden(torch.tensor([document.token_ids[:place]])))[0, -1].double()
                found.append((logits - logits.logsumexp(-1))[document.token_ids[place]].item())
    return found


def test_a_served_teacher_says_what_the_model_says(url: str, folder: Path, vocabulary: Tokenizer, tmp_path: Path) -> None:
    """Beside a teacher that is here, each for its own cell; what was said once is not asked again."""
    here = save(network(vocabulary.vocab_size, 8), tmp_path / "here")
    bench = Teachers((TeacherConfig(domain="general", effort="low", endpoint=EndpointConfig(url=url)),
                      TeacherConfig(domain="general", effort="max", run=here)), network(vocabulary.vocab_size).config, tokenizer=folder)
    said = bench.score([(CELLS[0], each) for each in DOCUMENTS])
    for document, word in zip(DOCUMENTS, said, strict=True):
        torch.testing.assert_close(word.logprobs.double(), torch.tensor(expected(document, vocabulary), dtype=torch.float64),
                                   atol=1e-4, rtol=0)
    other = bench.score([(CELLS[1], DOCUMENTS[0])])[0]
    assert (other.logprobs - said[0].logprobs).abs().max() > 0.01, "another cell, another teacher"
    bench.score([(CELLS[0], each) for each in DOCUMENTS])
    assert bench.hits == len(DOCUMENTS)
    with pytest.raises(ConfigError, match="no teacher for coding/low"):
        bench.score([(("coding", "low"), DOCUMENTS[0])])
    for mode in ("topk", "full"):
        with pytest.raises(ConfigError, match="'mode'"):
            bench.score([(CELLS[0], DOCUMENTS[0])], mode)  # type: ignore[arg-type]


def test_ids_mean_the_same_to_both(url: str, folder: Path, tmp_path: Path) -> None:
    """By the server's fingerprint, by how it encodes, by what the recipe states; where nothing tells, nothing is asked."""
    other = train_tokenizer(["another text entirely, zebras quiz vexing jugs " * 30, json.dumps(list(range(3000)))], 400)
    other.save(tmp_path / "other")
    endpoint = Endpoint(EndpointConfig(url=url))
    endpoint.check(folder)
    with pytest.raises(ConfigError, match="another tokenizer"):
        endpoint.check(tmp_path / "other")
    encodes = httpx.Client(transport=httpx.MockTransport(OtherServer(Tokenizer.load(folder))))  # and tells no fingerprint
    encoding = Endpoint(EndpointConfig(url="http://other/v1", retries=0), encodes)
    encoding.check(folder)
    with pytest.raises(ConfigError, match="another tokenizer"):
        encoding.check(tmp_path / "other")
    endpoint.told = {"id": endpoint.model, "vocab_size": 401}
    with pytest.raises(ConfigError, match="'vocab_size' 401"):
        endpoint.check(folder)
    with pytest.raises(ConfigError, match="no tokenizer here"):
        endpoint.check(None)
    silent = httpx.MockTransport(lambda request: httpx.Response(200 if request.url.path.endswith("models") else 404,
                                                                json={"data": [{"id": "x"}]}))
    config = EndpointConfig(url="http://silent/v1", retries=0)
    with pytest.raises(ConfigError, match="state its fingerprint"):
        Endpoint(config, httpx.Client(transport=silent)).check(folder)
    stated = replace(config, tokenizer=Tokenizer.load(folder).fingerprint)
    Endpoint(stated, httpx.Client(transport=silent)).check(folder)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Endpoint(replace(config, tokenizer="f00"), httpx.Client(transport=silent)).check(folder)


class OtherServer:
    """Answers as vLLM does: tables by id with the prompt's own id and the likeliest. `spoil` changes a choice before it is sent."""

    def __init__(self, vocabulary: Tokenizer, spoil: Any = lambda choice: choice) -> None:
        self.model, self.vocabulary, self.spoil, self.bodies = network(vocabulary.vocab_size, 7).eval(), vocabulary, spoil, []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """A request."""
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "theirs"}]})
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": self.vocabulary.encode(body["prompt"])})
        self.bodies.append(body)
        choices = [self.spoil({"index": i, "text": "x", "prompt_logprobs": self._places(prompt, body["prompt_logprobs"])})
                   for i, prompt in enumerate(body["prompt"])]
        return httpx.Response(200, json={"choices": choices[::-1]})

    def _places(self, prompt: list[int], k: int) -> list[Any]:
        with torch.no_grad():
            scores = self.model.head(self.model.hidden(torch.tensor([prompt])))[0].float().log_softmax(-1)
        places: list[Any] = [None]
        for place, token in enumerate(prompt[1:]):
            ids = {token, *scores[place].topk(k).indices.tolist()} if k else {token}
            places.append({str(i): {"logprob": scores[place, i].item(), "rank": 1, "decoded_token": "?"} for i in ids})
        return places


def test_a_server_of_another_kind(folder: Path, vocabulary: Tokenizer) -> None:
    """`prompt_logprobs`, with the likeliest ids too; choices may come in any order."""
    server = OtherServer(vocabulary)
    config = EndpointConfig(url="http://other/v1", server="vllm")
    teacher = RemoteTeacher(Endpoint(config, httpx.Client(transport=httpx.MockTransport(server))), folder)
    for document, word in zip(DOCUMENTS, teacher.ask(DOCUMENTS, "topk", 3, 1.0), strict=True):
        own = torch.tensor(expected(document, vocabulary), dtype=torch.float64)
        torch.testing.assert_close(word.logprobs.double(), own, atol=1e-4, rtol=0)
        assert word.scores is not None and word.ids is not None and word.ids.shape[0] == len(own) == word.scores.shape[0]
        assert all(row == sorted(row, reverse=True) for row in word.scores.tolist())
    assert server.bodies[0]["max_tokens"] == 1 and server.bodies[0]["prompt_logprobs"] == 3
    with pytest.raises(ConfigError, match="temperature"):
        teacher.ask(DOCUMENTS, "sampled", 0, 0.7)


@pytest.mark.parametrize("spoil", [
    lambda choice: {**choice, "prompt_logprobs": choice["prompt_logprobs"][1:]}, lambda choice: {**choice, "prompt_logprobs": None},
    lambda choice: {**choice, "prompt_logprobs": [choice["prompt_logprobs"][-1], *choice["prompt_logprobs"][1:]]},
    lambda choice: {**choice, "prompt_logprobs": [None, *({"7": {"logprob": -1.0}} for _ in choice["prompt_logprobs"][1:])]},
    lambda choice: {**choice, "prompt_logprobs": [None, *({name: {"logprob": 0.5} for name in place} for place in
                                                          choice["prompt_logprobs"][1:])]},
], ids=["one short", "none", "shifted", "other ids", "positive"])
def test_what_is_not_an_answer_is_an_error(spoil: Any, folder: Path, vocabulary: Tokenizer) -> None:
    server = OtherServer(vocabulary, spoil)
    endpoint = Endpoint(EndpointConfig(url="http://other/v1", server="vllm"), httpx.Client(transport=httpx.MockTransport(server)))
    with pytest.raises(PolicyError, match="no log-probabilities of the ids"):
        RemoteTeacher(endpoint, folder).ask(DOCUMENTS[:1], "sampled", 0, 1.0)


def test_what_may_pass_is_tried_again(folder: Path, vocabulary: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is busy is asked again, one that refuses is not."""
    monkeypatch.setattr("gnomon.posttrain.endpoint.PAUSE", 0.0)
    good, statuses = OtherServer(vocabulary), [503, 429]

    def busy(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions" and statuses:
            return httpx.Response(statuses.pop(0), text="later")
        return good(request)

    endpoint = Endpoint(EndpointConfig(url="http://other/v1", server="vllm"), httpx.Client(transport=httpx.MockTransport(busy)))
    teacher = RemoteTeacher(endpoint, folder)
    assert math.isfinite(teacher.ask(DOCUMENTS[:1], "sampled", 0, 1.0)[0].logprobs.sum()) and not statuses
    statuses += [400]
    with pytest.raises(PolicyError, match="400"):
        teacher.ask(DOCUMENTS[:1], "sampled", 0, 1.0)
    with pytest.raises(ConfigError, match="neither 'run' and 'endpoint'"):
        TeacherConfig(domain="a", effort="b")
