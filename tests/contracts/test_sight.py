"""Images in prompts: the engine says what the plain model says, the cache knows a picture by what it shows, nothing is read unasked."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from inference_models import config, tokens
from PIL import Image as Picture

from gnomon.data.chat import chat_format
from gnomon.data.dialects.asked import Refused
from gnomon.data.images import prepare
from gnomon.data.messages import Conversation, Image, Message, Text
from gnomon.data.picture_tasks import KINDS
from gnomon.data.tokenizer import Tokenizer
from gnomon.errors import CheckpointError, ConfigError
from gnomon.kernels import native
from gnomon.model.inference import InferenceModel
from gnomon.model.multimodal import Eye, Multimodal, load_eye, save_multimodal
from gnomon.model.parts import VisionConfig
from gnomon.serve import demonstration, seeing
from gnomon.serve.assembly import service_of
from gnomon.serve.demonstration import describe
from gnomon.serve.engine import Engine, EngineSettings
from gnomon.serve.load import Loaded, load
from gnomon.serve.pages import Memory
from gnomon.serve.prefix import PrefixCache
from gnomon.serve.request import Finished, Request, Sampled, Sampling, Seen
from gnomon.serve.runner import Runner, TorchRunner
from gnomon.serve.scheduler import ScheduleSettings
from gnomon.serve.seeing import Sight, content_ids
from gnomon.serve.server import Background
from gnomon.serve.settings import ServeSettings, SightSettings

VISION = VisionConfig(position_grid=8, vt_hidden_size=32, vt_intermediate_size=64, vt_num_hidden_layers=1, vt_num_attention_heads=2,
                      qkv_hidden_size=32)
GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def network(vocabulary: Tokenizer) -> Multimodal:
    torch.set_num_threads(1)
    return Multimodal(config(vocab_size=vocabulary.vocab_size, vision=VISION)).initialise(5).eval()


@pytest.fixture(scope="module", params=["inference", "torch"])
def runner(request: pytest.FixtureRequest, network: Multimodal) -> Runner:
    if request.param == "torch":
        return TorchRunner(network.language_model)
    if (reason := native.unavailable()) is not None:
        pytest.skip(reason)
    return InferenceModel.from_transformer(network.language_model, "fp32")


@pytest.fixture(scope="module")
def pad(vocabulary: Tokenizer) -> int:
    return vocabulary.special_ids["<|media_pad|>"]


def noise(width: int, height: int, seed: int) -> Picture.Image:
    return Picture.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def file(picture: Picture.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def conversation(*pictures: bytes, question: str = "hello") -> Conversation:
    content = (*(Image(data=data, media_type="image/png") for data in pictures), Text(text=question))
    return Conversation(messages=(Message(role="user", content=content),), thinking=False)


def sight(network: Multimodal, pad: int, **settings: object) -> Sight:
    return Sight(network.eye(), pad, SightSettings(**settings))


def asked(sight: Sight, vocabulary: Tokenizer, *pictures: bytes, name: str = "a", **more: object) -> tuple[Request, tuple[int, ...]]:
    """A request about pictures, and its prompt with one pad for each."""
    encoded = chat_format(vocabulary).encode(conversation(*pictures), images=True)
    ids, boundaries, images = sight.place(encoded)
    return Request(id=name, prompt=ids, images=images, boundaries=boundaries, sampling=GREEDY, **more), encoded.tokens


def run(engine: Engine, *requests: Request) -> dict[str, tuple[list[Sampled], Finished]]:
    found: dict[str, tuple[list[Sampled], list[Finished]]] = {request.id: ([], []) for request in requests}
    engine.submit_many(requests)
    while not engine.idle:
        for name, event in engine.step():
            if isinstance(event, Sampled):
                found[name][0].append(event)
            elif isinstance(event, Finished):
                found[name][1].append(event)
    return {name: (sampled, finished[0]) for name, (sampled, finished) in found.items()}


def greedy(network: Multimodal, prompt: tuple[int, ...], pictures: list[Picture.Image], pad: int) -> list[tuple[int, float]]:
    """The plain loop: the whole prompt again for each token, images put in place by `merge`."""
    said: list[tuple[int, float]] = []
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            ids = torch.tensor([*prompt, *(token for token, _ in said)])
            scores = network(ids, [prepare(picture) for picture in pictures], pad)[-1].log_softmax(-1)
            said.append((int(scores.argmax()), float(scores.max())))
    return said


@pytest.mark.parametrize("step", [512, 64])
def test_the_engine_says_what_the_plain_model_says(runner: Runner, network: Multimodal, vocabulary: Tokenizer, pad: int, step: int) -> None:
    pictures = [noise(84, 56, 1), noise(140, 280, 2)]
    eye = sight(network, pad)
    request, plain = asked(eye, vocabulary, *map(file, pictures))
    text = Request(id="b", prompt=tuple(tokens(30).tolist()), sampling=GREEDY)
    settings = EngineSettings(memory_bytes=1 << 24, schedule=ScheduleSettings(step_tokens=step, mixed_tokens=step))
    found = run(Engine(runner, settings), request, text)
    sampled, finished = found["a"]
    assert finished.usage.prompt_tokens == len(plain) - 2 + prepare(pictures[0]).tokens + prepare(pictures[1]).tokens
    wanted = greedy(network, plain, pictures, pad)
    assert [event.id for event in sampled] == [token for token, _ in wanted]
    assert [event.logprob for event in sampled] == pytest.approx([score for _, score in wanted], abs=2e-4)
    alone = run(Engine(runner, settings), replace(text, id="c"))["c"][0]
    assert [event.id for event in found["b"][0]] == [event.id for event in alone]  # who comes in one step with images sees none of them
    eye.close()


def test_the_cache_knows_a_picture_by_what_it_shows(runner: Runner, network: Multimodal, vocabulary: Tokenizer, pad: int) -> None:
    eye, memory = sight(network, pad), 1 << 24
    engine = Engine(runner, EngineSettings(memory_bytes=memory), PrefixCache(Memory(runner, memory)), vocabulary)
    one, other = noise(280, 280, 1), noise(280, 280, 2)
    runs = [run(engine, asked(eye, vocabulary, data, name=name)[0])[name] for name, data in
            [("first", file(one)), ("again", file(one)), ("bmp", file(one, "BMP")), ("other", file(other))]]
    cached = [finished.usage.cached_tokens for _, finished in runs]
    assert cached[0] == 0
    assert cached[1] == cached[2] >= 64
    assert cached[3] == 0
    said = [[event.id for event in sampled] for sampled, _ in runs]
    assert said[0] == said[1] == said[2]
    fresh = run(Engine(runner, EngineSettings(memory_bytes=memory)), asked(eye, vocabulary, file(other))[0])["a"][0]
    assert said[3] == [event.id for event in fresh]
    eye.close()


def test_a_described_picture_ends_where_the_answer_ends(runner: Runner, network: Multimodal, vocabulary: Tokenizer,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The tour's answers: once the model says a token that ends answers, nothing more is said."""
    monkeypatch.setattr(demonstration, "ANSWER_TOKENS", 8)
    shown = KINDS["shape"](np.random.default_rng(0))
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: list(ids))
    whole, = describe(runner, network.eye(), vocabulary, [shown])
    stop = whole[2]
    monkeypatch.setattr(Tokenizer, "stop_ids", (stop, vocabulary.eos_id))
    short, = describe(runner, network.eye(), vocabulary, [shown])
    assert [token for token in short if token != stop] == whole[: whole.index(stop)]


