"""What is predicted of cases: several programs at a time, and each kept as soon as it is there."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

import gpuir
from gpuir.files import read_text
from gpuir.ir.errors import GpuirError, UsageError
from validation.throughput.cases import Case, Program

LINE = '{"name": '  # how each line of what is kept begins
ELSEWHERE = "--store another file, or delete this one"
Watch = Callable[[str], None]
Key = tuple[str, str, bool | None]  # target, profile, TF32


@dataclass(frozen=True)
class Predicted:
    """Seconds of a case: in all, between what 80 % of measurements lie, on the device alone, and by
    the roofline; how many launches. `why` says why there is no prediction, and is empty else."""

    time_s: float = math.nan
    low_s: float = math.nan
    high_s: float = math.nan
    device_s: float = math.nan
    roofline_s: float = math.nan
    launches: int = 0
    why: str = ""


Result = tuple[Case, Predicted]


def predict(
    cases: Sequence[Case], *, jobs: int, kept: Path | None, watch: Watch
) -> Iterator[Result]:
    """Every case with its prediction, in the order in which they are done.

    `kept` is a file of what was predicted before, a line a case: those are not made again, as long
    as the code and the numbers that they came from are the same.
    """
    known = _read(kept)
    programs: dict[Program, list[Case]] = {}
    for case in cases:
        name = name_of(case)
        if name in known:
            yield case, known[name]
        else:
            programs.setdefault(case.program, []).append(case)
    left = len(programs)
    if not left:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, left), mp_context=context) as pool:
        asked: dict[Future[dict[Key, Predicted]], list[Case]] = {}
        for program, some in programs.items():
            keys = tuple(dict.fromkeys((c.target, c.profile, c.tf32) for c in some))
            asked[pool.submit(predicted, program, keys)] = some
        for done in as_completed(asked):
            found, left = done.result(), left - 1
            for case in asked[done]:
                result = found[case.target, case.profile, case.tf32]
                _keep(kept, case, result)
                watch(_line(case, result, left))
                yield case, result


def predicted(program: Program, keys: Sequence[Key]) -> dict[Key, Predicted]:
    """What one program takes on each target under each profile."""
    from validation.throughput.programs import graphs

    try:
        parts = graphs(program)
    except GpuirError as error:
        return {key: Predicted(why=str(error)) for key in keys}
    return {key: _predicted(parts, *key) for key in keys}


def _predicted(
    parts: Sequence[tuple[gpuir.Graph, int]], target: str, profile: str, tf32: bool | None
) -> Predicted:
    total, launches = np.zeros(5), 0
    try:
        for graph, runs in parts:
            kernels = gpuir.lower(graph, profile=profile, tf32=tf32, target=target)
            s = gpuir.analyze(kernels, target)
            roofline = gpuir.analyze(kernels, target, predictor="roofline")
            low, high = s.interval or (math.nan, math.nan)
            total += runs * np.array([s.latency_s, low, high, s.device_s, roofline.latency_s])
            launches += runs * s.launches
    except GpuirError as error:
        return Predicted(why=str(error))
    return Predicted(*total.tolist(), launches=launches)


# ---------------------------------------------------------------------------- what is kept


def name_of(case: Case) -> str:
    """What a prediction follows from: the case, and all code and numbers that made it."""
    key = (astuple(case.program), case.target, case.profile, case.tf32, _source())
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


@lru_cache(1)
def _source() -> str:
    """Of all files that say what is predicted."""
    package, here = Path(gpuir.__file__).parent, Path(__file__).parent
    files = [p for p in package.rglob("*") if p.suffix in (".py", ".json", ".toml")]
    files += [*(package.parent / "specs").rglob("*.toml"), here / "programs.py"]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()


def _read(kept: Path | None) -> Mapping[str, Predicted]:
    """A line that was not written whole is left out. UsageError for a file of something else."""
    found: dict[str, Predicted] = {}
    if kept is None or not kept.exists():
        return found
    text = read_text(kept, "the kept predictions", fix=ELSEWHERE)
    for line in text.splitlines():
        try:
            record = json.loads(line)
            name = record.pop("name")
            found[name] = Predicted(**record)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    if text and not found and not text.startswith(LINE):
        raise UsageError("the file keeps no predictions", where=str(kept), fix=ELSEWHERE)
    return found


def _keep(kept: Path | None, case: Case, result: Predicted) -> None:
    if kept is not None and not result.why:
        with kept.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"name": name_of(case), **asdict(result)}) + "\n")


def _line(case: Case, result: Predicted, left: int) -> str:
    if result.why:
        said = result.why.splitlines()[0]
    else:
        said = f"{100 * (result.time_s / case.measured_s - 1):+.1f} %"
    return f"{case.program}, {case.profile} on {case.target}: {said}; {left} programs left"
