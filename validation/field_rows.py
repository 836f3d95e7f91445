"""Published measurements with their commands: what a row means, and how rows are scored."""

from __future__ import annotations

import ast
import csv
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from io import StringIO
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

GROUPS = ("software", "dtype", "generation", "regime", "phase")
COLUMNS = ("id", "source", "gpu", *GROUPS, "measured_s", "command", "expr", "read")
MORE = ("path", "date", "version", "model", "shape", "suspect", "notes")
ENGINES = ("vLLM", "TensorRT-LLM", "SGLang")
# Rows told apart: their times also hang on schedulers, on networks, on other clients.
APART: Mapping[str, Callable[[FieldRow], bool]] = {
    "serving engines": lambda r: r.software in ENGINES,
    "many GPUs": lambda r: r.regime == "many GPUs",
    "a shared GPU": lambda r: r.regime == "shared",
}
OPTIONS = Path(__file__).with_name("field_options.csv")
REST = "one GPU, no serving engine"
# In what a product runs: of 8 and 4 bits where only weights are, in that of the activations.
PRODUCTS: Mapping[str, str] = {
    "fp16": "f16",
    "bf16": "bf16",
    "fp32": "f32",
    "tf32": "tf32",
    "fp8": "f8e4m3",
    "amp fp16": "f16",
    "amp bf16": "bf16",
    "int8wo": "bf16",
    "int4wo": "bf16",
}
SIGNS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: float.__add__,
    ast.Sub: float.__sub__,
    ast.Mult: float.__mul__,
    ast.Div: float.__truediv__,
}
LETTERS = "abcdefgh"
COMMANDS = (("analyze",), ("simulate",), ("mig", "plan"))


@dataclass(frozen=True)
class FieldRow:
    """A measurement. `expr` says how the times of its commands (a, b, ... in order) add up to it,
    and `read` which times are meant: empty for the latency, `device` for the kernels alone,
    `mean:WAY` for the mean run of models that share a GPU in that way."""

    id: str
    source: str
    gpu: str
    software: str
    dtype: str
    generation: str
    regime: str
    phase: str
    measured_s: float
    command: str
    expr: str = ""
    read: str = ""
    path: str = ""
    date: str = ""
    version: str = ""
    model: str = ""
    shape: str = ""
    suspect: str = ""
    notes: str = ""

    @property
    def questions(self) -> list[Question]:
        """Its commands, each with the options that its source says more of (`GainedOptions`)."""
        commands = (x.strip() for x in self.command.split(" ; "))
        asked = (" ".join((x, *gained(self.source, x))) for x in commands)
        return [Question(x, self.read, PRODUCTS.get(self.dtype, "f16")) for x in asked]

    @property
    def apart(self) -> str:
        """Why it is no row of the main figure; empty for one that is."""
        return next((name for name, holds in APART.items() if holds(self)), "")


class GainedOptions(NamedTuple):
    """Options that commands of a source gain, of those that have these words: what its page says,
    and the command beside the measurement does not. Of an option given twice the last counts."""

    source: str
    has: str
    options: str
    why: str


@cache
def every_gained() -> tuple[GainedOptions, ...]:
    lines = csv.DictReader(StringIO(OPTIONS.read_text(encoding="utf-8")))
    return tuple(GainedOptions(**line) for line in lines)


def gained(source: str, command: str) -> tuple[str, ...]:
    """What a command of a source gains."""
    rules = (x for x in every_gained() if source.startswith(x.source) and x.has in command)
    return tuple(x.options for x in rules)


class Question(NamedTuple):
    """A command, which of its times is meant, and in which dtype its products run."""

    command: str
    read: str
    dtype: str


class Told(NamedTuple):
    """What a command says: seconds, between what 80 % of measurements are expected, and by the
    roofline; where its JSON has the time. `why` says why there is none."""

    time_s: float = 0.0
    interval: tuple[float, float] | None = None
    roofline_s: float | None = None
    place: str = ""
    why: str = ""


@dataclass(frozen=True)
class FieldResult:
    """A row with its prediction; `why` says why there is none."""

    row: FieldRow
    predicted_s: float = 0.0
    interval: tuple[float, float] | None = None
    roofline_s: float | None = None
    why: str = ""

    @property
    def error(self) -> float:
        """In percent of the measurement, positive where gpuir predicts too slow."""
        return 100 * (self.predicted_s / self.row.measured_s - 1)

    @property
    def is_inside(self) -> bool | None:
        """Whether the measurement is inside the interval; None without one."""
        if self.interval is None:
            return None
        return self.interval[0] <= self.row.measured_s <= self.interval[1]

    @property
    def roofline_error(self) -> float | None:
        """That of the roofline."""
        return self.roofline_s and 100 * (self.roofline_s / self.row.measured_s - 1)


@dataclass(frozen=True)
class FieldScore:
    """Errors of the rows of a group, in percent: mean and median of the absolute ones, the mean
    signed one, the share of those with an interval that are inside it; and the roofline's mean
    absolute and signed one."""

    op: str
    n: int
    mape: float
    median_ape: float
    bias: float
    coverage: float | None
    roofline_mape: float | None
    roofline_bias: float | None


# ---- reading -----------------------------------------------------------------------------------