def test_ids_of_images_come_from_their_content() -> None:
    one, again, other = (content_ids(digest, 300, 163_840) for digest in (b"a", b"a", b"b"))
    assert one == again
    assert all(163_840 <= value < 2**31 for value in one)
    assert len(set(one) & set(other)) <= 1


def test_requests_that_do_not_fit_are_refused(runner: Runner, network: Multimodal) -> None:
    engine, vectors = Engine(runner, EngineSettings(memory_bytes=1 << 24)), np.zeros((4, network.config.hidden_size), np.float32)
    beyond = network.config.vocab_size + 7
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        engine.submit(Request(id="a", prompt=(1, beyond, 2)))
    with pytest.raises(ConfigError, match="'images' has one from token 1 to 5 of a prompt of 3"):
        engine.submit(Request(id="a", prompt=(1, beyond, 2), images=(Seen(1, vectors),)))
    with pytest.raises(ConfigError, match="after one that ends at 5"):
        engine.submit(Request(id="a", prompt=(beyond,) * 9, images=(Seen(1, vectors), Seen(4, vectors))))
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        engine.submit(Request(id="a", prompt=(beyond,) * 9, images=(Seen(1, vectors),), prompt_logprobs=True))


@pytest.fixture
def web() -> Iterator[str]:
    """A server on this machine with a picture, a redirect to it, something too large, and something that never ends."""
    picture, over = file(noise(30, 30, 1)), threading.Event()

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302 if self.path == "/moved" else 200)
            body = {"/picture": picture, "/large": bytes(5000)}.get(self.path, b"")
            piece = b"HTTP/1.1 200 OK\r\nx-long: "
            while self.path == "/slow" and not over.wait(0.02):
                try:
                    self.wfile.write(piece)
                except OSError:
                    return
                piece = b"a"
            if self.path == "/moved":
                self.send_header("location", "/picture")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def addressed(address: str) -> Conversation:
    return Conversation(messages=(Message(role="user", content=(Image(data=b"", media_type="", address=address),)),))


