"""Any graph, under any profile, in any format; the same bytes every time; whole files or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from strategies import graphs

import gpuir
from gpuir.backends.table import BACKENDS, FOLDERS
from gpuir.backends.terminal import Terminal
from gpuir.targets.support import refusal

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ENCODER = ROOT / "tests" / "encoder.onnx"
PROFILES = gpuir.profile_names()
TARGETS = ("a100", "t4", "h100-sxm", "mi250x", "x86-64-v3")
NEEDS = {"html": "plotly", "roofline": "matplotlib"}  # formats of the extras
SLOW = ("html", "roofline")  # a quarter of the graphs will do
TAKEN = 3  # profiles of each graph, in turns, beside one that every target takes
FILES = {"roofline": "x.svg"}


def is_there(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


FORMATS = [name for name in BACKENDS if name not in NEEDS or is_there(NEEDS[name])]
drawn = 0


@seed(5)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(graphs())
def test_any_graph_under_any_profile_in_any_format(g):
    global drawn
    drawn += 1
    target = TARGETS[drawn % len(TARGETS)]
    found: list[gpuir.Answer] = []
    turns = (PROFILES[(drawn * TAKEN + i) % len(PROFILES)] for i in range(TAKEN))
    for profile in dict.fromkeys(("ideal", *turns)):
        kernels = gpuir.lower(g, profile=profile)
        if refusal(kernels, gpuir.load_target(target)):  # TensorRT on AMD, a CUDA graph on a CPU
            continue
        costed = gpuir.analyze(kernels, target).graph
        assert gpuir.parse(gpuir.show(costed)) == costed
        found.append(gpuir.analyze(costed))
    for turn, form in enumerate(FORMATS):  # of each a run, and all
        layout = Terminal(100, file=FILES.get(form, ""))
        if form in SLOW:
            assert drawn % 4 or BACKENDS[form](found, layout)
            continue
        assert BACKENDS[form]([found[(drawn + turn) % len(found)]], layout)
        if form not in ("ir", "schedule", *FOLDERS):
            assert BACKENDS[form](found, layout)


def analyze(form: str, output: Path) -> list[str]:
    command = [sys.executable, "-m", "gpuir", "analyze", str(ENCODER), "--target", "a100"]
    command += ["--dims", "batch=1,seq=16", "--format", form, "-o", str(output)]
    return command


WRITE_ALL = """
import sys, gpuir
from gpuir.backends.table import BACKENDS, FOLDERS
from gpuir.backends.terminal import Terminal
model, folder, *forms = sys.argv[1:]
found = [gpuir.analyze(model, target="a100", dims={"batch": 1, "seq": 16})]
for form in forms:
    text = BACKENDS[form](found, Terminal(100, file="x.svg" if form == "roofline" else ""))
    if form in FOLDERS:
        text = b"".join(name.encode() + data for name, data in text.files)
    open(f"{folder}/{form}", "wb").write(text if isinstance(text, bytes) else text.encode())
"""


def test_the_same_bytes_whatever_the_hash_seed(tmp_path: Path):
    for hashes in ("1", "2"):
        folder = tmp_path / hashes
        folder.mkdir()
        command = [sys.executable, "-c", WRITE_ALL, str(ENCODER), str(folder), *FORMATS]
        env = {**os.environ, "PYTHONHASHSEED": hashes}
        subprocess.run(command, check=True, env=env, capture_output=True)
    for form in FORMATS:
        first, second = ((tmp_path / hashes / form).read_bytes() for hashes in ("1", "2"))
        assert first == second and len(first) > 100


def test_a_killed_run_leaves_the_file_as_it_was(tmp_path: Path):
    output = tmp_path / "report.json"
    output.write_text("before")
    begun = time.perf_counter()
    subprocess.run(analyze("json", tmp_path / "whole.json"), check=True, capture_output=True)
    whole = (tmp_path / "whole.json").read_bytes()
    took = time.perf_counter() - begun
    for share in (0.6, 0.9, 1.0):
        run = subprocess.Popen(analyze("json", output), stderr=subprocess.DEVNULL)
        time.sleep(share * took)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert output.read_bytes() in (b"before", whole)
    assert {p.name for p in tmp_path.iterdir()} == {"report.json", "whole.json"}
