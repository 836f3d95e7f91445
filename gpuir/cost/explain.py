"""Every quantity behind a kernel's predicted time, as a line a reader can recompute.

The predictors' own formulas are run on numbers that remember how they were computed (`Traced`), so
an explanation cannot differ from the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import exp, isclose
from types import SimpleNamespace
from typing import Any, cast

from gpuir.cost import generated, local
from gpuir.cost.collective import BY
from gpuir.cost.families import family_of
from gpuir.cost.learned import correction, shipped
from gpuir.cost.nest import Tiles
from gpuir.cost.network import quantities
from gpuir.cost.reading import operand_names, work_of
from gpuir.cost.roofline import bounds
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.tile import Estimate, estimate, familiar, is_measured, trained
from gpuir.cost.uncertainty import is_unfitted, uncertainty
from gpuir.cost.work import Work
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Cost, Tile
from gpuir.ops import kernel as k
from gpuir.targets.cluster import Cluster
from gpuir.targets.target import Cache, Dram, Flops, FrozenTable, Link, Pcie, Sm, Target, specs


@dataclass(frozen=True)
class SheetLine:
    """One quantity: `formula` is arithmetic with its numbers filled in, in Python's notation, which
    gives `value`; `source` says where a number that is not computed comes from."""

    name: str
    value: float
    unit: str
    formula: str = ""
    source: str = ""

    def __str__(self) -> str:
        formula = f" = {self.formula}" if self.formula else ""
        source = f"  [{self.source}]" if self.source else ""
        return f"{self.name}: {number(self.value)} {self.unit}{formula}{source}".rstrip()

    __repr__ = __str__


def number(value: Any) -> str:
    """A number as formulas show it: whole, or to seven significant digits."""
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.7g}"


# ---------------------------------------------------------------------------- traced numbers

ATOM, POWER, TIMES, PLUS = 3, 2, 1, 0  # how tightly a formula's outermost operator binds
LONGEST = 200  # characters of a formula; of a longer one, parts are lines of their own


@dataclass(frozen=True, eq=False)
class Traced:
    """A number and the formula that gave it; `given` are lines of the numbers in it that come from
    a specification, a fit or the model, or that are parts of a formula too long to read: those have
    no name yet."""

    value: float
    text: str
    binds: int = ATOM
    given: tuple[SheetLine, ...] = ()

    def inside(self, binds: int) -> str:
        """The formula as part of one whose operator binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"

    def apart(self) -> Traced:
        """The number alone: its formula is a line of its own."""
        part = SheetLine("", self.value, "", self.text)
        alone = _traced(self.value)
        return replace(alone, given=(*self.given, part))

    def __add__(self, other: Number) -> Traced:
        return _sum(self, other)

    def __radd__(self, other: Number) -> Traced:
        return _sum(other, self)

    def __sub__(self, other: Number) -> Traced:
        return _binary("-", self, other, PLUS)

    def __rsub__(self, other: Number) -> Traced:
        return _binary("-", other, self, PLUS)

    def __mul__(self, other: Number) -> Traced:
        return _times(self, other)

    def __rmul__(self, other: Number) -> Traced:
        return _times(other, self)

    def __truediv__(self, other: Number) -> Traced:
        return self if _is(other, 1) else _binary("/", self, other, TIMES)

    def __rtruediv__(self, other: Number) -> Traced:
        return _binary("/", other, self, TIMES)

    def __pow__(self, other: Number) -> Traced:
        return _binary("**", self, other, POWER)

    def __rpow__(self, other: Number) -> Traced:
        return _binary("**", other, self, POWER)

    def __mod__(self, other: Number) -> Traced:
        return _binary("%", self, other, TIMES)

    def __neg__(self) -> Traced:
        return Traced(-self.value, f"-{self.inside(ATOM)}", TIMES, self.given)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Traced) else other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __gt__(self, other: Number) -> bool:
        return self.value > _traced(other).value

    def __ge__(self, other: Number) -> bool:
        return self.value >= _traced(other).value

    def __lt__(self, other: Number) -> bool:
        return self.value < _traced(other).value

    def __le__(self, other: Number) -> bool:
        return self.value <= _traced(other).value

    def __float__(self) -> float:
        return self.value


