"""What measured collectives add to the formulas: differences of logarithms, carried from curve to
curve by how much two have in common (kriging: a Gaussian process, `cost.gaussian`).

A curve is one collective of one library on one system, over message sizes. The difference of a
measurement from its formula is a sum of independent parts, each shared by the curves of one
architecture, library, GPU, collective, and run. A part fades with the distance of message sizes and
numbers of ranks. So a system that was measured is followed closely, a number of ranks that was not
takes from its neighbours, and a system that nobody measured keeps what all have in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from math import exp, log, log2
from typing import Any, NamedTuple, cast

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.gaussian import Array, rough


class Curve(NamedTuple):
    """What two measurements may have in common."""

    gpu: str
    arch: str
    library: str
    version: str
    mode: str
    op: str
    run: str
    ranks: int
    nodes: int

    @property
    def joined(self) -> str:
        """By what GPUs reach each other: `nvlink`, `pcie` or `host`."""
        return self.arch.rpartition("/")[2]


@dataclass(frozen=True)
class CurvePart:
    """A part of the difference: the fields of curves that share it, its standard deviation, and
    over how many doublings of bytes and of ranks it fades by e. A row of
    data/collective_parts.csv, of one node or of a network."""

    place: str
    of: tuple[str, ...]
    sigma: float
    bytes: float
    ranks: float


@cache
def _parts(place: str) -> tuple[CurvePart, ...]:
    return tuple(p for p in table("collective_parts", CurvePart) if p.place == place)


HOST = 3.0  # copies through the host vary more, by so much
NOISE = 0.03
WAITS = 0.6  # of kernels in a profile up to a MiB: they wait for their peers, in two modes
SIZES = (8.0, 30.0)  # doublings of a byte that tables reach: what lies beyond is as their ends
# Assumed, where nobody measured the network: the published rates that the formulas hold (NVIDIA
# nodes with an adapter a GPU) are nearly the best; the one site in the tables has a fifth of them.
OTHER_NETWORK = (log(0.75), log(2.0))
BANDS = (32 << 10, 1 << 20, 32 << 20)  # bytes
Ends = tuple[tuple[float, float], ...]  # logarithms, down and up, by band


def band(nbytes: float) -> int:
    return int(np.searchsorted(BANDS, nbytes))


@dataclass(frozen=True)
class Knots:
    """Points of curves: `curves[which[i]]` at `log_bytes[i]`."""

    curves: tuple[Curve, ...]
    which: Any
    log_bytes: Array


def covariance(a: Knots, b: Knots) -> Array:
    """Of the differences at points of curves, [a, b]: of pairs of curves first, then of points."""
    total = np.zeros((len(a.log_bytes), len(b.log_bytes)))
    rows = [np.flatnonzero(a.which == i) for i in range(len(a.curves))]
    columns = [np.flatnonzero(b.which == j) for j in range(len(b.curves))]
    for i, x in enumerate(a.curves):
        if not len(rows[i]):
            continue
        mine = a.log_bytes[rows[i]]
        for j, y in enumerate(b.curves):
            shared = _shared(x, y)
            if not shared or not len(columns[j]):
                continue
            apart = np.abs(mine[:, None] - b.log_bytes[columns[j]][None, :])
            some = sum(rough(apart, *part) for part in shared)
            total[rows[i][:, None], columns[j][None, :]] = some
    return total


@lru_cache(maxsize=1 << 18)
def _shared(x: Curve, y: Curve) -> tuple[tuple[float, float], ...]:
    """Variances of the parts that two curves share, each with the doublings of bytes that it fades
    over."""
    if (x.nodes > 1) != (y.nodes > 1):
        return ()
    host = (HOST if x.arch.endswith("/host") else 1) * (HOST if y.arch.endswith("/host") else 1)
    apart = abs(log2(x.ranks / y.ranks))
    found: dict[float, float] = {}
    for part in _parts("node" if x.nodes == 1 else "network"):
        if all(getattr(x, n) == getattr(y, n) != "" for n in part.of):
            variance = part.sigma**2 * host * exp(-apart / part.ranks)
            found[part.bytes] = found.get(part.bytes, 0.0) + variance
    return tuple((variance, scale) for scale, variance in found.items())


@dataclass(frozen=True)
class Field:
    """Fitted factors of the formulas, and differences that measurements add.

    `weight` is the inverse covariance of the knots' differences times these. `ends` are logarithms
    of measured over predicted between which 80 % lie, by size band, for curves that were measured
    ("size"), systems with other numbers of ranks ("ranks"), and others ("system").
    """

    factors: Mapping[str, float]
    knots: Knots | None = None
    weight: Array = field(default_factory=lambda: np.zeros(0))
    ends: Mapping[str, Ends] = field(default_factory=dict[str, Ends])

    def many(self, curves: Sequence[Curve], which: Any, log_bytes: Array) -> Array:
        """The differences at points of curves."""
        found = np.zeros(len(log_bytes))
        inside = np.clip(log_bytes, *SIZES)
        for i, curve in enumerate(curves):
            x, scale, weight = self._related(curve)
            rows = np.flatnonzero(which == i)
            for some in (rows[j : j + 256] for j in range(0, len(rows), 256)):
                apart = np.abs(inside[some][:, None] - x[None, :])
                found[some] = rough(apart, 1.0, scale) @ weight
        return found

    def at(self, curve: Curve, log_bytes: float) -> float:
        """The difference at one point of a curve."""
        return float(self.many((curve,), np.zeros(1, int), np.array([log_bytes], float))[0])

    @cached_property
    def _memo(self) -> dict[Curve, tuple[Array, Array, Array]]:
        return {}

    def _related(self, curve: Curve) -> tuple[Array, Array, Array]:
        """Of the knots that share a part with a curve the sizes, what the part fades over, and
        their weights times its variance."""
        if curve not in self._memo:
            found: list[tuple[Array, Array, Array]] = [(np.zeros(0), np.ones(0), np.zeros(0))]
            for j, other in enumerate(self.knots.curves if self.knots else ()):
                shared = _shared(curve, other)
                if shared and self.knots is not None:
                    mine = self.knots.which == j
                    x, w = self.knots.log_bytes[mine], self.weight[mine]
                    found += [(x, np.full(len(x), scale), w * v) for v, scale in shared]
            x, scale, weight = (np.concatenate(c) for c in zip(*found, strict=True))
            self._memo[curve] = x, scale, weight
        return self._memo[curve]

    def familiar(self, curve: Curve) -> str:
        """`size` where the curve was measured, `ranks` where the system was with other numbers of
        ranks, else `system`."""
        known = self.knots.curves if self.knots else ()
        mine = [
            c
            for c in known
            if (c.gpu, c.library, c.mode, c.op) == (curve.gpu, curve.library, curve.mode, curve.op)
            and (c.nodes > 1) == (curve.nodes > 1)
            and (curve.nodes == 1 or c.run == curve.run)
        ]
        if any((c.ranks, c.nodes) == (curve.ranks, curve.nodes) for c in mine):
            return "size"
        return "ranks" if mine else "system"

    def interval(self, curve: Curve, nbytes: float) -> tuple[float, float]:
        if curve.nodes > 1 and self.familiar(curve) == "system":
            return OTHER_NETWORK
        ends = self.ends.get(self.familiar(curve))
        return ends[band(nbytes)] if ends else OTHER_NETWORK

    def unseen(self, curve: Curve) -> tuple[str, ...]:
        """What of a curve was not measured."""
        known = self.familiar(curve)
        if known == "system" and curve.nodes > 1:
            return ("nodes",)
        return {"size": (), "ranks": ("ranks",)}.get(known, ("system",))


# ---- the file -----------------------------------------------------------------------------------

SCHEMA = "gpuir.collective/1"


def written(f: Field) -> str:
    """The file of weights: a line a curve."""
    lines = ["{", f' "schema": "{SCHEMA}",']
    lines.append(f' "factors": {json.dumps({k: _short(v) for k, v in f.factors.items()})},')
    ends = {k: [[_short(x, 3) for x in e] for e in v] for k, v in f.ends.items()}
    lines.append(f' "ends": {json.dumps(ends)},')
    lines.append(' "curves": [')
    rows: list[str] = []
    if f.knots is not None:
        for i, curve in enumerate(f.knots.curves):
            mine = f.knots.which == i
            points = {
                "log2_bytes": [_short(x, 5) for x in f.knots.log_bytes[mine]],
                "weight": [_short(x, 5) for x in f.weight[mine]],
            }
            rows.append("  " + json.dumps(curve._asdict() | points))
    lines += [",\n".join(rows), " ]", "}"]
    return "\n".join(lines) + "\n"


def _short(x: float, digits: int = 6) -> float:
    return float(f"{x:.{digits}g}")


def parsed(text: str) -> Field:
    raw: dict[str, Any] = json.loads(text)
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"not {SCHEMA}: {raw.get('schema')}")
    curves: list[Curve] = []
    which: list[int] = []
    x: list[float] = []
    weight: list[float] = []
    for i, row in enumerate(raw["curves"]):
        x += row.pop("log2_bytes")
        w: list[float] = row.pop("weight")
        weight += w
        which += [i] * len(w)
        curves.append(Curve(**row))
    ends = {k: tuple((a, b) for a, b in v) for k, v in raw["ends"].items()}
    knots = Knots(tuple(curves), np.array(which, int), np.array(x, float)) if curves else None
    return Field(raw["factors"], knots, np.array(weight, float), cast(Any, ends))


@lru_cache(maxsize=1)
def read_weights() -> Field:
    """The weights that are shipped."""
    return parsed((files("gpuir.cost") / "weights" / "collective1.json").read_text("utf-8"))
