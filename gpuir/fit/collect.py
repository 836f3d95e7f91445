"""A campaign of measurements: a plan's rows timed one after another, each on disk once done.

The table is csv, a row appended and flushed as it is measured, so that a run that is killed loses
nothing, and a run on the same table goes on where the last one ended.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import numpy as np

from gpuir.cost.tile import predict
from gpuir.files import read_text, write_whole
from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.benchmarks import BENCHMARKS, COLUMNS, is_narrow, works_of
from gpuir.fit.campaign import Problem
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.machine import Machine
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.fit.timing import FEWEST, MOST
from gpuir.ir.errors import UsageError
from gpuir.targets.target import Target

HEADER = (
    *("device", "op", "dtype", *COLUMNS, "latency_us", "spread", "repeats", "method"),
    *("torch", "driver", "clock", "when", "note"),
)
BUDGET_S = 1.0  # of one row
SETUP_S = 0.05  # assumed: tensors made and filled, a library's first call
T = TypeVar("T")
MEMORY_SHARE = 0.6  # of what is free, that a row's tensors may take


@dataclass(frozen=True)
class MeasuredRow:
    """A row measured: seconds, or why there are none."""

    problem: Problem
    latency_s: float
    spread: float
    repeats: int
    note: str = ""

    @property
    def is_measured(self) -> bool:
        return not self.note


def measure(machine: Machine, problem: Problem, budget_s: float = BUDGET_S) -> MeasuredRow:
    """One row. What cannot run here (no such dtype, no memory) is said in its note."""
    bytes_moved = float(
        sum(np.sum(w.nbytes) for w in works_of(problem.op, problem.dtype, problem.shape))
    )
    if bytes_moved > MEMORY_SHARE * machine.free_bytes:
        return _failed(problem, f"needs {bytes_moved / 1e9:.3g} GB of memory")
    torch = machine.torch
    with torch.no_grad(), _tf32(torch, problem.dtype == "tf32"):
        try:
            run = BENCHMARKS[problem.op].make(machine.kit(problem.dtype), problem.shape)
            timing = machine.watch(run, budget_s)
        except Exception as error:  # whatever stops a row, the others are measured
            _check_alive(machine, problem, error)
            return _failed(problem, " ".join(str(error).split())[:160] or type(error).__name__)
    return MeasuredRow(problem, timing.seconds, timing.spread, timing.repeats)


def _failed(problem: Problem, why: str) -> MeasuredRow:
    return MeasuredRow(problem, float("nan"), 0.0, 0, why)


def _check_alive(machine: Machine, problem: Problem, error: Exception) -> None:
    """UsageError when the GPU answers nothing more, as after an illegal access."""
    if machine.device == "cuda":
        try:
            machine.torch.cuda.empty_cache()
            machine.torch.cuda.synchronize()
        except RuntimeError as dead:
            raise UsageError(
                "the GPU no longer answers",
                where=str(problem),
                found=" ".join(str(error).split())[:160],
                fix="run again: gpuir keeps the rows that were measured, and tries this row again",
            ) from dead


@contextmanager
def _tf32(torch: Any, allowed: bool) -> Generator[None, None, None]:
    """Products of f32 in TF32, or not, as long as it lasts."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [b.allow_tf32 for b in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = allowed
        yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            backend.allow_tf32 = was


def collect(
    machine: Machine,
    problems: Iterable[Problem],
    path: Path,
    *,
    device: str,
    budget_s: float = BUDGET_S,
    watch: Callable[[MeasuredRow], None] | None = None,
) -> int:
    """Measures the rows that the table at `path` has not, and appends them; gives how many.

    `device` is what the table calls the machine: a target's name or path, or the driver's name.
    """
    problems = list(problems)
    _header(path, problems)  # before the file is touched
    measured = 0
    with _appending(path) as stream:
        # what another process has added in between is there
        left = remaining(problems, path, device)
        header = _header(path, left)
        table = csv.DictWriter(stream, header, extrasaction="ignore", lineterminator="\n")
        if not stream.tell():
            table.writeheader()
        for problem in left:
            row = measure(machine, problem, budget_s)
            table.writerow(_cells(row, machine, device))
            stream.flush()
            os.fsync(stream.fileno())
            measured += 1
            if watch is not None:
                watch(row)
    return measured


