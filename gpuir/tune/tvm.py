"""TVM's MetaSchedule: a cost model that knows a candidate before anything was measured.

    ms.tune_tir(mod, target, work_dir, 64, cost_model=cost_model("x86-64-v4", cores=2))
    database = rank(mod, "nvidia/nvidia-h100", "h100-sxm", work_dir, trials=64)  # without a GPU

A candidate is read off its scheduled TIR (`tir`). For a GPU it is a `Kernel` and a tile, which
`gpuir.predict` knows; for a CPU its tiles are held against the caches (`loops`). What was measured
corrects the predictions of what is like it.

TVM: Chen et al., OSDI 2018; MetaSchedule: Shao et al., NeurIPS 2022; Apache-2.0 licence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Schedule
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune import space
from gpuir.tune.correct import differences
from gpuir.tune.kernels import Kernel
from gpuir.tune.loops import TERMS, cpu_seconds, cpu_terms
from gpuir.tune.space import Floats
from gpuir.tune.tir import Unread, read_kernel, read_tile, statements, tiles_of

UNREAD = 4.0  # times the slowest candidate that could be read, what another counts for
FASTEST_S = 1e-9  # of a term of a CPU's seconds, where features are its logarithms


# ---------------------------------------------------------------------------- predictions


@dataclass
class Guess:
    """Seconds and features of candidates of one workload, and what was measured of them."""

    target: Target
    cores: int
    kernel: Kernel | None = None
    main: str = ""
    points: list[Floats] = field(default_factory=list[Floats])
    found: list[float] = field(default_factory=list[float])

    def read(self, mods: Sequence[Any]) -> tuple[Floats, Floats]:
        """Seconds of each, infinite where nothing is known, and a row of features of each."""
        if self.target.is_cpu:
            rows = [self._cpu(mod) for mod in mods]
            width = len(TERMS)
            features = np.array([r[1] if r else np.zeros(width) for r in rows])
            return np.array([r[0] if r else np.inf for r in rows]), features
        return self._gpu(mods)

    def _cpu(self, mod: Any) -> tuple[float, Floats] | None:
        try:
            found = statements(mod)
        except Unread:
            return None
        if not found:
            return None
        main = max(found, key=lambda s: s.runs)
        terms = cpu_terms(main, self.target, self.cores)
        seconds = cpu_seconds(found, self.target, self.cores)
        return seconds, np.log(np.maximum([terms[name] for name in TERMS], FASTEST_S))

    def _gpu(self, mods: Sequence[Any]) -> tuple[Floats, Floats]:
        seconds = np.full(len(mods), np.inf)
        if self.kernel is None:
            return seconds, np.zeros((len(mods), 1))
        rows: dict[int, dict[str, Any]] = {}
        for i, mod in enumerate(mods):
            with suppress(Unread):
                rows[i] = read_tile(mod, self.main, self.kernel)
        features: dict[int, Floats] = {}
        for order in {tuple(row["threads"]) for row in rows.values()}:
            places = [i for i, row in rows.items() if tuple(row["threads"]) == order]
            tiles = tiles_of([rows[i] for i in places])
            seconds[places] = space.predict(self.kernel, tiles, self.target).time_s
            columns = [m[d] for m in (tiles.dims, tiles.threads) for d in sorted(m)]
            points = np.log2(np.stack(np.broadcast_arrays(*columns, tiles.unroll), axis=1))
            features |= dict(zip(places, points, strict=True))
        dims = len(self.kernel.work.dims)
        blank = np.zeros(2 * dims + 1)  # tile and threads along each, and the unrolling
        return seconds, np.array([features.get(i, blank) for i in range(len(mods))])

    def corrected(self, mods: Sequence[Any]) -> Floats:
        """Logarithms of the seconds of each."""
        seconds, features = self.read(mods)
        log_s = _finite(seconds)
        if self.found:
            log_s = log_s + differences(features, np.array(self.points), np.array(self.found))[0]
        return log_s

    def learn(self, mods: Sequence[Any], measured: Sequence[float]) -> None:
        """Takes in what was measured, in seconds."""
        seconds, features = self.read(mods)
        for predicted, point, took in zip(seconds, features, measured, strict=True):
            if np.isfinite(predicted) and np.isfinite(took) and took > 0:
                self.points.append(point)
                self.found.append(float(np.log(took / predicted)))


def _finite(seconds: Floats) -> Floats:
    known = np.isfinite(seconds)
    if not known.any():
        return np.zeros(len(seconds))
    logs = np.log(np.where(known, seconds, 1.0))
    return np.where(known, logs, logs[known].max() + np.log(UNREAD))


def cost_model(target: str | Target, *, cores: int = 0, learns: bool = True) -> Any:
    """A cost model for `tune_tir(..., cost_model=...)`, warm from the first candidate.

    `target` is gpuir's name of the device: a GPU, or a CPU such as x86-64-v4, of which the schedule
    runs on `cores` (all of them where 0). Scores are the best prediction over each, so from 0 to 1.
    With `learns`, what TVM measures corrects the predictions of candidates that are like it.
    """
    device = _device(target)
    libraries = _tvm()
    guesses: dict[int, Guess] = {}

    def guess(context: Any) -> Guess:
        key = libraries.structural_hash(context.mod)
        if key not in guesses:
            guesses[key] = _guess(context.mod, device, cores)
        return guesses[key]

    class Predicted(libraries.models.PyCostModel):
        def load(self, path: str) -> None:
            """Nothing is kept between runs."""

        def save(self, path: str) -> None:
            """Nothing is kept between runs."""

        def update(self, context: Any, candidates: Any, results: Any) -> None:
            if learns:
                seconds = [_mean(r.run_secs) for r in results]
                guess(context).learn([c.sch.mod for c in candidates], seconds)

        def predict(self, context: Any, candidates: Any) -> Floats:
            log_s = guess(context).corrected([c.sch.mod for c in candidates])
            return np.exp(log_s.min() - log_s)

    return libraries.derived_object(Predicted)()


def _guess(mod: Any, target: Target, cores: int) -> Guess:
    """Of a workload, of which nothing was measured yet."""
    found = Guess(target, cores or target.sms)
    if not target.is_cpu:
        with suppress(Unread):
            found.kernel, found.main = read_kernel(mod)
    return found


def _mean(seconds: Any) -> float:
    numbers = [float(x) for x in seconds] if seconds is not None else []
    return float(np.mean(numbers)) if numbers else np.inf


def _device(target: str | Target) -> Target:
    return load_target(target) if isinstance(target, str) else target


def schedule_of(workload: Any, scheduled: Any, target: str | Target) -> Schedule:
    """The tile of a module scheduled for a GPU, as the schedule of a graph of this kernel alone."""
    device = _device(target)
    try:
        kernel, main = read_kernel(workload)
        tiles = tiles_of([read_tile(scheduled, main, kernel)])
    except Unread as why:
        raise UsageError(
            "the schedule has no tile",
            expected="one GPU function whose loops are bound to blocks and threads",
            found=str(why),
        ) from None
    return Schedule(kernel.name, device.name, (((kernel.name,), tiles.note(0)),))


# ---------------------------------------------------------------------------- without a device


def rank(
    mod: Any,
    device: Any,
    target: str | Target,
    work_dir: str | Path,
    trials: int,
    **options: Any,
) -> Any:
    """Tunes for a device that is not there: TVM's own search, whose runs are predictions.

    `device` is TVM's target, or its tag ("nvidia/nvidia-h100"), `target` gpuir's. Gives TVM's
    database; its records hold predicted seconds. `options` are those of `tune_tir`, but for what
    builds, runs and scores.

    TVM's own list of what to do after a run ends with RemoveBuildArtifact, which deletes the whole
    folder that an artifact lies in. Here each artifact has a temporary folder to itself, and that
    list is not used.
    """
    libraries = _tvm()
    own = ("builder", "runner", "cost_model", "measure_callbacks")
    if given := [name for name in own if name in options]:
        raise UsageError(
            f"rank sets {given[0]} itself",
            expected="only other options of tune_tir",
            fix="call tune_tir with cost_model(target), on a machine with a "
            "device for measurements",
        )
    ms = libraries.ms
    where = libraries.Target(device) if isinstance(device, str) else device
    with tempfile.TemporaryDirectory(prefix="gpuir-tvm-") as folder:
        return ms.tune_tir(
            mod,
            target=where,
            work_dir=str(work_dir),
            max_trials_global=trials,
            cost_model=cost_model(target),
            builder=builder(mod, target, Path(folder)),
            runner=runner(),
            measure_callbacks=callbacks(),
            **{"num_tuning_cores": 1} | options,
        )


def callbacks() -> list[Any]:
    """What TVM is to do after runs that were none: never RemoveBuildArtifact."""
    found = _tvm().ms.measure_callback
    return [found.AddToDatabase(), found.UpdateCostModel()]


def builder(mod: Any, target: str | Target, folder: Path) -> Any:
    """A builder that builds nothing: its artifact is a text with the predicted seconds, in a new
    folder of its own below `folder`, since TVM may delete the folder that an artifact lies in."""
    libraries = _tvm()
    guess = _guess(mod, _device(target), 0)
    folder.mkdir(parents=True, exist_ok=True)

    class Predicted(libraries.ms.builder.PyBuilder):
        def build(self, build_inputs: Any) -> list[Any]:
            seconds = guess.read([x.mod for x in build_inputs])[0]
            return [self.written(float(t)) for t in seconds]

        def written(self, seconds: float) -> Any:
            if not np.isfinite(seconds):
                return libraries.ms.builder.BuilderResult(None, "not legal on the target")
            artifact = Path(tempfile.mkdtemp(dir=folder)) / "predicted.txt"
            artifact.write_text(repr(seconds))
            return libraries.ms.builder.BuilderResult(str(artifact), None)

    return libraries.derived_object(Predicted)()


def runner() -> Any:
    """A runner that runs nothing: it reads the seconds that `builder` wrote."""
    libraries = _tvm()
    result, future = libraries.ms.runner.RunnerResult, libraries.ms.runner.RunnerFuture

    class Predicted(libraries.ms.runner.PyRunner):
        def run(self, runner_inputs: Any) -> list[Any]:
            return [self.read(Path(str(x.artifact_path))) for x in runner_inputs]

        def read(self, artifact: Path) -> Any:
            seconds = float(artifact.read_text())
            return future(f_done=lambda: True, f_result=lambda: result([seconds], None))

    return libraries.derived_object(Predicted)()


def _tvm() -> SimpleNamespace:
    """TVM's modules; UsageError where it is not installed, or is a version without them."""
    try:
        return SimpleNamespace(
            structural_hash=import_module("tvm_ffi").structural_hash,
            ms=import_module("tvm.s_tir.meta_schedule"),
            models=import_module("tvm.s_tir.meta_schedule.cost_model"),
            derived_object=import_module("tvm.ir.utils").derived_object,
            Target=import_module("tvm.target").Target,
        )
    except (ImportError, AttributeError, OSError) as error:
        raise UsageError(
            "TVM is not installed, or not 0.27 with the apache-tvm-ffi that it works with",
            found=str(error),
            fix="pip install 'gpuir[tvm]'",
        ) from error
