"""`gnomon verify URL` against scripted servers: right ones pass, wrong caches are caught, a server without log-probabilities is told."""

import hashlib
import json
import math

import httpx
import pytest

from gnomon.cli import main
from gnomon.errors import ConfigError, DataError
from gnomon.serve.verify import Ask, passed, verify
from gnomon.serve.verify_checks import shared_checks
from gnomon.serve.verify_remote import RemoteSubject


class Server:
    """A server whose text is a function of the whole prompt; `fault` spoils what follows a prompt with a known beginning."""

    def __init__(self, *, chat=False, refuses=(), fault=None, logprobs=True, counts=True):
        self.chat, self.refuses, self.fault, self.logprobs, self.counts = chat, refuses, fault, logprobs, counts
        self.seen, self.bodies = [], []

    def __call__(self, request):
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "scripted"}]})
        body = json.loads(request.content)
        if any(name in body for name in self.refuses) or request.url.path.endswith("/chat/completions") != self.chat:
            return httpx.Response(404 if self.chat else 400, json={"error": {"message": "no"}})
        self.bodies.append(body)
        prompt = body["messages"][0]["content"] if self.chat else body["prompt"]
        use, salt = body.get("cache_prompt", True), body.get("cache_salt")
        known = max((_common(prompt, other) for other, under in self.seen if under == salt), default=0) if use else 0
        if use:
            self.seen.append((prompt, salt))
        told = prompt if self.fault is None or not known else self.fault(prompt, known)
        return httpx.Response(200, json=self._answer(told, body["max_tokens"], known))

    def _answer(self, prompt, count, known):
        entries = []
        for step in range(count):
            digest = hashlib.sha256(f"{prompt}{[e['token'] for e in entries]}{step}".encode()).digest()
            top = [{"token": f"w{b % 50} ", "logprob": -0.5 - 0.3 * i} for i, b in enumerate(digest[:3])]
            entries.append({**top[0], "top_logprobs": top})
        chat = {"content": entries}
        plain = {"tokens": [e["token"] for e in entries], "token_logprobs": [e["logprob"] for e in entries],
                 "top_logprobs": [{t["token"]: t["logprob"] for t in reversed(e["top_logprobs"])} for e in entries]}
        usage = {"prompt_tokens_details": {"cached_tokens": known}} if self.counts else {}
        logprobs = (chat if self.chat else plain) if self.logprobs else None
        return {"choices": [{"text": "".join(plain["tokens"]), "logprobs": logprobs}], "usage": usage}


def _common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def subject(server, **options):
    client = httpx.Client(transport=httpx.MockTransport(server), base_url="http://scripted/v1")
    return RemoteSubject("http://scripted/v1", client=client, **options)


@pytest.mark.parametrize("options", [{}, {"chat": True}, {"refuses": ("cache_prompt",)}, {"refuses": ("cache_salt", "cache_prompt")},
                                     {"counts": False}], ids=["plain", "chat", "salt only", "no way", "no counts"])
def test_a_right_server_passes(options):
    verdicts = verify(shared_checks(subject(Server(**options)), 12))
    assert passed(verdicts), [(v.name, v.note) for v in verdicts]
    skipped = ["speculation"] if options.get("refuses") == ("cache_prompt",) else ["salt", "speculation"]
    assert [v.name for v in verdicts if v.status == "not applicable"] == skipped


FAULTS = {
    "continues another text": (lambda prompt, known: prompt[:known // 2] + prompt[known:], ["resume", "regenerate", "fork", "edited"]),
    "the end is not seen": (lambda prompt, known: prompt[:known], ["resume", "fork"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_cache_is_caught(name):
    """Also through a server that gives no way to keep its cache out: the first sight is the reference."""
    fault, meant = FAULTS[name]
    for refuses in ((), ("cache_salt", "cache_prompt")):
        verdicts = {v.name: v.status for v in verify(shared_checks(subject(Server(fault=fault, refuses=refuses)), 12))}
        failed = [check for check, status in verdicts.items() if status == "fail"]
        assert set(meant) <= set(failed) if not refuses else failed


def test_the_cache_is_kept_out_as_the_server_allows():
    server = Server(refuses=("cache_prompt",))
    remote = subject(server)
    assert remote.way == "cache_salt"
    remote.ask([Ask(prompt="x")])
    assert "cache_salt" not in server.bodies[-1]
    remote.reference(Ask(prompt="x"))
    assert "cache_salt" in server.bodies[-1]
    assert remote.text(30, 1) == remote.text(30, 1) != subject(server).text(30, 1), "each run brings texts of its own"


def test_what_cannot_be_verified_is_told(capsys):
    with pytest.raises(DataError, match="log-probabilities"):
        subject(Server(logprobs=False))
    with pytest.raises(ConfigError, match="does not list its models"):
        RemoteSubject("http://127.0.0.1:9/v1")
    assert main(["verify", "http://127.0.0.1:9/v1"]) == 2
    assert "does not list its models" in capsys.readouterr().err
    assert not math.isnan(subject(Server()).bound)