def test_files_and_hosts_are_read_where_that_is_allowed(network: Multimodal, pad: int, web: str, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    data = file(noise(40, 40, 3))
    for place in (tmp_path / "secret.png", tmp_path / "open" / "a b.png"):
        place.write_bytes(data)
    (tmp_path / "open" / "large.png").write_bytes(data + bytes(9000))
    (tmp_path / "open" / "link.png").symlink_to(tmp_path / "secret.png")
    closed = sight(network, pad)
    opened = sight(network, pad, folders=(tmp_path / "open",), hosts=("127.0.0.1",), file_bytes=len(data) + 4000)
    good = (tmp_path / "open" / "a b.png").as_uri()
    read = opened.read(addressed(good)).messages[0].content[0]
    assert isinstance(read, Image)
    assert (read.data, read.address) == (data, None)
    assert isinstance(opened.read(addressed(f"{web}/picture")).messages[0].content[0], Image)
    for address, why in [((tmp_path / "secret.png").as_uri(), "may read"), (f"{(tmp_path / 'open').as_uri()}/../secret.png", "may read"),
                         ((tmp_path / "open" / "link.png").as_uri(), "may read"), ((tmp_path / "open" / "large.png").as_uri(), "may read"),
                         ((tmp_path / "open").as_uri(), "may read"), ("file://elsewhere/a.png", "does not read"),
                         ((tmp_path / "open" / "none.png").as_uri(), "may read"), (f"{web}/moved", "answers 302"),
                         (f"{web}/large", "larger than|known picture"), ("http://example.org/a.png", "does not read")]:
        with pytest.raises(Refused, match=why):
            opened.read(addressed(address))
    for address in (good, f"{web}/picture"):
        with pytest.raises(Refused):
            closed.read(addressed(address))
    opened.close()
    closed.close()


def test_a_host_that_gives_byte_after_byte_is_left_in_time(network: Multimodal, pad: int, web: str, monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:
    monkeypatch.setattr(seeing, "FETCH_SECONDS", 0.3)
    opened = sight(network, pad, hosts=("127.0.0.1",))
    with pytest.raises(Refused, match="in time"):
        opened.read(addressed(f"{web}/slow"))
    opened.close()


def test_too_many_and_too_large_images_are_refused(network: Multimodal, pad: int) -> None:
    eye = sight(network, pad, images=2, pixels=1000)
    small, large = file(noise(20, 20, 1)), file(noise(40, 40, 1))
    eye.read(conversation(small, small))
    with pytest.raises(Refused, match="3 images; this server takes 2"):
        eye.read(conversation(small, small, small))
    with pytest.raises(Refused, match="40 x 40 pixels"):
        eye.read(conversation(large))
    with pytest.raises(Refused, match="no known picture format"):
        eye.read(conversation(b"no picture"))
    eye.close()


def test_what_was_seen_is_remembered_within_its_memory(network: Multimodal, pad: int, vocabulary: Tokenizer) -> None:
    size = 9 * network.config.hidden_size * 4
    eye = sight(network, pad, memory_bytes=2 * size)
    looked: list[int] = []
    features = eye.eye.features
    eye.eye.features = lambda items: (looked.append(len(items)), features(items))[1]  # type: ignore[method-assign]
    pictures = [file(noise(84, 84, seed)) for seed in range(3)]
    for picture in (pictures[0], pictures[0], pictures[1], pictures[2], pictures[2], pictures[0]):
        asked(eye, vocabulary, picture)
    assert len(looked) == 4  # the first one was forgotten for the third
    eye.close()


def test_both_apis_take_images(network: Multimodal, vocabulary: Tokenizer, pad: int) -> None:
    runner = TorchRunner(network.language_model)
    loaded = Loaded(runner=runner, tokenizer=vocabulary, name="tiny", fingerprint="x", eye=network.eye())
    settings = ServeSettings(log="none", drain_seconds=0)
    data = base64.b64encode(file(noise(84, 84, 1))).decode()
    plain = chat_format(vocabulary).encode(replace(conversation(base64.b64decode(data)), thinking=True), images=True)
    with service_of(loaded, settings) as service, Background(service) as url, httpx.Client(base_url=url, timeout=120) as client:
        ask = partial(client.post, timeout=120)
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}, {"type": "text", "text": "hello"}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0,
                "reasoning_effort": "none"}
        openai = ask("/v1/chat/completions", json=body).json()
        blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, parts[1]]
        anthropic = ask("/v1/messages", json={"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": blocks}]}).json()
        away = json.loads(json.dumps(body).replace(f"data:image/png;base64,{data}", "http://example.org/a.png"))
        refused = ask("/v1/chat/completions", json=away)
    thinking = len(chat_format(vocabulary).encode(replace(conversation(base64.b64decode(data))), images=True).tokens)
    assert openai["usage"]["prompt_tokens"] == thinking - 1 + 9, openai
    assert anthropic["usage"]["input_tokens"] + (anthropic["usage"].get("cache_read_input_tokens") or 0) >= len(plain.tokens) - 1 + 9
    assert refused.status_code == 400
    assert "send the image itself" in refused.json()["error"]["message"]


def test_a_server_without_an_eye_says_so(network: Multimodal, vocabulary: Tokenizer) -> None:
    loaded = Loaded(runner=TorchRunner(network.language_model), tokenizer=vocabulary, name="tiny", fingerprint="x")
    with service_of(loaded, ServeSettings(log="none", drain_seconds=0)) as service, Background(service) as url:
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file(noise(9, 9, 1))).decode()}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 400


def test_released_checkpoints_bring_their_eye(network: Multimodal, vocabulary: Tokenizer, tmp_path: Path) -> None:
    save_multimodal(network, tmp_path / "whole", quantize=False, tokenizer=vocabulary)
    loaded = load(tmp_path / "whole")
    assert isinstance(loaded.eye, Eye)
    wanted = {name: value for name, value in network.state_dict().items() if not name.startswith("language_model.")}
    found = loaded.eye.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    with pytest.raises(CheckpointError, match="vision tower needs"):
        load_eye(tmp_path / "whole", replace(network.config, vision=replace(VISION, vt_intermediate_size=96)))
