"""The rooms import only what style allows; `import gpuir` needs lark and numpy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpuir

ROOT = Path(gpuir.__file__).parent
BASE = {"ir"}
OPS = BASE | {"ops"}
TEXT = OPS | {"text", "interp"}
COST = OPS | {"targets", "cost"}
PASSES = TEXT | COST | {"schedule", "passes"}
LATER = PASSES | {"simulate", "plan", "tune", "evaluate"}
ALLOWED = {
    "ir": BASE,
    "ops": OPS,
    "schedule": OPS | {"targets", "cost"},
    "targets": BASE | {"targets"},
    "text": OPS | {"text"},
    "interp": OPS | {"interp"},
    "cost": COST,
    "passes": PASSES,
    "frontends": OPS | {"interp", "frontends"},
    **dict.fromkeys(("simulate", "plan", "tune", "evaluate"), LATER),
    "backends": OPS | {"text", "schedule", "simulate", "backends"},
    "cli": LATER | {"analysis", "backends", "cli"},
    "analysis": LATER | {"frontends", "backends"},
    "__init__": LATER | {"analysis", "backends"},
    "__main__": {"cli"},
}
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_room_imports_only_what_it_may(path):
    assert imported_rooms(path) <= ALLOWED[room(path)]


def test_import_needs_lark_and_numpy_alone():
    code = (
        "import sys; before = set(sys.modules); import gpuir; gpuir.parse, gpuir.show, gpuir.Graph;"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split()) - set(sys.stdlib_module_names)
    assert not loaded & {"onnx", "torch", "rich", "click", "ml_dtypes", "google", "pandas"}
