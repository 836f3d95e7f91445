"""Kernels under the roofs of their device: as records, and as a picture (`--format roofline`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import atan2, ceil, degrees, floor, log10
from pathlib import PurePath
from typing import Any, Literal

from gpuir.backends.picture import FORMS, matplotlib, picture
from gpuir.backends.report import Summary
from gpuir.backends.terminal import Alike, Layout, alike, run_names
from gpuir.backends.units import percent, quantity
from gpuir.ir.errors import UsageError

MEMORIES = {"l2": "L2", "l3": "L3", "dram": "memory"}
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#000000",
)  # Okabe, Ito


@dataclass(frozen=True)
class Roof:
    """A rate that no kernel beats: of arithmetic in flop/s, or of a memory in bytes/s."""

    name: str
    rate: float


@dataclass(frozen=True)
class Point:
    """Equal kernels: flops for each byte that they read and write (each byte once, wherever it is),
    and flops a second."""

    of: Alike
    intensity: float
    rate: float


def points(groups: Iterable[Alike]) -> list[Point]:
    """Of the kernels that compute something and say what they read and write."""
    return [
        Point(x, x.one.flops / x.one.bytes, x.one.flops / x.one.cost.time_s)
        for x in groups
        if x.one.flops and x.one.bytes
    ]


def memories(s: Summary) -> list[Roof]:
    """What the device's memories deliver, the fastest first."""
    rates = _numbers(s)
    return [
        Roof(name, rates[f"{field}.bytes_per_s"])
        for field, name in MEMORIES.items()
        if f"{field}.bytes_per_s" in rates
    ]


def ceilings(s: Summary, groups: Iterable[Alike]) -> list[Roof]:
    """The listed peaks that these kernels could reach, or a third of one where they take three
    products for one, each by its pipe and dtype, the fastest first: `tensor tf32`."""
    listed = [
        (field.removeprefix("flops_per_s."), rate)
        for field, rate in _numbers(s).items()
        if field.startswith("flops_per_s.")
    ]
    found: dict[float, str] = {}
    for x in groups:
        peak = x.one.cost.fact("peak")
        if not peak or not x.one.flops:
            continue
        names = [name for name, rate in listed if rate == peak]
        names += [f"{name} / 3" for name, rate in listed if rate / 3 == peak]  # three for one
        dtype = x.one.shape.partition(" ")[0]
        own = [name for name in names if name.endswith(f".{dtype}")]
        found.setdefault(peak, (own or names or [dtype])[0].replace(".", " "))
    return [Roof(name, rate) for rate, name in sorted(found.items(), reverse=True)]


def _numbers(s: Summary) -> dict[str, float]:
    return {n.field: n.value for n in s.device.numbers if isinstance(n.value, int | float)}


# ---------------------------------------------------------------------------- as a picture


def roofline(summaries: Sequence[Summary], layout: Layout) -> bytes:
    """A roofline plot as PNG, SVG or PDF, as the file's name ends; runs are told apart by colour.

    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009; a roof for each level of memory as in
    Ilic, Pratas, Sousa: Cache-aware Roofline Model, IEEE CAL 13(1), 2014.
    """
    form = PurePath(layout.file).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(
            "format 'roofline' is a picture, and its file's name says of which form",
            expected=f"a name that ends in .{', .'.join(FORMS)}",
            found=layout.file or "no file",
            fix="-o roofline.png",
        )
    if len(summaries) > len(COLOURS):
        raise UsageError(
            f"a roofline tells {len(COLOURS)} runs apart",
            found=f"{len(summaries)}",
            fix="fewer targets or profiles; `--format html` shows one at a time",
        )
    return picture(form, (7.5, 5.0), lambda figure: _draw(figure.add_subplot(), summaries))


@dataclass(frozen=True)
class Series:
    """Points of one colour."""

    name: str
    points: tuple[Point, ...]
    whole_s: float  # what a point's time is a share of


def _draw(axes: Any, summaries: Sequence[Summary]) -> None:
    """One run's points have a colour for each kind of kernel; of several, each has its own."""
    groups = [alike(s) for s in summaries]
    series = list(_of_runs(summaries, groups) if len(summaries) > 1 else _of_kinds(groups[0]))
    devices: dict[str, tuple[Summary, list[Alike], str]] = {}
    for i, (s, group) in enumerate(zip(summaries, groups, strict=True)):
        _, of_device, _ = devices.setdefault(s.device.name, (s, [], _colour(i)))
        of_device.extend(group)
    roofs = {name: ceilings(s, group) for name, (s, group, _) in devices.items()}
    shown = [p for one in series for p in one.points]
    ends = _decades(p.intensity for p in shown)
    rates = [roof.rate for of_device in roofs.values() for roof in of_device]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=_decades(rates + [p.rate for p in shown]))
    axes.set_xlabel("flop for each byte read or written")
    formatter = matplotlib("matplotlib.ticker").FuncFormatter
    axes.xaxis.set_major_formatter(formatter(_intensity))
    axes.yaxis.set_major_formatter(formatter(_rate))
    axes.grid(True, which="major", linewidth=0.4, alpha=0.5)
    axes.set_title(_title(summaries, groups), loc="left", fontsize=9.5)
    alone = len(devices) == 1
    for name, (s, _, colour) in devices.items():
        _roofs(axes, roofs[name], memories(s), "0.3" if alone else colour, named=alone)
    for i, one in enumerate(series):
        axes.scatter(
            [p.intensity for p in one.points],
            [p.rate for p in one.points],
            s=[10 + 800 * p.of.time_s / one.whole_s for p in one.points],
            color=_colour(i),
            alpha=0.55,
            linewidths=0.6,
            edgecolors="black",
            zorder=3,
        )
        axes.scatter([], [], s=40, color=_colour(i), alpha=0.55, label=one.name)
    if series:
        axes.legend(loc="lower right", fontsize=8)


