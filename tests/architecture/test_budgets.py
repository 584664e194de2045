"""Sizes, names and documentation: what keeps the package readable, checked over every file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "gnomon").rglob("*.py"))
PROGRAMS = sorted(p for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))
CPP = sorted(p for p in (ROOT / "csrc").iterdir() if p.suffix in (".cpp", ".h"))
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS, MAX_LINE = 400, 60, 7, 140
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "core", "misc"}
FORBIDDEN_CLASS = re.compile(r"(Manager|Handler|Impl)$|^Base[A-Z]")
OWNS_A_BOUNDARY = ("sandbox/", "serve/api.py", "agent/rollout.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    """The path as it is written in messages."""
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[Function]:
    """Every function of a file, methods and nested ones included."""
    yield from (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The public classes, functions and methods of a module, with their dotted names."""
    for node in body:
        if not isinstance(node, (Function, ast.ClassDef)) or node.name.startswith("_"):
            continue
        yield owner + node.name, node
        if isinstance(node, ast.ClassDef) and "Function" not in [ast.unparse(b).split(".")[-1] for b in node.bases]:
            yield from public(node.body, f"{owner}{node.name}.")


def undocumented(module: ast.Module) -> list[str]:
    """Public names without a docstring; a property's setter and an `@overload` share the one of their first definition."""
    shared = {"setter", "overload"}
    return [name for name, node in public(module.body)
            if not ast.get_docstring(node)
            and not any(ast.unparse(d).split(".")[-1] in shared for d in getattr(node, "decorator_list", []))]


@pytest.mark.parametrize("path", SOURCES + PROGRAMS + CPP, ids=relative)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = 200 if path.name == "cli.py" else MAX_FILE
    assert lines <= limit, f"{relative(path)}: {lines} lines, the limit is {limit}"


def test_lines_of_cpp_are_short() -> None:
    """As ruff has it for Python; here in bytes."""
    long = [f"{relative(p)}:{i}: {len(line)} bytes" for p in CPP for i, line in enumerate(p.read_bytes().splitlines(), 1)
            if len(line) > MAX_LINE]
    assert not long, "\n".join(long)


def test_functions_are_short() -> None:
    long = [f"{relative(p)}:{f.lineno} {f.name}: {f.end_lineno - f.lineno + 1} lines" for p in SOURCES + PROGRAMS for f in functions(p)
            if f.end_lineno - f.lineno + 1 > MAX_FUNCTION]
    assert not long, "\n".join(long)


def test_functions_take_few_parameters() -> None:
    """Operators are exempt: their mathematics has as many tensors as it has."""
    many = []
    for path in SOURCES:
        if "kernels" in path.parts:
            continue
        for function in functions(path):
            arguments = function.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls")]
            if len(names) > MAX_PARAMETERS:
                many.append(f"{relative(path)}:{function.lineno} {function.name}: {len(names)} parameters")
    assert not many, "\n".join(many)


def test_public_names_are_documented() -> None:
    missing = []
    for path in SOURCES:
        module = tree(path)
        if not ast.get_docstring(module):
            missing.append(f"{relative(path)}: module docstring")
        missing += [f"{relative(path)}: {name}" for name in undocumented(module)]
    assert not missing, "\n".join(missing)


def test_no_vague_names() -> None:
    vague = [relative(p) for p in SOURCES if p.stem in FORBIDDEN_MODULES or p.parent.name in FORBIDDEN_MODULES]
    vague += [f"{relative(p)}: {node.name}" for p in SOURCES for node in ast.walk(tree(p))
              if isinstance(node, ast.ClassDef) and FORBIDDEN_CLASS.search(node.name)]
    assert not vague, "\n".join(vague)


def test_nothing_is_caught_broadly() -> None:
    """`except Exception:` hides what a user must see, unless it raises in turn; only owners of a boundary may swallow."""
    broad = []
    for path in SOURCES:
        if any(part in relative(path) for part in OWNS_A_BOUNDARY):
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            everything = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if everything and (node.type is None or not isinstance(node.body[-1], ast.Raise)):
                broad.append(f"{relative(path)}:{node.lineno}")
    assert not broad, "\n".join(broad)


def test_init_files_are_light() -> None:
    """A docstring, and in a kernel folder its operators: importing a package costs nothing and hides nothing."""
    heavy = []
    for path in SOURCES:
        if path.name != "__init__.py":
            continue
        kernel = path.parent.parent.name == "kernels"
        for node in tree(path).body[1:]:
            operator = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "Operator"
            imported = isinstance(node, ast.ImportFrom) and node.module == "gnomon.kernels.operator"
            version = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
            if not ((kernel and (operator or imported)) or (path.parent.name == "gnomon" and version)):
                heavy.append(f"{relative(path)}:{node.lineno}")
    assert not heavy, "\n".join(heavy)


def test_no_notes_to_self() -> None:
    found = [f"{relative(p)}:{i}" for p in SOURCES + PROGRAMS + CPP for i, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
             if re.search(r"(#|/\*).*\b(TODO|FIXME|XXX|HACK)\b", line)]
    assert not found, "\n".join(found)


def test_undocumented_names_are_seen() -> None:
    text = "class A:\n    'x'\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n"
    assert undocumented(ast.parse(text)) == ["A.f", "h"]
