"""Every ONNX node test, and exactly the failures we know of. See tools/conformance.py."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

# Cases that fail, with the stage. One that passes must leave this list, and none may join it.
KNOWN: dict[str, str] = {}

# Totals may rise, never fall: raise them here when they do.
FLOORS = {
    "cases": 1884,
    **dict.fromkeys(("imported", "text", "evaluated", "canonicalize", "fuse", "legalize"), 1820),
    "static": 1797,
}
MOST_REFUSED = 64  # text, sequences, optionals


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    pytest.importorskip("onnx")
    return importlib.import_module("conformance")


@pytest.mark.filterwarnings("ignore")  # those of onnx while it makes its cases
def test_every_node_case(tool: ModuleType):
    outcomes = tool.check_all()
    failed = {o.case: ", ".join(o.failures) for o in outcomes if o.failures}
    reasons = {o.case: o.failures for o in outcomes if o.failures}
    new = {case: reasons[case] for case in failed if case not in KNOWN}
    assert not new, f"{len(new)} cases fail: {dict(list(new.items())[:5])}"
    assert failed == KNOWN, "cases that pass now, or fail elsewhere: update KNOWN"
    totals = tool.totals(outcomes)
    assert {k: v for k, v in totals.items() if v < FLOORS.get(k, 0)} == {}
    assert totals["refused"] <= MOST_REFUSED
