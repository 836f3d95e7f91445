"""What the command's process loads: a short command stays short by leaving the rest alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ENCODER = str(ROOT / "tests/encoder.onnx")


def loaded_by(*arguments: str) -> set[str]:
    """The modules that a command has imported by its end."""
    code = (
        "import sys; from gpuir.__main__ import run; sys.argv = ['gpuir', *sys.argv[1:]]\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["table", "json", "schedule", "ir"])
def test_analyze_of_an_onnx_file_loads_no_checker_and_no_torch(form):
    arguments = ("analyze", ENCODER, "--target", "a100", "--dims", "batch=1,seq=8")
    loaded = loaded_by(*arguments, "--format", form)
    assert {"numpy", "google.protobuf"} <= loaded
    assert not loaded & {"onnx", "torch", "pandas", "rich", "ml_dtypes", "asyncio"}
    assert "importlib.metadata" not in loaded  # plug-ins are looked for when a name is not ours


def test_listing_targets_and_help_load_no_numbers():
    for arguments in (("targets",), ("--help",), ("analyze", "--help")):
        assert not loaded_by(*arguments) & {"numpy", "google.protobuf", "onnx", "lark"}