def _intensity(value: float, _: int) -> str:
    return f"{value:,g}" if value < 1e6 else f"{value:g}"


def _rate(value: float, _: int) -> str:
    return quantity(value, "flop/s", 1)


def _of_runs(summaries: Sequence[Summary], groups: Sequence[list[Alike]]) -> Iterator[Series]:
    for name, s, group in zip(run_names(summaries), summaries, groups, strict=True):
        text = f"{name}, {quantity(s.latency_s, 's')}"
        yield Series(text, tuple(points(group)), s.device_s)


def _of_kinds(groups: Sequence[Alike]) -> Iterator[Series]:
    whole = sum(x.time_s for x in groups)
    for kind in dict.fromkeys(x.one.kind for x in groups):
        of_kind = [x for x in groups if x.one.kind == kind]
        if shown := points(of_kind):
            text = f"{kind}, {percent(sum(x.time_s for x in of_kind), whole)}"
            yield Series(text, tuple(shown), whole)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _roofs(
    axes: Any, flat: Sequence[Roof], slanted: Sequence[Roof], colour: str, *, named: bool
) -> None:
    """Level lines for arithmetic; slanted ones for memories, up to the highest of those."""
    left, right = axes.get_xlim()
    slowest = min((m.rate for m in slanted), default=0.0)
    for roof in flat:
        start = max(roof.rate / slowest, left) if slowest else left
        axes.plot([start, right], [roof.rate] * 2, color=colour, linewidth=1.2)
        if named:
            text = f"{roof.name}, {quantity(roof.rate, 'flop/s')}"
            _beside(axes, (right, roof.rate), text, colour, ha="right")
    top = max((roof.rate for roof in flat), default=0.0)
    for memory in slanted:
        end = min(top / memory.rate if top else right, right)
        if end <= left:
            continue
        style = "-" if memory.rate == slowest else "--"
        axes.plot([left, end], [left * memory.rate, end * memory.rate], style, color=colour, lw=1.2)
        low = max(left, axes.get_ylim()[0] / memory.rate)
        if named and low < end:
            at = low * (end / low) ** 0.06
            text = f"{memory.name}, {quantity(memory.rate, 'bytes/s')}"
            _beside(axes, (at, at * memory.rate), text, colour, rotation=_slope(axes))


def _slope(axes: Any) -> float:
    """Degrees at which a line of slope one rises on the paper, as far as the layout is known."""
    axes.figure.draw_without_rendering()
    box = axes.get_window_extent()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    return degrees(atan2(box.height / log10(high / low), box.width / log10(right / left)))


def _beside(
    axes: Any,
    at: tuple[float, float],
    text: str,
    colour: str,
    ha: Literal["left", "right"] = "left",
    rotation: float = 0.0,
) -> None:
    axes.annotate(
        text,
        at,
        (-4 if ha == "right" else 0, 2),
        textcoords="offset points",
        ha=ha,
        va="bottom",
        fontsize=7.5,
        color=colour,
        rotation=rotation,
        rotation_mode="anchor",
    )


def _title(summaries: Sequence[Summary], groups: Sequence[list[Alike]]) -> str:
    first = summaries[0]
    device = first.device.title or first.device.name
    if len(summaries) > 1:
        return f"{first.model}\narea: share of the run's time"
    silent = sum(x.time_s for x in groups[0] if not x.one.flops or not x.one.bytes)
    rest = f"; {percent(silent, first.device_s)} of it without arithmetic" if silent else ""
    head = (
        f"{first.model} on {device} under {first.profile.name}, {quantity(first.latency_s, 's', 4)}"
    )
    return f"{head}\narea: share of the kernels' time{rest}"


def _decades(values: Iterable[float]) -> tuple[float, float]:
    """The powers of ten around all values."""
    logs = [log10(v) for v in values if v > 0] or [0.0]
    return 10.0 ** floor(min(logs) - 0.15), 10.0 ** ceil(max(logs) + 0.15)
