"""TVM's MetaSchedule on one core of this machine, guided by gpuir, by XGBoost, and by nothing.

    TVM_NUM_THREADS=1 python benchmarks/tvm_models.py --trials 64 --seeds 2 --out /tmp/tvm

Tunes f32 products with the same seeds, 16 trials a round, and prints the best time of the first 16,
32 and 64 trials, in microseconds. Needs `gpuir[tvm]`, and xgboost (Apache-2.0) for its model.
Candidates are built and run in this process, which is quicker than TVM's workers, and the least of
many runs counts: other work on the machine makes runs longer, not shorter.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

SHAPES = {"square": (512, 512, 512), "wide": (64, 2048, 1024)}
MARKS = (16, 32, 64)


def product(m: int, n: int, k: int) -> Any:
    """c[m, n] = sum over k of a[m, k] b[k, n], as TIR."""
    from tvm import te

    a = te.placeholder((m, k), name="a", dtype="float32")
    b = te.placeholder((k, n), name="b", dtype="float32")
    r = te.reduce_axis((0, k), name="r")
    c = te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    return te.create_prim_func([a, b, c])


def tuned(shape: str, model: str, seed: int, trials: int, out: Path) -> list[float]:
    """Seconds of each trial that ran, in order."""
    from tvm.s_tir import meta_schedule as ms
    from tvm.target import Target

    from gpuir.tune.tvm import callbacks, cost_model

    folder = out / f"{shape}-{model}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    ms.tune_tir(
        product(*SHAPES[shape]),
        target=Target({"kind": "llvm", "num-cores": 1, "mcpu": "x86-64-v4"}),
        work_dir=str(folder),
        max_trials_global=trials,
        num_trials_per_iter=16,
        cost_model=cost_model("x86-64-v4", cores=1) if model == "gpuir" else model,
        seed=seed,
        num_tuning_cores=2,
        measure_callbacks=callbacks(),
        **dict(zip(("builder", "runner"), here(shape), strict=True)),
    )
    return times(folder)


def here(shape: str) -> tuple[Any, Any]:
    """A builder and a runner in this process; artifacts are names of what it holds, no files."""
    import numpy as np
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.runner import PyRunner, RunnerFuture, RunnerResult

    m, n, k = SHAPES[shape]
    given = [np.random.default_rng(0).random(s, np.float32) for s in ((m, k), (k, n), (m, n))]
    arrays = [tvm.runtime.tensor(a) for a in given]
    held: dict[str, Any] = {}

    def built(x: Any) -> Any:
        try:
            name = f"held-{len(held)}"
            held[name] = tvm.compile(x.mod, target=x.target).jit()
            return BuilderResult(name, None)
        except Exception as error:
            return BuilderResult(None, str(error))

    def ran(name: str) -> Any:
        run = held.pop(name)
        held[name] = None
        evaluate = run.time_evaluator("main", tvm.cpu(), number=1, repeat=30)
        seconds = min(evaluate(*arrays).results)
        return RunnerFuture(f_done=lambda: True, f_result=lambda: RunnerResult([seconds], None))

    class Builder(PyBuilder):
        def build(self, build_inputs: Any) -> list[Any]:
            return [built(x) for x in build_inputs]

    class Runner(PyRunner):
        def run(self, runner_inputs: Any) -> list[Any]:
            return [ran(str(x.artifact_path)) for x in runner_inputs]

    return derived_object(Builder)(), derived_object(Runner)()


def times(folder: Path) -> list[float]:
    """What a run's database holds: a record is [workload, [trace, seconds, target, arguments]]."""
    lines = (folder / "database_tuning_record.json").read_text().splitlines()
    runs = (json.loads(line)[1][1] for line in lines)
    return [sum(r) / len(r) for r in runs if r]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trials", type=int, default=64)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--models", default="random,xgb,gpuir")
    options.add_argument("--shapes", default=",".join(SHAPES))
    options.add_argument("--out", type=Path, default=Path("/tmp/tvm"))
    given = options.parse_args()
    for shape in given.shapes.split(","):
        for seed in range(given.seeds):
            for model in given.models.split(","):
                found = tuned(shape, model, seed, given.trials, given.out)
                best = "".join(f"{min(found[:n]) * 1e6:10.1f}" for n in MARKS if n <= given.trials)
                print(f"{shape:8} seed {seed} {model:8}{best}  us of {len(found)}", flush=True)


if __name__ == "__main__":
    main()
