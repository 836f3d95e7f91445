"""Every command and every line of Python in the tutorials runs, on models and searches that are
smaller where a page's own take long. What runs as it is printed prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import onnx
import pytest
import tutorials
from click.testing import CliRunner
from onnx import TensorProto, helper

from gpuir.cli.main import main

EXTRAS = {"hf": "transformers", "torch": "torch", "plot": "matplotlib", "mig": "simpy"}
NEEDS = re.compile(r"gpuir\[([\w,-]+)\]")
TEXT = Path(__file__).parent / "small_encoder.onnx"
SMALLER = {  # of a page, what is replaced before it runs
    "batch-size": {'layers": 32': 'layers": 1', "1,4,16..128": "1,16"},
    "compile-or-tensorrt": {'layers": 32': 'layers": 1', "seq=8192": "seq=4096"},
    "gpu-that-does-not-exist": {
        "(40, 58, 80, 116)": "(40, 116)",
        "(72, 110, 150, 220)": "(72, 220)",
    },
    "heat-map": {'layers": 32': 'layers": 1'},
    "parallel-plan": {
        'layers": 16': 'layers": 1',
        "--cluster 8xdgx-h100": "--cluster dgx-h100",
        "--dp 64": "--dp 8",
        "batch=256,seq=4096": "batch=32,seq=512",
        "bf16\n": "bf16 --tp 1 --pp 1\n",
    },
    "slice-or-not": {
        "python examples/four_models.py models": "mv small models",
        "gpuir mig plan ": "gpuir mig plan --requests 50 ",
        ":rate=": ":rate=10",  # or a small model in a loop runs a million times beside them
    },
    "which-gpu": {"1,2,4..64": "1,64"},
}


def missing(page: Path) -> list[str]:
    """The extras that the page names and that are not installed."""
    named = {e for found in NEEDS.findall(page.read_text()) for e in found.split(",")}
    return [e for e in named if find_spec(EXTRAS.get(e, "gpuir")) is None]


def four_small_models(folder: Path) -> None:
    """Files with the names and inputs of those that examples/four_models.py writes."""
    folder.mkdir()
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", 3, 32, 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["batch", 8, 30, 30])
    w = helper.make_tensor("w", TensorProto.FLOAT16, [8, 3, 3, 3], [0.0] * 216)
    conv = helper.make_node("Conv", ["x", "w"], ["y"], "conv")
    images = helper.make_model(helper.make_graph([conv], "images", [image], [y], [w]))
    for name in ("resnet50", "efficientdet"):
        onnx.save(images, folder / f"{name}.onnx")
    for name in ("bert", "fastpitch"):
        shutil.copy(TEXT, folder / f"{name}.onnx")


def shell(code: str) -> str:
    """What a block of commands prints: those of gpuir run in this process."""
    printed, words = "", dict[str, str]()
    code = re.sub(r"\\\n\s*", "", code)
    for line in re.findall(r"cat > .*?\nEND\n|[^\n]+\n", code, re.DOTALL):
        first, _, rest = line.partition(" | ")
        if line.startswith("cd "):
            os.chdir(line[3:].strip())
        elif found := re.fullmatch(r"(\w+)=(\S+)\n", line):
            words[found[1]] = found[2]
        elif line.startswith("gpuir "):
            args = shlex.split(Template(first).substitute(words))[1:]
            done = CliRunner().invoke(main, args)
            assert done.exit_code == 0, (line, done.output, done.exception)
            printed += piped(rest, done.stdout) if rest else done.stdout
        else:
            printed += piped(line, "")
    return printed


def piped(command: str, text: str) -> str:
    done = subprocess.run(["bash", "-c", command], input=text, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def python(code: str, program: dict[str, Any]) -> str:
    """What lines of a page's program print; `program` has the names of those before."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "tutorial", "exec"), program)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("page", tutorials.PAGES, ids=lambda page: page.stem)
def test_the_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if lacking := missing(page):
        pytest.skip(f"pip install 'gpuir[{','.join(lacking)}]'")
    shutil.copytree(tutorials.ROOT / "examples", tmp_path / "examples")
    four_small_models(tmp_path / "small")
    monkeypatch.setenv("COLUMNS", tutorials.WIDTH)
    smaller: Mapping[str, str] = SMALLER.get(page.stem, {})
    text, program, changed = page.read_text(), dict[str, Any](), False
    assert all(old in text for old in smaller), "the page has other commands now"
    for block in tutorials.BLOCK.finditer(text):
        language, code, lines, output = block.groups()
        own = code
        for old, new in smaller.items():
            code = code.replace(old, new)
        changed = changed or code != own
        monkeypatch.chdir(tmp_path)  # a block of commands is a script of its own
        printed = shell(code) if language == "sh" else python(code, program)
        if lines and not changed:
            assert tutorials.shown(tutorials.Ran(None, int(lines), printed)) == output
    for picture in tutorials.PICTURE.findall(text):
        assert (page.parent / picture).exists()
