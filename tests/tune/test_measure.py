"""A command that measures: what it is asked, and what of its answers counts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.tune.measure import MOST_PRINTED, command_of, measured, request
from gpuir.tune.search import search

GEMM = gpuir.kernel("gemm", target="h100-sxm", m=1024, n=1024, k=512)
BEST = search(GEMM).best[0]


def answer(command: str, timeout_s: float = 20.0, asked: str = "{}\n") -> float | str:
    return measured(command_of(command), asked, timeout_s)


def test_what_it_is_asked():
    asked = json.loads(request(GEMM, BEST, ["m:/layer.0/MatMul"]))
    assert asked["schema"] == "gpuir.measure/1" and asked["target"] == "h100-sxm-80gb"
    assert asked["kernel"]["dims"] == {"b": 1, "m": 1024, "n": 1024, "k": 512}
    assert asked["kernel"]["kind"] == "gemm f16" and asked["kernel"]["nodes"]
    assert asked["tile"]["dims"] == dict(BEST.tile.dims)
    assert asked["tile"]["warps"] == BEST.tile.warps
    assert asked["predicted_s"] == BEST.time_s


def test_the_last_line_counts():
    assert answer("sh -c 'echo warming up; echo 1.5e-5'") == 1.5e-5
    assert (
        answer("python3 -c 'import json; print(json.loads(input())[\"t\"])'", asked='{"t": 2}') == 2
    )


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'echo no such kernel >&2; exit 3'", "ended with status 3: no such kernel"),
        ("false", "ended with status 1: it printed nothing"),
        ("echo hello", "has no seconds: 'hello'"),
        ("true", "has no seconds: ''"),
        ("echo nan", "'nan', which is not a valid time"),
        ("echo -1", "'-1', which is not a valid time"),
        ("echo 0", "'0', which is not a valid time"),
        ("yes", f"more than {MOST_PRINTED:,} bytes"),
        ("sh -c 'kill -9 $$'", "ended with status -9"),
    ],
)
def test_what_is_no_measurement_is_said(command, why):
    found = answer(command)
    assert isinstance(found, str) and why in found


def test_a_request_longer_than_a_pipe_holds():
    assert answer("sh -c 'cat > /dev/null; echo 1'", asked="x" * 300_000) == 1
    assert answer("echo 1", asked="x" * 300_000) == 1  # nor does it have to be read


def test_a_late_one_is_ended_with_all_that_it_started(tmp_path: Path):
    file = tmp_path / "pid"
    started = time.monotonic()
    found = answer(f"sh -c 'sleep 60 & echo $! > {file}; wait'", timeout_s=0.5)
    assert found == "the command did not answer within 0.5 s" and time.monotonic() - started < 10
    child = int(file.read_text())
    for _ in range(100):
        if not alive(child):
            return
        time.sleep(0.05)
    pytest.fail("what the command started goes on")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_command_that_is_not_there():
    with pytest.raises(UsageError, match="there is no program 'nvidia-bench-x'"):
        command_of("nvidia-bench-x --fast")
    with pytest.raises(UsageError, match="there is no program ''"):
        command_of("  ")
    with pytest.raises(UsageError, match="close the quotes"):
        command_of("sh -c 'echo 1")
