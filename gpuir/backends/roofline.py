"""Kernels under the roofs of their device, as a picture (`--format roofline`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import atan2, ceil, degrees, floor, hypot, log10
from pathlib import PurePath
from typing import Any

from gpuir.backends.analysis import run_names
from gpuir.backends.picture import FORMS, matplotlib, picture
from gpuir.backends.terminal import Terminal
from gpuir.ir.errors import UsageError
from gpuir.report.answer import Answer
from gpuir.report.equal import EqualKernels, alike
from gpuir.report.roofline import Point, Roof, ceilings, memories, points
from gpuir.report.units import percent, quantity

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#000000",
)  # Okabe, Ito
MARKERS = "os^"  # matplotlib's names: each with all the colours

GAP = 2.0  # points between a line and its label
PLACES = 40  # along a line, that are tried for its label


def roofline(summaries: Sequence[Answer], layout: Terminal) -> bytes:
    """A roofline plot as PNG, SVG or PDF, as the file's name ends; each run has a colour, and
    from the eighth on another shape.

    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009; a roof for each level of memory as in
    Ilic, Pratas, Sousa: Cache-aware Roofline Model, IEEE CAL 13(1), 2014.
    """
    form = PurePath(layout.file).suffix.lower().removeprefix(".")
    if form not in FORMS:
        raise UsageError(
            "format 'roofline' is a picture, so its file needs a name with "
            "the extension of a picture",
            expected=f"a file name that ends in .{', .'.join(FORMS)}",
            found=layout.file or "no file",
            fix="-o roofline.png",
        )
    if len(summaries) > (most := len(COLOURS) * len(MARKERS)):
        raise UsageError(
            f"a roofline shows at most {most} runs",
            found=f"{len(summaries)}",
            fix="use fewer targets or profiles; `--format html` shows one at a time",
        )
    return picture(form, (7.5, 5.0), lambda figure: _draw(figure.add_subplot(), summaries))


@dataclass(frozen=True)
class RooflineSeries:
    """Points of one colour and shape."""

    name: str
    points: tuple[Point, ...]
    whole_s: float  # what a point's time is a share of


def _draw(axes: Any, summaries: Sequence[Answer]) -> None:
    """One run's points have a colour for each kind of kernel; of several, each has its own."""
    groups = [alike(s) for s in summaries]
    series = list(_of_runs(summaries, groups) if len(summaries) > 1 else _of_kinds(groups[0]))
    devices: dict[str, tuple[Answer, list[EqualKernels], str]] = {}
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
    labels: list[Label] = []
    for name, (s, _, colour) in devices.items():
        labels += _roofs(axes, roofs[name], memories(s), "0.3" if alone else colour)
    for i, one in enumerate(series):
        marker = MARKERS[i // len(COLOURS) % len(MARKERS)]
        axes.scatter(
            [p.intensity for p in one.points],
            [p.rate for p in one.points],
            s=[10 + 800 * p.of.time_s / one.whole_s for p in one.points],
            color=_colour(i),
            marker=marker,
            alpha=0.55,
            linewidths=0.6,
            edgecolors="black",
            zorder=3,
        )
        axes.scatter([], [], s=40, color=_colour(i), marker=marker, alpha=0.55, label=one.name)
    if series:
        axes.legend(loc="lower right", fontsize=8)
    if alone:
        _name(axes, labels, shown)


def _intensity(value: float, _: int) -> str:
    return f"{value:,g}" if value < 1e6 else f"{value:g}"


def _rate(value: float, _: int) -> str:
    return quantity(value, "flop/s", 1)


def _of_runs(
    summaries: Sequence[Answer], groups: Sequence[list[EqualKernels]]
) -> Iterator[RooflineSeries]:
    for name, s, group in zip(run_names(summaries), summaries, groups, strict=True):
        text = f"{name}, {quantity(s.latency_s, 's')}"
        yield RooflineSeries(text, tuple(points(group)), s.device_s)


def _of_kinds(groups: Sequence[EqualKernels]) -> Iterator[RooflineSeries]:
    whole = sum(x.time_s for x in groups)
    for kind in dict.fromkeys(x.one.kind for x in groups):
        of_kind = [x for x in groups if x.one.kind == kind]
        if shown := points(of_kind):
            text = f"{kind}, {percent(sum(x.time_s for x in of_kind), whole)}"
            yield RooflineSeries(text, tuple(shown), whole)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


@dataclass(frozen=True)
class Label:
    """The name of a roof, to be written along its `line` (from where, to where). `first` is the end
    that it would rather be at: 0 or 1."""

    text: str
    colour: str
    line: tuple[tuple[float, float], tuple[float, float]]
    first: int


def _roofs(axes: Any, flat: Sequence[Roof], slanted: Sequence[Roof], colour: str) -> list[Label]:
    """Level lines for arithmetic; slanted ones for memories, up to the highest of those."""
    left, right = axes.get_xlim()
    bottom = axes.get_ylim()[0]
    slowest = min((m.rate for m in slanted), default=0.0)
    labels: list[Label] = []
    for roof in flat:
        start = max(roof.rate / slowest, left) if slowest else left
        axes.plot([start, right], [roof.rate] * 2, color=colour, linewidth=1.2)
        text = f"{roof.name}, {quantity(roof.rate, 'flop/s')}"
        labels.append(Label(text, colour, ((min(start, right), roof.rate), (right, roof.rate)), 1))
    top = max((roof.rate for roof in flat), default=0.0)
    for memory in slanted:
        end = min(top / memory.rate if top else right, right)
        if end <= left:
            continue
        style = "-" if memory.rate == slowest else "--"
        axes.plot([left, end], [left * memory.rate, end * memory.rate], style, color=colour, lw=1.2)
        low = max(left, bottom / memory.rate)
        if low < end:
            text = f"{memory.name}, {quantity(memory.rate, 'bytes/s')}"
            line = (low, low * memory.rate), (end, end * memory.rate)
            labels.append(Label(text, colour, line, 0))
    return labels


def _name(axes: Any, labels: Sequence[Label], shown: Sequence[Point]) -> None:
    """Writes each label along its line where it lies on the least: on no other label if it can,
    then on few lines, then on few points; above rather than below, near the end it would be at."""
    path = matplotlib("matplotlib.path").Path
    axes.figure.draw_without_rendering()  # only then it is known where things are
    pixels = axes.transData.transform
    gap = GAP / 72 * axes.figure.dpi
    lines = [pixels(label.line) for label in labels]
    spots = pixels([(p.intensity, p.rate) for p in shown] or [(0.0, 0.0)])
    taken: list[Any] = []
    if (legend := axes.get_legend()) is not None:
        taken.append(path(legend.get_window_extent().corners()[[0, 1, 3, 2]]))
    for n, (label, (start, end)) in enumerate(zip(labels, lines, strict=True)):
        text = axes.text(*label.line[0], label.text, fontsize=7.5, color=label.colour)
        text.set_in_layout(False)
        box = text.get_window_extent()
        length = float(hypot(*(end - start)))
        along = (end - start) / length if length else end * 0 + (1, 0)
        up = along[::-1] * (-1, 1)
        wide, high = box.width * along, box.height * up
        room = length - box.width - 2 * gap
        places = [gap + max(room, 0.0) * i / PLACES for i in range(PLACES + 1)]
        if label.first:  # where the line is short, the label juts out at its other end
            places = [at + min(room, 0.0) for at in reversed(places)]
        tried = [
            start + at * along + side for side in (gap * up, -gap * up - high) for at in places
        ]
        areas = [path([low, low + wide, low + wide + high, low + high]) for low in tried]
        others = [path(line) for line in (*lines[:n], *lines[n + 1 :])]

        def clashes(i: int, areas: Any = areas, others: Any = others) -> tuple[int, ...]:
            here = areas[i]
            return (
                sum(here.intersects_path(x) for x in taken),
                sum(here.intersects_path(x, filled=False) for x in others),
                sum(here.contains_points(spots)),
            )

        best = min(range(len(tried)), key=clashes)
        taken.append(areas[best])
        text.set(rotation=degrees(atan2(along[1], along[0])), rotation_mode="anchor")
        text.set_position(axes.transData.inverted().transform(tried[best]))


def _title(summaries: Sequence[Answer], groups: Sequence[list[EqualKernels]]) -> str:
    first = summaries[0]
    device = first.device.title or first.device.name
    if len(summaries) > 1:
        return f"{first.model}\narea: share of the run's time"
    silent = sum(x.time_s for x in groups[0] if not x.one.flops or not x.one.bytes)
    rest = f"; {percent(silent, first.device_s)} of it without arithmetic" if silent else ""
    head = f"{first.model} on {device} under {first.profile}, {quantity(first.latency_s, 's', 4)}"
    return f"{head}\narea: share of the kernels' time{rest}"


def _decades(values: Iterable[float]) -> tuple[float, float]:
    """The powers of ten around all values."""
    logs = [log10(v) for v in values if v > 0] or [0.0]
    return 10.0 ** floor(min(logs) - 0.15), 10.0 ** ceil(max(logs) + 0.15)
