"""Design spaces the whole way: the numbers of `analyze`, kept through a kill, by any engine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import gpuir
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.plan.space.engines import find_engine
from gpuir.plan.space.space import read_space
from gpuir.run import spaces
from gpuir.run.spaces import MANIFEST, SpaceSweep
from gpuir.store import Store
from gpuir.targets.profile import under

ENCODER = Path(__file__).parents[1] / "encoder.onnx"
SPACE = """
models = ["encoder.onnx"]
dtypes = ["own", "bf16"]
profiles = ["ort", "cudagraph"]
targets = ["t4", "l4", "a30:*", "mi300x", "x86-64-v3", "h100-sxm"]

[dims]
batch = [1, 7]
seq = 32

[hardware]
base = ["a100", "v100-sxm-16gb"]

[hardware.set]
sms = [40, 80, 108]
dram.bytes_per_s = [1e12, 2e12]
dram.bytes = [6e8, 4e10]

[[plans]]
cluster = "dgx-h100"
tp = [1, 2, 5]
dp = [1, 2]

[[plans]]
cluster = "dgx-h100"
pp = 2
microbatches = 4
"""
SMALL = """
models = ["encoder.onnx"]
targets = ["t4", "l4"]

[dims]
batch = {batches}
seq = [16, 48]

[hardware]
base = "a100"

[hardware.set]
sms = {{ from = 40, to = 136, count = 13 }}
dram.bytes_per_s = {{ from = 1e12, to = 3e12, count = 10 }}
"""


def written(folder, text):
    (folder / "encoder.onnx").write_bytes(ENCODER.read_bytes())
    path = folder / "space.toml"
    path.write_text(text)
    return str(path)


def swept(path, out, engine="local", workers=1):
    with begun(path, out) as sweep, find_engine(engine, workers) as found:
        return sweep.run(found)


def begun(path, out, store=""):
    return SpaceSweep(read_space(path), str(out), str(store))


def rows_of(out):
    return sorted(pq.read_table(out).to_pylist(), key=lambda row: row["point"])


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    folder = tmp_path_factory.mktemp("space")
    path = written(folder, SPACE)
    done = swept(path, folder / "out")
    return read_space(path), done, rows_of(folder / "out")


SIZED = """
models = ["encoder.onnx"]
dtypes = ["own", "f16"]
profiles = ["ort", "compiled"]
targets = ["t4", "x86-64-v3"]