def read(path: str) -> list[FieldRow]:
    """The rows of a table; UsageError where it is none of these, or a number is none."""
    from gpuir.files import read_text
    from gpuir.ir.errors import UsageError

    lines = list(csv.DictReader(StringIO(read_text(path, "the table", UsageError))))
    found = set(lines[0]) if lines else set[str]()
    if missing := [c for c in COLUMNS if c not in found]:
        raise UsageError(
            "not a table of the field",
            where=path,
            expected=", ".join(COLUMNS),
            found=f"no {', '.join(missing)}",
        )
    names = [f.name for f in fields(FieldRow)]
    rows: list[FieldRow] = []
    for line in lines:
        given: dict[str, Any] = {n: line.get(n) or "" for n in names}
        try:
            given["measured_s"] = float(given["measured_s"])
            tree(given["expr"])
        except ValueError as error:
            raise UsageError(str(error), where=f"{path}: {line['id']}") from None
        rows.append(FieldRow(**given))
        for question in rows[-1].questions:
            check(question.command, f"{path}: {line['id']}")
    return rows


def check(command: str, where: str) -> None:
    """UsageError for what is no command that has a time."""
    from gpuir.ir.errors import UsageError

    words = tuple(shlex.split(command))
    if is_call(command) or (
        words[:1] == ("gpuir",) and any(words[1 : len(c) + 1] == c for c in COMMANDS)
    ):
        return
    raise UsageError(
        "not a command whose time is known",
        where=where,
        expected="gpuir analyze, gpuir simulate, gpuir mig plan, or gpuir.kernel(...)",
        found=command[:80],
    )


def is_call(command: str) -> bool:
    return command.startswith("gpuir.kernel(")


def tree(text: str) -> ast.expr:
    """An expression of times: numbers, letters and + - * /; ValueError for another."""
    try:
        found = ast.parse(text or "a", mode="eval").body
    except SyntaxError:
        raise ValueError(f"not an expression of times: {text}") from None
    value(found, dict.fromkeys(LETTERS, 1.0))
    return found


def value(node: ast.expr, times: Mapping[str, float]) -> float:
    """What an expression comes to, with these times for its letters."""
    match node:
        case ast.Constant(value=int() | float() as n) if not isinstance(n, bool):
            return float(n)
        case ast.Name(id=name) if name in times:
            return times[name]
        case ast.BinOp(left, op, right) if type(op) in SIGNS:
            return SIGNS[type(op)](value(left, times), value(right, times))
        case _:
            raise ValueError(f"not an expression of times: {ast.unparse(node)}")


def judged(row: FieldRow, found: Mapping[Question, Told]) -> FieldResult:
    """A row with what its commands say. Ends of intervals, and rooflines, add up as times do: parts
    of one measurement are off alike."""
    parts = [found[q] for q in row.questions]
    if failed := next((x.why for x in parts if x.why), ""):
        return FieldResult(row, why=failed)
    expression = tree(row.expr)

    def together(times: Iterable[float | None]) -> float | None:
        own = dict(zip(LETTERS, times, strict=False))
        if any(x is None for x in own.values()):
            return None
        return value(expression, {name: x for name, x in own.items() if x is not None})

    low, high = (together(x.interval and x.interval[i] for x in parts) for i in (0, 1))
    return FieldResult(
        row,
        together(x.time_s for x in parts) or 0.0,
        None if low is None or high is None else (low, high),
        together(x.roofline_s for x in parts),
    )


# ---- scoring -----------------------------------------------------------------------------------


def score(name: str, some: Sequence[FieldResult]) -> FieldScore:
    """Of results that have a prediction, at least one."""
    errors = [r.error for r in some]
    inside = [r.is_inside for r in some if r.is_inside is not None]
    roofs = [r.roofline_error for r in some if r.roofline_error is not None]
    return FieldScore(
        name,
        len(some),
        mean(map(abs, errors)),
        median(map(abs, errors)),
        mean(errors),
        100 * mean(inside) if inside else None,
        roofline_mape=mean(map(abs, roofs)) if roofs else None,
        roofline_bias=mean(roofs) if roofs else None,
    )


@dataclass(frozen=True)
class FieldExam:
    """All results of a table, and where it is."""

    file: str
    results: tuple[FieldResult, ...]

    @property
    def sound(self) -> list[FieldResult]:
        """Those that are scored: none whose measurement is doubtful, and all that have a
        prediction."""
        return [r for r in self.results if not r.row.suspect and not r.why]

    @property
    def suspect(self) -> list[FieldResult]:
        return [r for r in self.results if r.row.suspect]

    @property
    def failed(self) -> list[FieldResult]:
        return [r for r in self.results if r.why]

    @property
    def totals(self) -> list[FieldScore]:
        """The main figure, what is told apart, and all together."""
        groups = {REST: [r for r in self.sound if not r.row.apart]}
        groups |= {name: [r for r in self.sound if r.row.apart == name] for name in APART}
        return [score(name, some) for name, some in (groups | {"all": self.sound}).items() if some]

    def by(self, key: str) -> list[FieldScore]:
        """By what a row is of: the largest groups first."""
        groups: dict[str, list[FieldResult]] = {}
        for r in self.sound:
            groups.setdefault(getattr(r.row, key) or "not stated", []).append(r)
        largest = sorted(groups.items(), key=lambda x: -len(x[1]))
        return [score(name, some) for name, some in largest]

    def worst(self, count: int) -> list[FieldResult]:
        """The largest errors."""
        return sorted(self.sound, key=lambda r: -abs(r.error))[:count]
