"""Results in a store: what it keeps, for whom, and what a killed process leaves."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gpuir
from gpuir.cost.generated import BY
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Tile
from gpuir.tune.keys import kernel_key, kernel_text, target_key, tile_in
from gpuir.tune.results import Results
from gpuir.tune.search import search
from gpuir.tune.space import ranked
from gpuir.tune.tasks import remembered

GEMM = gpuir.kernel("gemm", target="h100-sxm", m=1024, n=1024, k=512)

# A process that measures: it says so when a result is in the store.
WRITER = """
import sys, gpuir
from gpuir.tune.space import Ranked
from gpuir.tune.results import Results
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kernel = gpuir.kernel("gemm", target="h100-sxm", m=1024, n=1024, k=512)
with Results(path) as store:
    for i in range(first, first + count):
        tile = gpuir.Tile((("m", i), ("n", 64), ("k", 32)))
        store.keep_measured(kernel, Ranked(tile, 1e-5, (1e-6, 1e-4)), i * 1e-6)
        print(i, flush=True)
"""


def writer(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measured(path: Path) -> dict[int, float]:
    with Results(path) as store:
        return {tile["m"]: seconds for tile, seconds in store.measured(GEMM).items()}


def test_a_ranking_comes_back(tmp_path: Path):
    found = search(GEMM, tries=100)
    with Results(tmp_path / "s.db") as store:
        assert store.ranking(GEMM, "a") is None
        store.keep_ranking(GEMM, "a", found)
    with Results(tmp_path / "s.db") as store:
        assert store.ranking(GEMM, "a") == found
        assert store.ranking(GEMM, "b") is None
        other = gpuir.kernel("gemm", target="h100-sxm", m=1024, n=1024, k=1024)
        assert store.ranking(other, "a") is None


def test_another_target_is_another_row_and_another_name_is_not(tmp_path: Path):
    tile = search(GEMM).best[0]
    faster = gpuir.load_target("h100-sxm+dram.bytes_per_s=4e12")
    renamed = replace(GEMM.target, name="mine", title="Mine", base=GEMM.target.device)
    with Results(tmp_path / "s.db") as store:
        store.keep_measured(GEMM, tile, 2e-5)
        assert store.measured(replace(GEMM, target=renamed)) == {tile.tile: 2e-5}
        assert store.measured(replace(GEMM, target=faster)) == {}


def test_a_measurement_stays_when_its_tile_is_predicted_again(tmp_path: Path):
    found = search(GEMM, tries=10)
    with Results(tmp_path / "s.db") as store:
        store.keep_measured(GEMM, found.best[2], 2e-5)
        store.keep_ranking(GEMM, "a", found)
        assert store.measured(GEMM) == {found.best[2].tile: 2e-5}
        store.keep_measured(GEMM, found.best[2], 3e-5)  # the last counts
        assert store.measured(GEMM) == {found.best[2].tile: 3e-5}


def test_predictions_of_another_version_are_left_alone(tmp_path: Path):
    found = search(GEMM, tries=10)
    with Results(tmp_path / "s.db", "generated@0") as old:
        old.keep_ranking(GEMM, "a", found)
        old.keep_measured(GEMM, found.best[0], 2e-5)
    with Results(tmp_path / "s.db") as store:
        assert store.predictor == BY and store.others() == {"generated@0": 10}
        assert store.ranking(GEMM, "a") is None and store.results(target_key(GEMM.target)) == []
        assert store.measured(GEMM) == {found.best[0].tile: 2e-5}  # whoever predicted it
        store.forget_others()
        assert store.others() == {"generated@0": 1}  # the one that was measured
        assert store.measured(GEMM) == {found.best[0].tile: 2e-5}


def test_what_a_store_remembers_is_what_was_observed(tmp_path: Path):
    rows = gpuir.kernel("rows", target="h100-sxm", rows=4096, columns=768)
    model = gpuir.Observed(GEMM.target)
    with Results(tmp_path / "s.db") as store:
        for kernel, seconds in ((GEMM, 2e-5), (rows, 9e-6)):
            tile = search(kernel).best[0].tile
            store.keep_measured(kernel, ranked(kernel, tile), seconds)
            model = model.observe(kernel, tile, seconds)
        again = remembered(store, (), GEMM.target)
    assert [x.tile for x in again.seen] == [x.tile for x in model.seen]
    assert [x.kind for x in again.seen] == [x.kind for x in model.seen]
    assert [x.error for x in again.seen] == pytest.approx([x.error for x in model.seen])
    assert [x.deviation for x in again.seen] == pytest.approx([x.deviation for x in model.seen])


def test_two_processes_write_at_once(tmp_path: Path):
    path = tmp_path / "s.db"  # which neither finds there
    both = [writer(path, 16, 100), writer(path, 1016, 100)]
    outputs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert all(len(out.split()) == 100 for out in outputs)
    expected = {i: i * 1e-6 for i in (*range(16, 116), *range(1016, 1116))}
    assert measured(path) == expected


def test_a_killed_process_leaves_whole_results(tmp_path: Path):
    path = tmp_path / "s.db"
    for round in range(3):
        process = writer(path, 16 + 10_000 * round, 10_000)
        assert process.stdout
        with process.stdout as lines:
            said = [int(lines.readline()) for _ in range(20 + 7 * round)]
            process.send_signal(signal.SIGKILL)
            said += map(int, lines.read().split())
        assert process.wait() == -signal.SIGKILL
        kept = measured(path)
        assert {i: i * 1e-6 for i in said}.items() <= kept.items()
        with closing(sqlite3.connect(path)) as plain:
            assert plain.execute("pragma integrity_check").fetchone() == ("ok",)


def test_keys_stay():
    """What a store of an earlier gpuir is found by: a change here loses users' measurements."""
    work = gpuir.kernel("gemm", m=8, n=64, k=32, dtype="bf16").work
    assert kernel_key(work) == kernel_key(work.each(float))
    assert kernel_key(work) != kernel_key(gpuir.kernel("gemm", m=8, n=64, k=32).work)
    assert kernel_text(work) == "gemm bf16.b=1 m=8 n=64 k=32 bytes=5632 flops=32768 ops=0"
    assert kernel_key(work) == "9d4daf546c26386e"
    with pytest.raises(UsageError, match="one kernel at a time"):
        kernel_key(work.each(lambda n: np.array([n, n])))


def test_tiles_are_read_back():
    for tile in (
        Tile((("m", 128), ("n", 64)), 3, 8, 2, 4, 2),
        Tile((("y", 4),), 1, 4, threads=(("x", 32),), vector=(("x", 4),), pad=((1, 1),)),
        Tile(()),
    ):
        assert tile_in(tile.settings) == tile