[dims]
batch = [1, 2, 3, 16, 100000]
seq = [16, 40]
"""


def same(number):
    """As close as batches of other sizes come."""
    return pytest.approx(number, rel=1e-12, abs=0.0)


def alone(row):
    """A point by `analyze`, as `gpuir analyze --dims --profile --pipeline convert` would do it."""
    dims = {name.removeprefix("dim."): n for name, n in row.items() if name.startswith("dim.")}
    g = under(gpuir.load(row["model"], dims=dims), row["profile"])
    if row["dtype"] != "own":
        g = gpuir.pipeline(f"convert{{dtype={row['dtype']}}}").run(g)
    return gpuir.analyze(g, row["target"], profile=row["profile"])


def test_every_point_is_there_once(points):
    space, done, rows = points
    assert [row["point"] for row in rows] == list(range(space.points))
    assert (done.points, done.there) == (space.points, 0)
    assert done.without == sum(row["latency_s"] is None for row in rows)
    for row in rows:
        assert (row["latency_s"] is None) <= bool(row["why"])
    whys = " ".join(row["why"] for row in rows)
    for part in ("does not fit: ", "does not run bf16 on this GPU", "cannot be split"):
        assert part in whys


def test_a_sample_of_points_is_what_analyze_says(points):
    _, _, rows = points
    devices = [row for row in rows if not row["plan"] and row["cluster"] == ""]
    drawn = random.Random(5).sample(devices, 30)
    drawn += random.Random(5).sample([r for r in devices if r["target"] == "x86-64-v3"], 2)
    are_as_analyzed(drawn)


def test_jobs_that_differ_in_sizes_alone_are_too(tmp_path, monkeypatch):
    loads: list[Any] = []
    monkeypatch.setattr(spaces, "load", lambda *a, **b: loads.append(b) or gpuir.load(*a, **b))
    path = written(tmp_path, SIZED)
    swept(path, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 80
    assert len(loads) < 20, "of 10 sizes, in two dtypes under two profiles"
    are_as_analyzed(random.Random(3).sample(rows, 24))


def are_as_analyzed(drawn):
    for row in drawn:
        try:
            found = alone(row)
        except GpuirError as error:
            assert row["latency_s"] is None
            assert error.what in row["why"]
            continue
        assert row["latency_s"] == same(found.latency_s), row
        assert (row["low_s"], row["high_s"]) == same(found.interval or (None, None))
        assert row["device_s"] == same(found.device_s)
        assert row["peak_bytes"] == found.memory.peak_bytes
        assert row["reserved_bytes"] == found.memory.reserved_bytes
        assert row["available_bytes"] == found.memory.available_bytes
        assert bool(row["why"]) == (not found.memory.fits)
        assert row["host_bound"] == found.timeline.is_host_bound
        bounds = dict(found.bounds)
        assert row["bound"] == max(bounds, key=lambda name: bounds[name])
        assert row["items_per_s"] == same(row["dim.batch"] / found.latency_s)
        assert row["predictor"] in found.by


def test_plans_are_what_simulate_says(points):
    _, _, rows = points
    planned = [row for row in rows if row["cluster"] and row["dtype"] == "own"]
    assert len(planned) == 2 * 2 * (6 + 1)
    row = next(r for r in planned if r["plan"] == "tp=2" and r["dim.batch"] == 7)
    graph = gpuir.load(row["model"], dims={"batch": 7, "seq": 32})
    step = gpuir.simulate_ranks(
        graph, row["cluster"], gpuir.Parallel(tp=2), profile=row["profile"]
    ).step
    assert row["latency_s"] == step.time_s
    assert (row["low_s"], row["high_s"]) == step.interval
    assert row["items"] == 7
    piped = next(r for r in planned if r["plan"].startswith("pp=2") and r["dim.batch"] == 7)
    assert piped["items"] == 4 * 7, "a microbatch has the batch"
    assert piped["items_per_s"] == same(piped["items"] / piped["latency_s"])


# ---- what is kept ------------------------------------------------------------------------------


def killed(path, out, after):
    """A sweep by processes of its own, killed when so many parts are there."""
    command = [sys.executable, "-m", "gpuir", "sweep", path, "-o", str(out), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        if len(list(out.glob("part-*"))) >= after:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return {p.name: p.stat().st_mtime_ns for p in out.glob("part-*")}


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_loses_nothing(tmp_path):
    path = written(tmp_path, SMALL.format(batches=[*range(1, 5)]))
    swept(path, tmp_path / "whole")
    out = tmp_path / "killed"
    there: dict[str, int] = {}
    for after in (0, 1):
        now = killed(path, out, after)
        assert there.items() <= now.items()  # what was there is not written again
        there = now
    done = swept(path, out)
    assert {p.name: p.stat().st_mtime_ns for p in out.glob("part-*")}.items() >= there.items()
    assert 0 < done.there < done.points
    parts = sorted(p.name for p in out.glob("part-*"))
    assert parts == sorted(p.name for p in (tmp_path / "whole").glob("part-*"))
    for name in parts:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not [
        p for p in out.iterdir() if p.name[:4] not in ("part", MANIFEST[:4], "_sto", "_loc")
    ]


def test_what_is_there_is_not_done_again_and_other_spaces_are_refused(tmp_path):
    text = SMALL.format(batches=[1]).partition("[hardware]")[0]
    path = written(tmp_path, text)
    out = tmp_path / "out"
    first = swept(path, out)
    (part,) = out.glob("part-*")
    before = part.stat().st_mtime_ns
    assert swept(path, out).there == first.points == 4
    assert part.stat().st_mtime_ns == before
    written(tmp_path, text.replace("[1]", "[1, 2]"))
    with pytest.raises(UsageError, match="the folder holds the results of another space") as caught:
        swept(path, out)
    assert "another folder with -o" in caught.value.fix
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps(manifest | {"predictor": "tile@1"}))
    written(tmp_path, text)
    with pytest.raises(UsageError, match="another space") as caught:
        swept(path, out)
    assert (caught.value.expected, caught.value.found) == (
        'predictor "tile@2"',
        'predictor "tile@1"',
    )


def test_a_store_is_shared_and_gives_the_same_numbers(tmp_path):
    text = SMALL.format(batches=[1]).partition("[hardware]")[0]
    path = written(tmp_path, text)
    store = tmp_path / "store.sqlite"
    for name in ("a", "b"):
        with begun(path, tmp_path / name, store) as sweep, find_engine("local", 1) as engine:
            sweep.run(engine)
    (a,), (b,) = (list((tmp_path / name).glob("part-*")) for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()


def test_a_store_of_another_version_is_refused(tmp_path):
    path = written(tmp_path, SMALL.format(batches=[1]).partition("[hardware]")[0])
    with Store(tmp_path / "store.sqlite") as store:
        assert store.rests_on("space", {"predictor": "tile@1"}) == {"predictor": "tile@1"}
    with pytest.raises(UsageError, match="the store was made by another version") as caught:
        begun(path, tmp_path / "out", tmp_path / "store.sqlite").__enter__()
    assert caught.value.found == "predictor tile@1" and "predictor tile@2" in caught.value.expected
    assert "another --store, or delete" in caught.value.fix


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    path = written(tmp_path, SMALL.format(batches=[1]).partition("[hardware]")[0])
    out = tmp_path / "out"
    with (
        begun(path, out),
        pytest.raises(UsageError, match="another sweep is running in this folder"),
    ):
        begun(path, out).__enter__()
    with begun(path, out):
        pass


def test_a_folder_with_other_files_is_refused(tmp_path):
    path = written(tmp_path, SMALL.format(batches=[1]))
    with pytest.raises(UsageError, match="the folder contains other files"):
        begun(path, tmp_path).__enter__()


def test_a_model_without_a_dimension_is_refused_before_any_work(tmp_path):
    path = written(tmp_path, SMALL.format(batches=[1]).replace("seq =", "sequence ="))
    with pytest.raises(GpuirError, match="the model has no such dimension"):
        begun(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- engines -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_gives_what_this_process_does(tmp_path):
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'gpuir[ray]'")
    path = written(tmp_path, SMALL.format(batches=[1, 7]))
    swept(path, tmp_path / "here")
    code = (
        "import sys; from test_spaces import swept; swept(*sys.argv[1:3], engine='ray', workers=2)"
    )
    paths = os.pathsep.join([str(p) for p in Path(__file__).parents[:3]])
    subprocess.run(
        [sys.executable, "-c", code, path, str(tmp_path / "ray")],
        check=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    parts = sorted(p.name for p in (tmp_path / "here").glob("part-*"))
    assert parts == sorted(p.name for p in (tmp_path / "ray").glob("part-*"))
    for name in parts:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()


def test_ray_that_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as caught:
        find_engine("ray", None)
    assert "pip install 'gpuir[ray]'" in caught.value.fix


def test_an_unknown_engine_is_said():
    with pytest.raises(UsageError, match="no engine has the name 'rya'"):
        find_engine("rya", None)
