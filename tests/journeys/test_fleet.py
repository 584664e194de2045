"""`gnomon serve --replicas 2`: a conversation stays with its replica, and goes on when that one is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import exported
import pytest

from gnomon.data.tokenizer import train_tokenizer
from gnomon.model.weights import save_pretrained

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
psutil = pytest.importorskip("psutil", reason="psutil is not installed")
PATIENCE = 120


@pytest.fixture
def fleet(tmp_path):
    """The address of a fleet, and its processes."""
    from gnomon.serve.fleet_processes import free_port

    tokenizer = train_tokenizer([Path(__file__).read_text(encoding="utf-8")], 320)
    fields = {"bos_token_id": 288, "eos_token_id": 290, "pad_token_id": 319, "num_hidden_layers": 4}
    lists = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4,
             "gate_lower_bound": -5.0, "use_full_rank_gate": True}
    save_pretrained(exported.build("kimi_k3", linear_attn_config=lists, **fields), tmp_path / "tiny", tokenizer=tokenizer)
    port = free_port()
    command = [sys.executable, "-m", "gnomon", "serve", str(tmp_path / "tiny"), f"port={port}", "log=none", "page=false",
               "cache.memory_bytes=67108864", "drain_seconds=2", "--replicas", "2"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(PATIENCE)
        _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        for child in alive:
            child.kill()
    assert not alive, "a replica stayed behind"


def healthy(url, process, count):
    """Wait until so many replicas answer."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the fleet ended with {process.returncode}"
        try:
            states = httpx.get(f"{url}/health", timeout=10).json()["replicas"].values()
            if sum(state["healthy"] for state in states) == count:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{count} replicas did not answer within {PATIENCE} s")


def ask(url, **fields):
    body = {"model": "tiny", "prompt": "def f(x): return x  # " * 20, "max_tokens": 4, "temperature": 0, "user": "someone"}
    answer = httpx.post(f"{url}/v1/completions", json=body | fields, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.slow
def test_a_conversation_survives_its_replica(fleet):
    url, process = fleet
    healthy(url, process, 2)
    first, again = ask(url), ask(url)
    assert again.headers["x-gnomon-replica"] == first.headers["x-gnomon-replica"]
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)]
    assert cached[0] == 0 < cached[1], "the second turn found what the first left"

    victim = next(child for child in psutil.Process(process.pid).children() if serves(child, first, url))
    victim.send_signal(signal.SIGKILL)
    other = ask(url)
    assert other.headers["x-gnomon-replica"] != first.headers["x-gnomon-replica"]
    assert other.json()["choices"][0]["text"] == first.json()["choices"][0]["text"], "read again, the same answer"
    healthy(url, process, 2)
    assert ask(url).headers["x-gnomon-replica"] == first.headers["x-gnomon-replica"], "it is home again"


def serves(child, answer, url):
    """Whether a process is the replica that gave an answer: replicas are started in the order of their names."""
    children = sorted(psutil.Process(child.ppid()).children(), key=lambda process: process.create_time())
    return children.index(child) == int(answer.headers["x-gnomon-replica"].rpartition("-")[2])
