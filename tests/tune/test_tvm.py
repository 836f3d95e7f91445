"""TVM: what is read off its TIR, by hand; tuning runs on the CPU and, without one, for a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.tune.tir import Unread, read_kernel, read_tile, statements, tiles_of
from gpuir.tune.tvm import builder, callbacks, cost_model, rank, runner, schedule_of

tvm = pytest.importorskip("tvm", reason="needs gpuir[tvm]")

from tvm import te  # noqa: E402
from tvm.s_tir import Schedule  # noqa: E402

M, N, K = 256, 512, 128


def product(m: int = M, n: int = N, k: int = K, then: bool = False) -> Any:
    """c[i, j] = sum over r of a[i, r] b[r, j], and twice that where `then`, as a module."""
    a = te.placeholder((m, k), name="a", dtype="float32")
    b = te.placeholder((k, n), name="b", dtype="float32")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    last = te.compute((m, n), lambda i, j: c[i, j] * 2.0, name="d") if then else c
    return tvm.IRModule({"main": te.create_prim_func([a, b, last])})


def convolution() -> Any:
    """y[i, j] = sum over u, v of x[2 i + u, j + v] w[u, v]."""
    x = te.placeholder((66, 34), name="x", dtype="float32")
    w = te.placeholder((3, 3), name="w", dtype="float32")
    u, v = te.reduce_axis((0, 3), name="u"), te.reduce_axis((0, 3), name="v")
    y = te.compute(
        (32, 32), lambda i, j: te.sum(x[2 * i + u, j + v] * w[u, v], axis=[u, v]), name="y"
    )
    return tvm.IRModule({"main": te.create_prim_func([x, w, y])})


def for_a_gpu(vector: int = 4, unroll: int = 64) -> Any:
    """Blocks of 64 by 128, 8 rows of 16 threads, each 8 rows by 8 columns, steps of 16, both
    operands through shared memory."""
    s = Schedule(product())
    block = s.get_sblock("c")
    i, j, r = s.get_loops(block)
    i0, i1, i2 = s.split(i, [None, 8, 8])
    j0, j1, j2 = s.split(j, [None, 16, 8])
    r0, r1 = s.split(r, [None, 16])
    s.reorder(i0, j0, i1, j1, r0, r1, i2, j2)
    s.bind(s.fuse(i0, j0), "blockIdx.x")
    thread = s.fuse(i1, j1)
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(s.cache_write(block, 0, "local"), thread)
    for place in (0, 1):
        copy = s.cache_read(block, place, "shared")
        s.compute_at(copy, r0)
        fused = s.fuse(*s.get_loops(copy)[3:])
        *_, threads, wide = s.split(fused, [None, 128, vector])
        s.bind(threads, "threadIdx.x")
        s.vectorize(wide)
    s.annotate(thread, "pragma_auto_unroll_max_step", unroll)
    return s.mod


def test_statements_of_a_product():
    (s,) = statements(product())
    assert [x.extent for x in s.loops] == [M, N, K] and s.reduced == {"c"}
    assert [(a.buffer, a.writes) for a in s.accesses] == [("a", False), ("b", False), ("c", True)]
    assert s.accesses[1].axes == (((1, "c"),), ((1, "b"),))
    assert [s.name for s in statements(product(then=True))] == ["c", "d"]


def test_the_kernel_of_a_module():
    kernel, main = read_kernel(product(then=True))
    assert main == "c" and kernel.work.extents == {"a": M, "b": N, "c": K}
    assert kernel.work.reduced == ("c",) and kernel.work.flops == M * N * K
    window, _ = read_kernel(convolution())
    assert [o.dims for o in window.work.operands] == [("2a+c", "b+d"), ("c", "d"), ("a", "b")]


def test_the_tile_of_a_schedule():
    kernel, main = read_kernel(product())
    tile = read_tile(for_a_gpu(), main, kernel)
    assert tile["dims"] == {"a": 64, "b": 128, "c": 16}
    assert list(tile["threads"].items()) == [("b", 16), ("a", 8), ("c", 1)] and tile["warps"] == 4
    assert tile["strided"] == {"a": 0, "b": 0, "c": 0} and tile["fetch"] == {0: 4, 1: 32}
    assert tile["vector"] == {"c": 4, "b": 4} and tile["direct"] == {0: 0, 1: 0}
    assert tile["unroll"] == 16  # of the 16 steps of r
    tiles = tiles_of([tile, read_tile(for_a_gpu(2, 0), main, kernel)])
    assert tiles.vector["b"].tolist() == [4, 2] and np.asarray(tiles.unroll).tolist() == [16, 1]


def test_a_schedule_as_text():
    text = gpuir.show(schedule_of(product(), for_a_gpu(), "h100-sxm"))
    assert "%c: tile(a=64, b=128, c=16; stages=1, warps=4, unroll=16, threads.b=16" in text
    with pytest.raises(UsageError, match="no tile") as e:
        schedule_of(product(), product(), "h100-sxm")
    assert "no loop is bound to blocks" in str(e.value)


def test_what_cannot_be_read_is_no_guess():
    x = te.placeholder((64,), name="x", dtype="float32")
    y = te.compute((128,), lambda i: x[i // 2], name="y")
    with pytest.raises(Unread, match="has an index that is not a sum of loops"):
        read_kernel(tvm.IRModule({"main": te.create_prim_func([x, y])}))
    model = cost_model("h100-sxm")
    mod = tvm.IRModule({"main": te.create_prim_func([x, y])})
    assert scored(model, mod, [mod, mod]).tolist() == [1.0, 1.0]


def scored(model: Any, mod: Any, mods: list[Any]) -> Any:
    """What a cost model says of scheduled modules, without TVM's search around it."""
    candidates = [SimpleNamespace(sch=SimpleNamespace(mod=m)) for m in mods]
    return model._inst.predict(SimpleNamespace(mod=mod), candidates)


