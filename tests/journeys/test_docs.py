"""The pages are true: each `python` and `console` block runs, each link and path exists.

In a console block a line `$ command` runs in a shell; the lines below it, when there are any, are its expected output, where `...` stands
for anything. A page's Python blocks share their names, top to bottom; one that begins with `# name.py` is saved under that name instead,
for the others to import. Blocks in other languages (`sh`, `toml`, `text`) are not run.
"""

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.cli import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"# (\w+\.py)\n")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:src|tests|docs|benchmarks|examples|recipes|csrc)/[\w./*{},-]+|gnomon/[\w./-]+\.py)`")


def name(page: Path) -> str:
    """The page as it is written in messages."""
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with the repository's recipes at hand."""
    for folder in ("recipes", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run_console(text: str) -> None:
    """Run each command of a console block and compare its output with what the page shows."""
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PATH": search, "COLUMNS": "100",
                                "GNOMON_SANDBOX_HOME": str(Path.cwd() / "sandboxes")}
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        command = re.sub(r"^gnomon\b", f"{sys.executable} -m gnomon", command)
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=240, env=environment)
        assert result.returncode == 0 or "gnomon: error:" in expected, f"$ {command}\n{result.stdout}{result.stderr}"
        if not expected.strip():
            continue
        got = "\n".join(line.rstrip() for line in (result.stdout + result.stderr).splitlines()).strip() + "\n"
        want = expected.strip() + "\n"
        assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), f"$ {command}\nshown:\n{want}\ngot:\n{got}"


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))], ids=name)
def test_blocks_run(page: Path, workplace: Path) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if saved := SAVED.match(text):
            (workplace / saved[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, name(page), "exec"), names)
        else:
            run_console(text)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    for path in PATH.findall(text):
        if "NAME" in path:  # a place to fill in
            continue
        full = f"src/{path}" if path.startswith("gnomon/") else path
        if not (list(ROOT.glob(full)) if "*" in full else (ROOT / full).exists()):
            missing.append(path)
    assert not missing


def test_commands_that_are_not_run_exist() -> None:
    """Long commands stand in `sh` blocks: their make targets, verbs and recipes are there."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(block for page in PAGES for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    assert set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE)) <= targets
    assert set(re.findall(r"(?:^|-m )gnomon ([a-z]+)", text, re.MULTILINE)) <= set(VERBS)
    assert all((ROOT / recipe).is_file() for recipe in re.findall(r"recipes/[\w-]+\.toml", text))


def test_a_wrong_output_is_seen(workplace: Path) -> None:
    run_console("$ echo one two three\none ... three\n")
    with pytest.raises(AssertionError, match="shown"):
        run_console("$ echo one\ntwo\n")
    with pytest.raises(AssertionError):
        run_console("$ false\n")
