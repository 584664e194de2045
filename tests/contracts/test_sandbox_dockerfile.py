"""Dockerfiles: what is read, what is refused and why, and what is built once."""

import asyncio
import os
from pathlib import Path

import pretend_backend
import pytest

from gnomon.errors import ConfigError, DataError
from gnomon.sandbox import dockerfile
from gnomon.sandbox.dockerfile import Building, Instruction
from gnomon.sandbox.images import Image
from gnomon.sandbox.layers import LayerStore


@pytest.fixture
def backend(tmp_path: Path) -> pretend_backend.Backend:
    return pretend_backend.Backend(LayerStore(tmp_path / "store"))


def build(backend: pretend_backend.Backend, folder: Path, text: str, name: str = "made", **how: object) -> tuple[Image, list[str]]:
    """Build a text; also what was said."""
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    said: list[str] = []
    return asyncio.run(dockerfile.build(backend, backend.store, folder / "Dockerfile", name, how=Building(**how), say=said.append)), said


def contents(backend: pretend_backend.Backend, image: Image) -> dict[str, str]:
    """The files of an image."""
    flat = backend.store.flat(image)
    return {str(path.relative_to(flat)): path.read_text() for path in sorted(flat.rglob("*")) if path.is_file()}


def test_instructions_are_read_with_their_lines():
    text = "# syntax=docker/dockerfile:1\n\nfrom scratch\nRUN a && \\\n  # between\n  b\nENV A=1 \\\n    B=2\n"
    assert dockerfile.parse(text) == [
        Instruction(line=3, word="FROM", rest="scratch"), Instruction(line=4, word="RUN", rest="a && b"),
        Instruction(line=7, word="ENV", rest="A=1 B=2")]


@pytest.mark.parametrize(("text", "says"), [
    ("RUN x", "must begin with FROM"), ("", "must begin with FROM"), ("FROM scratch\nADD a b", r"Dockerfile:2: ADD is not supported"),
    ("FROM scratch\nRUNN x", "did you mean 'RUN'"), ("FROM a AS b", "stages"), ("FROM scratch\nRUN", "needs an argument"),
    ("FROM scratch\nRUN x \\", "last backslash"), ("FROM scratch\nRUN <<EOF\nx\nEOF", "here-documents"),
    ("FROM --platform=x a", "platforms"),
])
def test_what_is_not_in_the_subset_is_named(text, says):
    with pytest.raises(ConfigError, match=says):
        dockerfile.parse(text)


def test_a_build_does_each_step_once(backend, tmp_path):
    context = tmp_path / "context"
    (context / "src").mkdir(parents=True)
    (context / "src" / "a.txt").write_text("a")
    text = ("FROM scratch\nENV WHO=world SAID=\"hello \\$WHO\"\nENV OLD old style\nWORKDIR /srv\nWORKDIR app\nCOPY src/a.txt $WHO.txt\n"
            "COPY src other\nRUN echo $WHO > out && cat world.txt >> out\nUSER nobody\nCMD [\"x\"]\n")
    image, said = build(backend, context, text)
    assert (image.env, image.workdir, image.user) == ({"WHO": "world", "SAID": "hello $WHO", "OLD": "old style"}, "/srv/app", "nobody")
    assert contents(backend, image) == {"srv/app/world.txt": "a", "srv/app/other/a.txt": "a", "srv/app/out": "world\na"}
    assert any("CMD is left out" in line for line in said)
    made = backend.created
    again, said = build(backend, context, text, "again")
    assert backend.created == made and again.layers == image.layers and sum("found" in line for line in said) == 5
    (context / "src" / "a.txt").write_text("b")
    changed, _ = build(backend, context, text, "made")
    assert backend.created == made + 3 and contents(backend, changed)["srv/app/out"] == "world\nb"
    assert build(backend, context, text, cached=False)[0].layers != changed.layers
    assert [image.name for image in backend.store.images()] == ["again", "made"]
    assert not backend.living and backend.registry.list() == []
    backend.store.gc()
    assert contents(backend, backend.store.resolve("again")) == {"srv/app/world.txt": "a", "srv/app/other/a.txt": "a",
                                                                 "srv/app/out": "world\na"}


def test_a_build_goes_on_from_an_image(backend, tmp_path):
    build(backend, tmp_path / "context", "FROM scratch\nENV A=1\nRUN echo base > base\n", "base:1")
    image, _ = build(backend, tmp_path / "context", "FROM base:1\nRUN echo $A > top\n", "top")
    assert contents(backend, image) == {"base": "base\n", "top": "1\n"} and image.env == {"A": "1"}
    with pytest.raises(ConfigError, match=r"FROM python:3.12: unknown image.*docker save python:3.12 -o image.tar.*--archive"):
        build(backend, tmp_path / "context", "FROM python:3.12\n")


def test_a_step_that_fails_says_where_and_leaves_nothing(backend, tmp_path):
    with pytest.raises(DataError, match=r"Dockerfile:2: /bin/sh -c echo some >&2; exit 3: exit status 3: some"):
        build(backend, tmp_path / "context", "FROM scratch\nRUN echo some >&2; exit 3\n")
    backend.fail = DataError("no room")
    with pytest.raises(DataError, match="no room"):
        build(backend, tmp_path / "context", "FROM scratch\nRUN true\n")
    backend.store.gc()
    assert backend.store.images() == [] and os.listdir(backend.store.root / "layers") == [] and not backend.living


@pytest.mark.parametrize(("line", "says"), [
    ("COPY ../secret x", "leads out"), ("COPY link x", "leads out"), ("COPY missing x", "no such file"), ("COPY *.none x", "no such file"),
    ("COPY a b c", "end it with a slash"), ("COPY a", "source and a target"), ("COPY --from=x a b", "--chown"),
    ("RUN --mount=x y", "no options"),
    ("ENV A=1 B", "no NAME=VALUE"), ("ENV A", "NAME=VALUE"), ("ENV A='x", "quotation"),
])
def test_lines_that_cannot_be_done(backend, tmp_path, line, says):
    context = tmp_path / "context"
    context.mkdir()
    (tmp_path / "secret").write_text("s")
    (context / "link").symlink_to("../secret")
    for name in "ab":
        (context / name).write_text(name)
    with pytest.raises(ConfigError, match=f"Dockerfile:2: .*{says}"):
        build(backend, context, f"FROM scratch\n{line}\n")


def test_json_words_and_globs(backend, tmp_path):
    context = tmp_path / "context"
    context.mkdir()
    for name in ("a.txt", "b.txt", "c.md"):
        (context / name).write_text(name)
    image, _ = build(backend, context, 'FROM scratch\nCOPY *.txt in/\nRUN ["cp", "in/a.txt", "two words"]\nRUN [ -e in/b.txt ]\n')
    assert set(contents(backend, image)) == {"in/a.txt", "in/b.txt", "two words"}
