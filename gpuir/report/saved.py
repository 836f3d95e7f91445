"""Reports that were saved as JSON (docs/reference/json-schema.md), read back to be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast

from gpuir.ir.errors import UsageError
from gpuir.report.answer import SCHEMA
from gpuir.report.names import node_name

LARGEST = 2**63 - 1  # of what is counted


class Metric(NamedTuple):
    """A number of a run that can be compared, and where its report has it."""

    unit: str
    place: tuple[str, ...]


METRICS = {
    "latency": Metric("s", ("latency_s",)),
    "device": Metric("s", ("device_s",)),
    "host": Metric("s", ("host_s",)),
    "memory": Metric("bytes", ("memory", "peak_bytes")),
    "launches": Metric("", ("launches",)),
    "flops": Metric("flop", ("flops",)),
    "bytes": Metric("bytes", ("bytes",)),
    "dram": Metric("bytes", ("dram_bytes",)),
    "unfitted": Metric("s", ("unfitted_s",)),
    "opaque": Metric("", ("coverage", "opaque", "nodes")),
}


@dataclass(frozen=True)
class SavedKernel:
    """A kernel that takes time: `nodes` are the model nodes it stands for, without their file;
    `time_s` is of all runs."""

    op: str
    shape: str
    tile: str
    bound: str
    nodes: tuple[str, ...]
    path: str
    runs: int
    time_s: float

    @property
    def kind(self) -> str:
        return self.op.removeprefix("k.")

    @property
    def name(self) -> str:
        """The model node to call it after: that of its product, else the last."""
        if not self.nodes:
            return self.path
        return self.nodes[0 if self.op in ("k.gemm", "k.conv") else -1]


@dataclass(frozen=True)
class SavedRun:
    """A model on one target under one profile, as a report has it."""

    model: str
    target: str
    profile: str
    batch: int | None
    interval_s: tuple[float, float] | None
    values: Mapping[str, float]  # of each metric
    kinds: Mapping[str, float]  # seconds by kind of kernel
    nodes: Mapping[str, int]  # model nodes by status
    predictors: tuple[str, ...]
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]
    numbers: Mapping[str, object] = field(repr=False)  # of the target
    kernels: tuple[SavedKernel, ...] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.target} {self.profile}"


def read_report(text: str, where: str) -> tuple[SavedRun, ...]:
    """The runs of a JSON report; UsageError where it is none, or of another version."""
    expected = "the output of `gpuir analyze --format json`"
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError("not JSON", where=where, expected=expected, found=str(error)) from None
    named = cast(dict[str, object], found).get("schema") if isinstance(found, dict) else None
    if not isinstance(named, str) or not named.startswith("gpuir.report/"):
        raise UsageError(
            "the file is not a report of gpuir",
            where=where,
            expected=f'"schema": "{SCHEMA}"',
            fix="make a report with `gpuir analyze --format json`; give a "
            "Hugging Face config as hf:FILE",
        )
    if named != SCHEMA:
        raise UsageError(
            "the report has another schema version",
            where=where,
            expected=SCHEMA,
            found=named,
            fix="make the report again with this version of gpuir",
        )
    runs = tuple(map(_run, _Part(found, where).parts("reports")))
    if not runs:
        raise UsageError("the report contains no runs", where=where, expected=expected)
    return runs


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid JSON number")


@dataclass(frozen=True)
class _Part:
    """A part of a report, and its place in it for errors to name."""

    value: Any
    where: str
    place: str = ""

    @property
    def table(self) -> dict[str, Any]:
        """The fields of an object; none of anything else."""
        found = self.value
        return cast(dict[str, Any], found) if isinstance(found, dict) else {}

    def part(self, name: str) -> _Part:
        if name not in self.table:
            raise UsageError(
                f"the report has no {self._place(name)}",
                where=self.where,
                fix="make the report again with this version of gpuir",
            )
        return _Part(self.table[name], self.where, self._place(name))

    def parts(self, name: str) -> list[_Part]:
        part = self.part(name)
        found = part.value
        if not isinstance(found, list):
            part.wrong("a list")
        items = enumerate(cast(list[Any], found))
        return [_Part(x, self.where, f"{part.place}[{i}]") for i, x in items]

    def is_null(self, name: str) -> bool:
        return self.part(name).value is None

    def text(self, name: str) -> str:
        return self.part(name).as_text()

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(x.as_text() for x in self.parts(name))

    def number(self, name: str) -> float:
        return self.part(name).as_number()

    def count(self, name: str) -> int:
        found = self.part(name)
        fits = isinstance(found.value, int) and abs(found.value) <= LARGEST
        return found.value if fits else found.wrong(f"a whole number up to {LARGEST}")

    def as_text(self) -> str:
        return self.value if isinstance(self.value, str) else self.wrong("text")

    def as_number(self) -> float:
        kinds = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        is_fine = kinds and 0 <= self.value <= sys.float_info.max  # not NaN
        return self.value if is_fine else self.wrong("a number of 0 or more")

    def wrong(self, expected: str) -> NoReturn:
        raise UsageError(
            f"{self.place} has the wrong type or value",
            where=self.where,
            expected=expected,
            found=repr(self.value)[:60],
        )

    def _place(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


def _run(r: _Part) -> SavedRun:
    values: dict[str, float] = {}
    for name, metric in METRICS.items():
        at = r
        for word in metric.place[:-1]:
            at = at.part(word)
        values[name] = at.number(metric.place[-1])
    coverage = r.part("coverage")
    numbers = r.part("target").parts("numbers")
    kernels = map(_entry, r.parts("kernels"))
    return SavedRun(
        model=r.text("model"),
        target=r.part("target").text("name"),
        profile=r.part("profile").text("name"),
        batch=None if r.is_null("batch") else r.count("batch"),
        interval_s=None if r.is_null("interval_s") else _interval(r),
        values=values,
        kinds={x.text("kind"): x.number("time_s") for x in r.parts("totals")},
        nodes={name: coverage.part(name).count("nodes") for name in coverage.table},
        predictors=r.texts("predictors"),
        assumed=r.texts("assumed"),
        warnings=r.texts("warnings"),
        numbers={x.text("field"): x.part("value").value for x in numbers},
        kernels=tuple(x for x in kernels if x.time_s > 0),
    )


def _interval(r: _Part) -> tuple[float, float]:
    ends = [x.as_number() for x in r.parts("interval_s")]
    return (ends[0], ends[1]) if len(ends) == 2 else r.part("interval_s").wrong("two numbers")


def _entry(x: _Part) -> SavedKernel:
    return SavedKernel(
        op=x.text("op"),
        shape=x.text("shape"),
        tile="" if x.is_null("tile") else _tile(x.part("tile")),
        bound=x.part("cost").text("bound"),
        nodes=tuple(map(node_name, x.texts("locs"))),
        path="/".join(x.texts("path")),
        runs=x.count("runs"),
        time_s=x.number("time_s"),
    )


def _tile(x: _Part) -> str:
    """As the report's table writes it: `128x64x32`, `/4` behind it where blocks share a sum."""
    dims = {d: x.part("dims").count(d) for d in x.part("dims").table}
    text = "x".join(str(n) for d, n in dims.items() if n != 1 or d not in "bh")
    split = x.count("split")
    return f"{text}/{split}" if split > 1 else text