def as_parquet(journal: Path, path: Path) -> None:
    """The table as a parquet file, all of it or nothing."""
    try:
        reader: Any = import_module("pyarrow.csv")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            "pyarrow, which writes parquet files, is not installed",
            found=f"the rows are saved in {journal}",
            fix="pip install 'gpuir[eval]', and run again",
        ) from error
    out = BytesIO()
    parquet.write_table(reader.read_csv(journal), out)
    write_whole(path, out.getvalue())


def remaining(problems: Iterable[Problem], path: Path, device: str) -> list[Problem]:
    """The rows of a plan that the table has not."""
    done = _done(path, device)
    return [problem for problem in problems if problem not in done]


def _appending(path: Path) -> TextIO:
    """The file, opened at its end, after its last whole line; UsageError where another process
    appends to it."""
    try:
        stream = path.open("a+b")
        _lock(stream, path)
        end = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        whole = stream.read().rfind(b"\n") + 1
        if whole < end:
            stream.truncate(whole)  # a line that a killed run left half written
        return TextIOWrapper(stream, encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(
            "cannot write the table", where=str(path), found=str(error.strerror)
        ) from error


def _lock(stream: BinaryIO, path: Path) -> None:
    """The file is this process's until it is closed, or the process ends in whatever way. Windows,
    and file systems without locks, have none of that."""
    try:
        fcntl: Any = import_module("fcntl")
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.fstat(stream.fileno()).st_ino)
        stream.close()
        raise UsageError(
            "another process writes measurements into this table",
            where=str(path),
            found=f"process {holder}" if holder else "",
            fix="wait until it ends, or use another file",
        ) from None
    except (ImportError, OSError):
        return