def _traced(n: Number) -> Traced:
    return n if isinstance(n, Traced) else Traced(float(n), number(n), ATOM if n >= 0 else TIMES)


def _is(n: Number, what: float) -> bool:
    """Whether a number is that constant, and not the result of a formula."""
    return not isinstance(n, Traced) and float(n) == what


_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
}


def _short(*operands: Number) -> list[Traced]:
    """The operands of one formula, the longest set apart until they are short together."""
    found = [_traced(n) for n in operands]
    while sum(len(x.text) for x in found) > LONGEST:
        i = max(range(len(found)), key=lambda i: len(found[i].text))
        if found[i].text == number(found[i].value):
            break
        found[i] = found[i].apart()
    return found


def _binary(sign: str, a: Number, b: Number, binds: int) -> Traced:
    a, b = _short(a, b)
    # the right operand of - / % ** is kept apart from what follows it
    right = b.inside(binds + (sign not in "+*"))
    left = a.inside(binds + (sign == "**"))
    value = _OPERATORS[sign](a.value, b.value)
    return Traced(value, f"{left} {sign} {right}", binds, (*a.given, *b.given))


def _sum(a: Number, b: Number) -> Traced:
    if _is(a, 0) or _is(b, 0):
        return _traced(b if _is(a, 0) else a)
    return _binary("+", a, b, PLUS)


def _times(a: Number, b: Number) -> Traced:
    if _is(a, 1) or _is(b, 1):
        return _traced(b if _is(a, 1) else a)
    return _binary("*", a, b, TIMES)


def _called(name: str, compute: Callable[..., float]) -> Callable[..., Traced]:
    def call(*args: Number) -> Traced:
        given = _short(*args)
        text = f"{name}({', '.join(a.text for a in given)})"
        value = float(compute(*(a.value for a in given)))
        return Traced(value, text, ATOM, tuple(line for a in given for line in a.given))

    return call


_max = _called("max", max)


def _maximum(a: Number, b: Number) -> Traced:
    """A number that no formula gave is itself, where a constant only guards it: 240, not
    `max(240, 1)`."""
    guards = isinstance(a, Traced) and not isinstance(b, Traced) and a.value >= b
    return a if guards and a.text == number(a.value) else _max(a, b)


def _where(test: bool, yes: Number, no: Number) -> Traced:
    return _traced(yes if test else no)


# The functions of a `Sheet` on traced numbers; formulas use Python's names for them.
TRACING = SimpleNamespace(
    maximum=_maximum,
    minimum=_called("min", min),
    where=_where,
    **{
        name: _called(name, getattr(math, name))
        for name in ("ceil", "floor", "sqrt", "exp", "log", "log1p", "tanh")
    },
)


@dataclass
class Explained(Sheet):
    """A sheet on which each quantity leaves a line, and goes on as a plain number. The lines of
    given numbers come before the first formula that has them."""

    xp: Any = field(default_factory=lambda: TRACING)
    lines: list[SheetLine] = field(default_factory=list[SheetLine])

    def put(
        self, name: str, value: Number, unit: str = "", source: str = "", *, terse: bool = False
    ) -> Number:
        found = _traced(value)
        plain = terse or found.text == number(found.value)
        if plain and found.given and not source:
            source = f"{found.given[0].name}: {found.given[0].source}"
        elif not plain:
            self.lines += self.new(name, found.given)
        self.lines.append(SheetLine(name, found.value, unit, "" if plain else found.text, source))
        return super().put(name, Traced(found.value, number(found.value)), unit, source)

    def new(self, name: str, given: Iterable[SheetLine]) -> list[SheetLine]:
        """Lines that are not there yet; parts of a formula are called after what it gives."""
        known = {(x.value, x.formula) for x in self.lines if x.formula}
        found: list[SheetLine] = []
        for x in dict.fromkeys(given):
            if x.formula and (x.value, x.formula) not in known:
                parts = sum(bool(y.formula) for y in found)
                found.append(replace(x, name=f"{name}: part {parts + 1}"))
            elif not x.formula and x not in self.lines:
                found.append(x)
        return found

    def factors(
        self, family: str, known: Iterable[Factor], target: Target, values: Mapping[str, Number]
    ) -> Mapping[str, Number]:
        found: dict[str, Number] = {}
        for f in known:
            name, source = f"{family}: {f.name}", f.text
            if own := target.factors.get(f"{family}.{f.name}"):
                source += f"; x {number(own)} on {target.name}: {target.source('factors')}"
            found[f.name] = _given(name, values[f.name], "", source)
        return found


