"""A sweep as a picture: throughput, latency and price over one size. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuir.backends.picture import matplotlib, picture
from gpuir.backends.sweep import unit
from gpuir.plan.sweep import SizeSeries, SweepAnswers
from gpuir.report.answer import Answer
from gpuir.report.units import rate, usd

LINES = 12  # of the series, the fastest: more cannot be told apart


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what it shows of a point, and how a tick says it."""

    title: str
    value: Callable[[Answer], float | None]
    tick: Callable[[float], str]
    band: bool = False


def panels(s: SweepAnswers) -> list[Panel]:
    what = unit(s)
    found = [
        Panel(f"{what} a second", lambda p: p.items_per_s, rate),
        Panel("milliseconds a run", lambda p: p.latency_s * 1e3, "{:g}".format, band=True),
    ]
    if s.prices:
        found.append(Panel(f"US dollars per million {what}", lambda p: p.usd_per_million, usd))
    return found


def sweep_plot(s: SweepAnswers, form: str) -> bytes:
    """The picture as `png` or `svg`, the same bytes for the same sweep. Hollow points do not fit;
    the band is between what 80 % of measurements are expected."""
    shown = panels(s)
    return picture(form, (4.2 * len(shown), 4.2), lambda figure: _draw(figure, s, shown))


def _draw(figure: Any, s: SweepAnswers, shown: Sequence[Panel]) -> None:
    chosen = sorted(s.series, key=lambda x: -x.best.items_per_s if x.best else 0.0)[:LINES]
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, panel in zip(axes, shown, strict=True):
        for i, series in enumerate(chosen):
            _line(ax, series, panel, f"C{i % 10}")
        _scales(ax, s, panel)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    left = len(s.series) - len(chosen)
    more = f" (the fastest {len(chosen)} of {len(s.series)})" if left else ""
    figure.suptitle(f"{s.model}{more}")


def _line(ax: Any, series: SizeSeries, panel: Panel, color: str) -> None:
    points = [p for p in series.points if panel.value(p) is not None]
    if not points:
        return
    sizes = [series.size(p) for p in points]
    others = "".join(f", {name} {n}" for name, n in series.others)
    name = f"{series.target} {series.profile}{others}"
    ax.plot(sizes, [panel.value(p) for p in points], color=color, label=name, linewidth=1.4)
    for fits, face in ((True, color), (False, "white")):
        some = [p for p in points if p.fits is fits]
        x, y = [series.size(p) for p in some], [panel.value(p) for p in some]
        ax.plot(x, y, "o", color=color, markerfacecolor=face, markersize=4)
    if panel.band and all(p.interval for p in points):
        lows, highs = zip(*(p.interval or (0.0, 0.0) for p in points), strict=True)
        ends = [[1e3 * t for t in lows], [1e3 * t for t in highs]]
        ax.fill_between(sizes, *ends, color=color, alpha=0.1, linewidth=0)


def _scales(ax: Any, s: SweepAnswers, panel: Panel) -> None:
    ticker = matplotlib("matplotlib.ticker")
    dim, values = s.axes[0]
    ax.grid(True, alpha=0.25)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(values, [f"{n:,}" for n in values])
    ax.xaxis.set_minor_formatter(ticker.NullFormatter())
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(ticker.FuncFormatter(_tick(panel)))
    ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    ax.set_xlabel(dim)
    ax.set_title(panel.title, fontsize=9)


def _tick(panel: Panel) -> Callable[[float, int], str]:
    return lambda value, place: panel.tick(value)
