"""The rooms import only what docs/explanation/design.md allows; `import gpuir` needs little."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "gpuir"
DESIGN = ROOT.parent / "docs" / "explanation" / "design.md"
ROOM = re.compile(r"\| `(\w+)` \| .* \| (.*) \|")


def table() -> dict[str, set[str]]:
    """What each room may import, as the table in docs/explanation/design.md says."""
    allowed: dict[str, set[str]] = {}
    for name, imports in ROOM.findall(DESIGN.read_text().partition("| room |")[2]):
        above = set(allowed) if imports == "all of the above" else set()
        allowed[name] = {name, *above, *re.findall("`(.+?)`", imports)}
    return allowed


ALLOWED = table()
FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == "gpuir":
                found |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("gpuir.")}
    return found


def test_every_room_is_in_the_table():
    assert {room(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_room_imports_only_what_it_may(path):
    assert imported_rooms(path) <= ALLOWED[room(path)]


BESIDE = ROOT.parent / "validation"
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (*FILES, *sorted(BESIDE.rglob("*.py")))
}


def imported_modules(path: Path) -> set[str]:
    """Every module of ours that a file names in an import: within functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{a.name}" for a in node.names}
            found |= {m if m in MODULES else node.module for m in inside}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found & MODULES.keys()


def test_imports_form_no_cycle():
    """In no room, nor between rooms. `gpuir` itself names what it holds, each when it is used."""
    graph = {name: imported_modules(path) - {name, "gpuir"} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_the_package_imports_nothing_of_what_lies_beside_it():
    beside = {p.name for p in ROOT.parent.iterdir() if (p / "__init__.py").exists()} - {"gpuir"}
    assert "validation" in beside
    built = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert built["targets"]["wheel"]["packages"] == ["gpuir"]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not beside & {name.partition(".")[0] for name in names}, path


MUTATORS = {"update", "setdefault", "pop", "popitem", "clear"}


def writes_attributes(node: ast.AST) -> bool:
    """Whether code reaches behind the attributes of an object: `x.__dict__`, `vars(x)[...] = y`."""
    match node:
        case ast.Attribute(attr="__dict__"):
            return True
        case ast.Attribute(value=ast.Call(func=ast.Name("vars")), attr=name):
            return name in MUTATORS
        case ast.Subscript(value=ast.Call(func=ast.Name("vars")), ctx=ast.Store() | ast.Del()):
            return True
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_kept_behind_the_fields_of_a_record(path: Path):
    """What follows from a record is a `lazy` property or `once` computed; other results are kept in
    an `lru_cache`, or by who asks for them."""
    lines = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if writes_attributes(n)]
    assert not lines or path == ROOT / "ir" / "lazy.py"


def test_import_needs_lark_and_numpy_alone():
    code = (
        "import sys; before = set(sys.modules); import gpuir; gpuir.parse, gpuir.show, gpuir.Graph;"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split()) - set(sys.stdlib_module_names)
    assert not loaded & {"onnx", "torch", "rich", "click", "ml_dtypes", "google", "pandas"}