def _given(name: str, value: float, unit: str, source: str) -> Traced:
    return Traced(float(value), number(value), ATOM, (SheetLine(name, value, unit, source=source),))


def listed(target: Target) -> Target:
    """The target with numbers that say where they come from."""
    rows = {row.field: row for row in target.rows() if isinstance(row.value, int | float)}

    def known(value: Any, path: str) -> Any:
        if isinstance(value, FrozenTable):
            items = cast("FrozenTable[Any]", value).items()
            return FrozenTable({name: known(x, f"{path}.{name}") for name, x in items})
        if isinstance(value, Target | Flops | Dram | Cache | Sm | Link | Pcie):
            names = specs(type(value))
            return replace(value, **{n: known(getattr(value, n), f"{path}.{n}") for n in names})
        row = rows.get(path[1:])
        if row is None or isinstance(value, bool):
            return value
        return _given(f"{target.name}: {row.field}", value, row.unit, row.source)

    return known(target, "")


# ---------------------------------------------------------------------------- of one kernel


def terms(
    op: k.KernelOp,
    tile: Tile | None,
    target: Target,
    *,
    predictor: str = "tile",
) -> tuple[SheetLine, ...]:
    """The lines behind the cost of a kernel by `tile` or `roofline`, in the order that one leads to
    the next; the last is the total."""
    work = work_of(op)
    match predictor.partition("@")[0]:
        case "tile":
            if tile is None:
                raise UsageError(f"{op.name} has no tile", fix="run the tile pass first")
            s = Explained(lines=_work_lines(op, work))
            traced(work, Tiles.of(tile, work), target, s)
            return tuple(s.lines)
        case "generated":
            if tile is None:
                raise UsageError(f"{op.name} has no tile", fix="run the tile pass first")
            s = Explained(lines=_work_lines(op, work))
            tiles = Tiles.of(tile, work)
            generated.estimate(work, tiles, target, s=s, listed=listed(target))
            return tuple(s.lines)
        case "roofline":
            return _roofline_lines(op, work, target)
        case other:
            raise UsageError(
                f"the predictor {other!r} cannot explain its predictions",
                expected="tile or roofline",
            )


def traced(work: Work, tiles: Tiles, target: Target, s: Explained) -> Estimate:
    """The estimate of one kernel in numbers that remember their formula. The network is asked in
    plain numbers: it looks for the tile of a library, among many."""
    there = target.under_load
    learned = correction(work, family_of(work, there), there, shipped())
    formulas = work.each(_traced), tiles.each(_traced), listed(target)
    return estimate(*formulas, s=s, learned=learned)


def explained(
    op: k.KernelOp, tile: Tile | None, target: Target, cost: Cost, cluster: Cluster | None = None
) -> tuple[SheetLine, ...]:
    """The lines behind a cost, where its predictor is ours and they lead to it; else (a plug-in's,
    or another version's) what the cost states of itself. Those of a collective are of the
    `cluster`."""
    name = cost.by.partition("@")[0]
    if isinstance(op, k.Collective) and cluster is not None and cost.by == BY:
        found = tuple(SheetLine(*row) for row in quantities(op, cluster))
        if isclose(found[-1].value, cost.time_s, rel_tol=1e-9):
            return found
    if name == "roofline" or (name in ("tile", "generated") and tile is not None):
        lines = terms(op, tile, target, predictor=name)
        if isclose(lines[-1].value, cost.time_s, rel_tol=1e-9):
            return (*lines, *_ends(work_of(op), target, cost))
    source = f"as {cost.by} says"
    return (
        *(
            SheetLine(name.replace("_", " "), value, "", source=source)
            for name, value in cost.facts
        ),
        *(SheetLine(name, value, "s", source=source) for name, value in cost.terms),
        SheetLine("time", cost.time_s, "s", source=source),
    )


