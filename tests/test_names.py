"""One name, one meaning: no two classes of gpuir have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "gpuir"
# A kernel has the name of the operator that it computes: `t.Conv` and `k.Conv`. Which of both is
# meant is always written before it.
VOCABULARIES = {"ops/tensor.py", "ops/kernel.py"}


def test_a_class_has_a_name_of_its_own():
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path.relative_to(ROOT).as_posix())
    several = {name: where for name, where in found.items() if len(where) > 1}
    assert {name: where for name, where in several.items() if where != VOCABULARIES} == {}