def cut(rows: int, columns: int, *, vector: bool = True) -> Any:
    """A product cut for a CPU."""
    s = Schedule(product())
    i, j, r = s.get_loops(s.get_sblock("c"))
    i0, i1 = s.split(i, [None, rows])
    j0, j1 = s.split(j, [None, columns])
    s.reorder(i0, j0, r, i1, j1)
    s.parallel(i0)
    if vector:
        s.vectorize(j1)
    return s.mod


def test_scores_are_up_to_1_and_better_for_better_schedules():
    mods = [cut(8, 16), cut(8, 16, vector=False), product()]
    found = scored(cost_model("x86-64-v4", cores=2), product(), mods)
    assert found[0] == 1.0 and 0 < found[2] < found[1] < 1.0


def test_measurements_change_the_scores():
    """What is measured slow, and what is like it, is not tried again before the rest."""
    mods = [cut(8, 16), cut(8, 32), product()]
    learns, stays = (cost_model("x86-64-v4", cores=2, learns=x) for x in (True, False))
    before = scored(learns, product(), mods)
    context = SimpleNamespace(mod=product())
    candidates = [SimpleNamespace(sch=SimpleNamespace(mod=m)) for m in mods]
    took = [SimpleNamespace(run_secs=[t]) for t in (1e-3, 1e-3, 1e-5)]
    failed = [SimpleNamespace(run_secs=None)] * 3
    for model in (learns, stays):
        model._inst.update(context, candidates, failed)
        assert scored(model, product(), mods).tolist() == before.tolist()
        model._inst.update(context, candidates, took)
    assert scored(learns, product(), mods).argmax() == 2
    assert scored(stays, product(), mods).tolist() == before.tolist()


def test_artifacts_lie_in_folders_of_their_own(tmp_path: Path):
    """TVM's own callbacks delete the whole folder that an artifact lies in."""
    built = builder(product(), "h100-sxm", tmp_path / "artifacts")
    mods = [for_a_gpu(), for_a_gpu(2)]
    results = built._inst.build([SimpleNamespace(mod=m) for m in mods])
    paths = [Path(str(r.artifact_path)) for r in results if r.artifact_path is not None]
    folders = {p.parent for p in paths}
    assert len(folders) == len(paths) and all(f.parent == tmp_path / "artifacts" for f in folders)
    assert all(list(p.parent.iterdir()) == [p] for p in paths)
    shutil.rmtree(paths[0].parent)  # as TVM's RemoveBuildArtifact does
    assert [p.exists() for p in paths] == [False] + [True] * (len(paths) - 1)
    paths[0].parent.mkdir()
    paths[0].write_text("1.0")
    futures = runner()._inst.run([SimpleNamespace(artifact_path=str(p)) for p in paths])
    kernel, main = read_kernel(product())
    expected = gpuir.predict(
        kernel, tiles_of([read_tile(m, main, kernel) for m in mods]), "h100-sxm"
    )
    wanted = [1.0, *(t for t in expected.time_s.tolist()[1:] if np.isfinite(t))]
    assert [float(f.result().run_secs[0]) for f in futures] == wanted


def test_the_callback_that_deletes_is_not_used():
    kinds = [type(c).__name__ for c in callbacks()]
    assert kinds == ["AddToDatabase", "UpdateCostModel"]


def test_rank_sets_what_builds_and_runs(tmp_path: Path):
    with pytest.raises(UsageError, match="rank sets measure_callbacks itself"):
        rank(product(), "nvidia/nvidia-h100", "h100-sxm", tmp_path, 4, measure_callbacks="default")


EXAMPLE = Path(__file__).parents[2] / "examples" / "tune_with_tvm.py"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_example_tunes(device: str, tmp_path: Path):
    """On this CPU, and for a GPU that is not there. In a process of its own: TVM's logging reads
    the handlers that it finds, and stops at those of pytest."""
    (tmp_path / "beside.txt").write_text("still there")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), device, "4"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "beside.txt").read_text() == "still there"
    assert ("us measured" if device == "cpu" else "schedule @c for h100-sxm") in done.stdout
