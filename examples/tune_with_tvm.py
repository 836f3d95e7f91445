"""Tunes a matrix product with TVM's MetaSchedule, with gpuir as its cost model.

    python examples/tune_with_tvm.py cpu 16     measures on this CPU
    python examples/tune_with_tvm.py gpu 16     for an H100, without one: runs are predictions

Prints the best of so many trials; for the GPU, its tile as a schedule of gpuir's too. Needs
`gpuir[tvm]`. The search is kept small so that it ends in a minute; leave out `strategy` for TVM's
own, which looks at thousands of candidates.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

import gpuir
from gpuir.tune.tvm import cost_model, rank, schedule_of

M, N, K = 256, 512, 128


def product() -> Any:
    """c[i, j] = sum over r of a[i, r] b[r, j]."""
    a = te.placeholder((M, K), name="a", dtype="float32")
    b = te.placeholder((K, N), name="b", dtype="float32")
    r = te.reduce_axis((0, K), name="r")
    c = te.compute((M, N), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def main(device: str, trials: int) -> None:
    mod = product()
    with tempfile.TemporaryDirectory() as work_dir:
        options: dict[str, Any] = {
            "num_trials_per_iter": max(trials // 2, 1),
            "num_tuning_cores": 1,
            "seed": 0,
            "strategy": ms.search_strategy.EvolutionarySearch(
                population_size=64, init_min_unmeasured=16, genetic_num_iters=2
            ),
        }
        if device == "cpu":
            database = ms.tune_tir(
                mod,
                target=Target({"kind": "llvm", "num-cores": 2}),
                work_dir=work_dir,
                max_trials_global=trials,
                cost_model=cost_model("x86-64-v4", cores=2),
                **options,
            )
        else:
            where = Target("nvidia/nvidia-h100")
            database = rank(mod, where, "h100-sxm", work_dir, trials, **options)
        records = database.get_all_tuning_records()
        if not records:
            raise SystemExit("no candidate ran")
        best = min(records, key=lambda record: float(record.run_secs[0]))
        schedule = Schedule(mod)
        best.trace.apply_to_schedule(schedule, remove_postproc=False)
    microseconds = float(best.run_secs[0]) * 1e6
    if device == "cpu":
        print(f"{microseconds:.1f} us measured, the best of {len(records)}")
    else:
        print(f"{microseconds:.1f} us predicted, the best of {len(records)}")
        print(gpuir.show(schedule_of(mod, schedule.mod, "h100-sxm")))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