def _holder(inode: int) -> str:
    """The process that has locked a file, where the system says so: `man 5 proc_locks`."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                return words[4]
    return ""


def _lines(path: Path) -> list[str]:
    """The whole lines of a table, of which there may be none."""
    if not os.path.exists(path):
        return []
    text = read_text(path, "the table")
    return text[: text.rfind("\n") + 1].splitlines()


def _header(path: Path, left: Iterable[Problem] = ()) -> tuple[str, ...]:
    """The columns of a table, of which one that was begun earlier may have fewer. UsageError when
    it is a table of something else, or has none for the rows that are to be measured."""
    lines = _lines(path)
    columns = tuple(next(csv.reader(lines), HEADER))
    if not {*HEADER} - {*COLUMNS} <= {*columns} <= {*HEADER}:
        raise UsageError(
            "the file is not a table of collected measurements",
            where=str(path),
            expected=",".join(HEADER),
            found=lines[0][:160],
            fix="use another file for the output",
        )
    missing = {c: problem for problem in left for c in problem.shape if c not in columns}
    if missing:
        raise UsageError(
            f"the table has no column for {', '.join(missing)}",
            where=str(path),
            expected=str(next(iter(missing.values()))),
            fix="use another file for the output: `gpuir eval kernels` reads both",
        )
    return columns


def _done(path: Path, device: str) -> set[Problem]:
    """The rows of a table, failed ones too; UsageError when it is a table of something else."""
    table = csv.DictReader(_lines(path), _header(path))
    return {problem for row in table if row["device"] == device for problem in _problem(row)}


def _problem(row: Mapping[str, str]) -> Iterator[Problem]:
    if row["op"] in BENCHMARKS:
        extents = ((c, row.get(c) or "0") for c in BENCHMARKS[row["op"]].columns)
        yield Problem(row["op"], row["dtype"], tuple((c, int(float(n))) for c, n in extents))


def _cells(row: MeasuredRow, machine: Machine, device: str) -> dict[str, Any]:
    measured = row.is_measured
    return {
        **machine.facts,
        "device": device,
        "op": row.problem.op,
        "dtype": row.problem.dtype,
        **row.problem.shape,
        "latency_us": f"{row.latency_s * 1e6:.6g}" if measured else "",
        "spread": f"{row.spread:.3g}" if measured else "",
        "repeats": row.repeats or "",
        "method": machine.watch.method,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": row.note,
    }


def batches_of(rows: Iterable[MeasuredRow], target: Target) -> list[MeasuredBatch]:
    """Rows measured on a target, as a table of them would read."""
    batches: list[MeasuredBatch] = []
    for op, dtype, group in _alike([row for row in rows if row.is_measured], lambda r: r.problem):
        extents = _extents([row.problem for row in group])
        latency_s = np.array([row.latency_s for row in group])
        works, which = works_of(op, dtype, extents), np.arange(len(group))
        how = ("", op, target.name, dtype, target)
        batch = MeasuredBatch(*how, works=works, which=which, latency_s=latency_s, dims=extents)
        batches.append(batch)
    return batches


def expected_s(target: Target, problems: Iterable[Problem], budget_s: float = BUDGET_S) -> float:
    """About how long measuring the rows takes, by prediction."""
    total = 0.0
    for op, dtype, group in _alike(problems, lambda problem: problem):
        works = works_of(op, dtype, _extents(group))
        call_s = sum(np.broadcast_to(predict(w, target).time_s, (len(group),)) for w in works)
        row_s = np.minimum(np.maximum(budget_s, FEWEST * call_s), MOST * call_s + budget_s)
        total += float(np.sum(SETUP_S + row_s))
    return total


def _alike(
    rows: Iterable[T], problem_of: Callable[[T], Problem]
) -> Iterator[tuple[str, str, list[T]]]:
    """Rows that can stand in one work, with their operator and dtype."""
    groups: dict[tuple[str, str, bool], list[T]] = {}
    for row in rows:
        problem = problem_of(row)
        narrow = bool(is_narrow(problem.op, problem.shape))
        groups.setdefault((problem.op, problem.dtype, narrow), []).append(row)
    for (op, dtype, _), group in groups.items():
        yield op, dtype, group


def _extents(problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    columns = BENCHMARKS[problems[0].op].columns
    return {c: np.array([problem.shape[c] for problem in problems], float) for c in columns}


# ---------------------------------------------------------------------------- reading it back


def _prepared(columns: Columns) -> Columns:
    """The extents that an operator does not have are 1. Narrow convolutions are told apart."""
    extents = {c: columns.numbers(c) for c in COLUMNS}
    ops = columns.words("op")
    narrow = np.zeros(columns.count, bool)
    for op in ops.names:
        rows = ops.where(op)
        for column in {*COLUMNS} - {*(BENCHMARKS[op].columns if op in BENCHMARKS else ())}:
            extents[column] = np.where(rows, 1.0, extents[column])
        narrow |= rows & is_narrow(op, extents)
    marks = WordColumn(narrow.astype(np.int64), ("", "narrow"))
    return columns.with_cells({**extents, "narrow": marks})


def _works(s: Shapes) -> tuple[Any, ...]:
    op, dtype = s.words["op"], s.words["dtype"]
    if op not in BENCHMARKS or dtype not in BENCHMARKS[op].dtypes:
        raise Unmodelled(f"the operator {op} in {dtype} is unknown")
    return works_of(op, dtype, s.extents)


READER = Reader(
    name="collected measurements",
    key=("op", "dtype", "spread", "repeats", "method", "torch", "when"),
    words=("op", "dtype", "narrow"),
    shape=COLUMNS,
    works=_works,
    op=lambda words: words["op"],
    dtype=lambda words: words["dtype"],
    beside=("driver",),
    needs=COLUMNS,
    prepare=_prepared,
)
# A user's own table has what tells a kernel, and need not say how it was measured.
PLAIN = replace(READER, name="measured operators", key=("op", "dtype"))
