"""Imports point down, lazy and TYPE_CHECKING ones included; what must not load torch does not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
# Lowest first. A package imports from rows before its own, never sideways, never up. The five files at the bottom and the two at the
# top are rows of their own: `config` may use `errors`, `cli` may use `tour`.
ROWS = [
    {"errors"}, {"units", "extend", "whole"}, {"config"},
    {"kernels"},
    {"model", "data"},
    {"parallel", "sandbox"},
    {"train", "serve", "agent"},
    {"posttrain", "plan"},
    {"measure"}, {"tour"}, {"cli"}, {"__main__"},
]
TORCH_FREE_PACKAGES = {"agent", "sandbox", "plan"}
TORCH_FREE = [
    "gnomon", "gnomon.errors", "gnomon.units", "gnomon.extend", "gnomon.whole", "gnomon.config", "gnomon.cli", "gnomon.kernels.operator",
    "gnomon.model", "gnomon.model.config", "gnomon.data", "gnomon.data.tokenizer", "gnomon.data.corpus", "gnomon.data.shards",
    "gnomon.data.messages", "gnomon.data.chat", "gnomon.data.formats.xtml", "gnomon.data.formats.kimi_linear",
    *(f"gnomon.data.dialects.{name}" for name in ("openai_chat", "openai_completions", "openai_responses", "anthropic")),
    "gnomon.train", "gnomon.train.recipe", "gnomon.serve.cache_settings",
]


def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted((SRC / "gnomon").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The gnomon modules that a module imports anywhere in its text, functions and `TYPE_CHECKING` blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: write the import absolutely"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return {module for module in found if module.split(".")[0] == "gnomon"}


def row(module: str) -> int:
    """The number of the row that a module stands in; the bare package is below all."""
    part = module.split(".")[1] if "." in module else None
    if part is None:
        return -1
    rows = [i for i, names in enumerate(ROWS) if part in names]
    assert rows, f"{module}: '{part}' stands in no row of the layer list"
    return rows[0]


def wrong_imports(name: str, path: Path, known: dict[str, Path]) -> list[str]:
    """The imports of a module that go sideways or up."""
    own = name.split(".")[1:2]
    return [f"{name} imports {other}" for other in sorted(imports(name, path, known))
            if other.split(".")[1:2] != own and row(other) >= row(name)]


def test_imports_point_down() -> None:
    known = modules()
    wrong = [line for name, path in known.items() for line in wrong_imports(name, path, known)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", [
    "from gnomon.model import config", "def f():\n    import gnomon.train.loop",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gnomon.cli import main",
    "import importlib\nimportlib.import_module('gnomon.data.packing')",
])
def test_the_check_sees_upward_imports(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert wrong_imports("gnomon.kernels.module", path, modules())


def test_modules_form_no_knot() -> None:
    """No cycle among modules, even through imports inside functions: the order in which files can be read exists."""
    known = modules()
    edges = {name: {m for m in imports(name, path, known) if m in known and m != name} for name, path in known.items()}
    done: set[str] = set()
    while ready := {name for name in edges if name not in done and edges[name] <= done}:
        done |= ready
    knot = {name: sorted(edges[name] - done) for name in edges if name not in done}
    assert not knot, knot


def test_torch_free_modules_do_not_load_torch() -> None:
    """One fresh interpreter imports them in turn and stops at the first that brings torch."""
    names = [name for name in modules() if (name.split(".")[1:2] and name.split(".")[1] in TORCH_FREE_PACKAGES) or name in TORCH_FREE]
    names += [name for name, path in modules().items() if path.name == "__init__.py" and name not in names]
    program = (f"import sys, importlib\nsys.path.insert(0, {str(SRC)!r})\n"
               f"for name in {names!r}:\n    importlib.import_module(name)\n"
               "    if 'torch' in sys.modules: sys.exit(name + ' loads torch')\n")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