BACKTESTS = {
    "known": "on other shapes",
    "calibrated": "on GPUs left out and calibrated",
    "unseen": "on GPUs left out",
}


def _ends(work: Work, target: Target, cost: Cost) -> Iterator[SheetLine]:
    """The ends of the interval, and the backtest that they come from."""
    if cost.interval is None:
        return
    if cost.by == generated.BY:
        for name, end in zip(("low end", "high end"), cost.interval, strict=True):
            formula = f"{number(cost.time_s)} * {number(end / cost.time_s)}"
            yield SheetLine(name, end, "s", formula, "cost.generated.SPREAD")
        return
    known = trained(work, target)
    test = known.backtest(work, familiar(work, target, known))
    place, _, dtype = test.partition(" ")
    family = family_of(work, target).name
    source = ""
    if not is_unfitted(work, test):
        source = f"backtest of the family {family} {BACKTESTS[place]}, {dtype or 'all dtypes'}"
    down, up = uncertainty(work, target, is_measured(work, target, known), test)
    if up:
        factor = f"no measurements of {work.sort}: / {exp(down):.3g} or x {exp(up):.3g}"
        factor = f"{factor}, cost.uncertainty"
        source = f"{source}; {factor}" if source else factor
    low, high = local.left_out_ends(family, target)
    if low or high:
        own = target.source(f"backtest.{family}")
        source += f"; at least x {exp(low):.3g} to x {exp(high):.3g} on {target.name}: {own}"
    for name, end in zip(("low end", "high end"), cost.interval, strict=True):
        formula = f"{number(cost.time_s)} * {number(end / cost.time_s)}"
        yield SheetLine(
            name, end, "s", formula, f"one measurement in ten is outside this range: {source}"
        )


def _work_lines(op: k.KernelOp, work: Work) -> list[SheetLine]:
    lines = [SheetLine("flops", work.flops, "flop", source=f"as {op.name} counts them")]
    if work.products:
        per_point = work.products / max(work.points, 1)
        extents = " * ".join([number(per_point), *(str(n) for _, n in work.dims)])
        dims = ", ".join(d for d, _ in work.dims)
        lines.append(
            SheetLine("products", work.products, "flop", extents, f"per element of {dims}")
        )
    if work.density != 1:
        lines.append(
            SheetLine(
                "mask density", work.density, "", source="share of the scores that the mask leaves"
            )
        )
    lines.append(
        SheetLine(
            "lane instructions", work.lane_ops, "", source="cost.lanes.LANE_OPS over the body"
        )
    )
    for name, o in zip(operand_names(op), work.operands, strict=False):
        cells = o.nbytes / o.cell_bytes if o.cell_bytes else 0
        formula = f"{number(cells)} * {number(o.cell_bytes)}"
        lines.append(
            SheetLine(f"bytes of {name}", o.nbytes, "bytes", formula, f"{o.staging}, moved once")
        )
    return lines


def _roofline_lines(op: k.KernelOp, work: Work, target: Target) -> tuple[SheetLine, ...]:
    s = Explained(lines=_work_lines(op, work))
    target = listed(target)
    arithmetic, moving = bounds(work.each(_traced), target)
    compute, memory = s.put("compute", arithmetic, "s"), s.put("memory", moving, "s")
    launch = s.put("launch", target.launch_s, "s")
    s.put("time", TRACING.maximum(compute, memory) + launch, "s")
    return tuple(s.lines)
