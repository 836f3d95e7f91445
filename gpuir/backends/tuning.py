"""The fastest tiles of a model's kernels, for people and for programs."""

from __future__ import annotations

from typing import Any

from gpuir.backends.structured import json_text, record
from gpuir.backends.terminal import Layout, Page
from gpuir.ir.notes import Tile
from gpuir.report.equal import pattern
from gpuir.report.units import quantity
from gpuir.tune.groupings import Groupings
from gpuir.tune.space import Ranked
from gpuir.tune.tasks import Tuned, Tuning

SCHEMA = "gpuir.tune/1"
LISTED = 16  # tiles of a kernel in JSON, and those that were measured


def tuning_text(t: Tuning, layout: Layout) -> str:
    """What is chosen and what it comes to, then a line for each distinct kernel."""
    page = Page(layout.width, layout.color)
    title = f"{t.target.title} ({t.target.name})" if t.target.title else t.target.name
    page.heading(f"{t.model} on {title} under {t.profile}: generated kernels")
    page.line()
    page.wrapped("kernels", _kernels(t))
    page.wrapped("device", _device(t))
    if slower := [x for x in t.found if x.best and not x.is_faster]:
        page.wrapped("library", _slower(t, len(slower)))
    if t.schedule.tiles:
        page.wrapped("sure", _sure(t))
    if t.store:
        page.wrapped("store", _store(t))
    if failed := sum(len(x.failures) for x in t.found):
        page.wrapped("failed", f"{failed:,} measurements, left out")
    if t.fusion:
        page.wrapped("fusion", _fusion(t, t.fusion))
        page.wrapped("pipeline", str(t.fusion.best.pipeline))
    page.wrapped("predictors", _predictors(t))
    page.line()
    some = t.found[: layout.top]
    measured = any(x.measured for x in some)
    columns = [
        ("runs", True),
        ("library", True),
        ("generated", True),
        ("80 %", True),
        *([("measured", True)] if measured else []),
        ("takes", False),
        ("tile", False),
        ("legal", True),
        ("of", True),
        ("layer", False),
    ]
    page.table(columns, [_row(t, x, measured) for x in some], drop=("of", "runs", "legal"))
    if len(t.found) > len(some):
        page.line(f"and {len(t.found) - len(some):,} more: --top", "dim")
    return page.text()


def _kernels(t: Tuning) -> str:
    runs = sum(x.task.runs for x in t.found)
    searches = " and ".join(dict.fromkeys(x.ranking.by for x in t.found)) or "nothing to search"
    tried, legal, count = (
        sum(getattr(x.ranking, name) for x in t.found) for name in ("tried", "legal", "count")
    )
    return (
        f"{len(t.found):,} distinct of {runs:,} launches; {searches}: {tried:,} tiles predicted of "
        f"{legal:,} that are legal, of {count:,} candidates"
    )


def _device(t: Tuning) -> str:
    chosen = sum(map(t.takes, t.found))
    library = f"{quantity(t.library_s, 's')} with the library's kernels"
    if not chosen:
        return f"{library}; no tile is chosen"
    measured = sum(t.takes(x) and x.is_measured for x in t.found)
    tiles = f"{chosen:,} {'tile' if chosen == 1 else 'tiles'} chosen"
    of = f", {measured:,} measured" if measured else ""
    return f"{library}, {quantity(t.chosen_s, 's')} with {tiles}{of}"


def _slower(t: Tuning, count: int) -> str:
    kernels = f"{count:,} of its own kernels are" if count > 1 else "1 of its own kernels is"
    then = "their tiles are chosen all the same" if t.everything else "the schedule leaves them out"
    return f"{kernels} predicted to be as fast or faster: {then}"


def _sure(t: Tuning) -> str:
    chosen = [x for x in t.found if t.takes(x)]
    sure = sum(x.is_sure for x in chosen)
    more = "" if sure == len(chosen) else "; for the others measure (--measure)"
    return f"{sure:,} of {len(chosen):,} gain more than both predictions may be off{more}"


def _store(t: Tuning) -> str:
    kept, measured = sum(x.kept for x in t.found), sum(len(x.measured) for x in t.found)
    known = f"{measured:,} measurements of these kernels" if measured else "no measurements"
    return f"{t.store}: {known}" + (f"; {kept:,} searches were there" if kept else "")


def _fusion(t: Tuning, found: Groupings) -> str:
    refused = f", {found.refused:,} refused" if found.refused else ""
    own = f"{quantity(found.start.latency_s, 's')} a run as {t.profile} groups ops"
    if found.best == found.start:
        return f"{len(found.tried):,} groupings tried{refused}; none is faster than {own}"
    best = quantity(found.best.latency_s, "s")
    return f"{len(found.tried):,} groupings tried{refused}; {own}, {best} by this pipeline"


def _predictors(t: Tuning) -> str:
    library = dict.fromkeys(x.task.kernel.cost.by for x in t.found if x.task.kernel.cost)
    return f"{', '.join(library) or 'none'} for the library's kernels, {t.predictor} for tiles"


def _row(t: Tuning, x: Tuned, measured: bool) -> tuple[str, ...]:
    task, best = x.task, x.best
    seconds = dict(x.measured).get(best.tile) if best else None
    return (
        f"x{task.runs:,}" if task.runs != 1 else "",
        quantity(task.kernel.time_s, "s"),
        quantity(best.time_s, "s") if best else "",
        _spread(best) if best else "",
        *([quantity(seconds, "s") if seconds else ""] if measured else []),
        "tile" if t.takes(x) else "library",
        tile_text(best.tile) if best else "none but the library's",
        f"{x.ranking.legal:,}",
        f"{x.ranking.count:,}",
        pattern(task.labels),
    )


def _spread(best: Ranked) -> str:
    """`-9 +14 %`: the ends of the interval, beside the time."""
    low, high = (100 * (end / best.time_s - 1) for end in best.interval_s)
    return f"{low:+.0f} {high:+.0f} %"


def tile_text(tile: Tile) -> str:
    """`128x64x32 s3 w8 /4`: the tile's extents in the order of the loops, batches and heads left
    out where there is one, stages, warps, blocks that share a sum; then `g8` and `u2`."""
    dims = "x".join(str(n) for d, n in tile.dims if n > 1 or d not in "bh")
    words = [dims, f"s{tile.stages}", f"w{tile.warps}"]
    rare = {"/": tile.split, "g": tile.group, "u": tile.unroll}
    return " ".join([*words, *(f"{mark}{n}" for mark, n in rare.items() if n != 1)])


def tuning_json(t: Tuning) -> str:
    """`{"schema": "gpuir.tune/1", ...}`, as docs/reference/json-schema.md describes it."""
    return json_text(
        SCHEMA,
        model=t.model,
        target=t.target.name,
        profile=t.profile,
        fusion=_groupings(t.fusion) if t.fusion else None,
        predictor=t.predictor,
        library_s=t.library_s,
        chosen_s=t.chosen_s,
        kernels=[_record(t, x) for x in t.found],
    )


def _groupings(found: Groupings) -> dict[str, Any]:
    return {
        "pipeline": str(found.best.pipeline),
        "latency_s": found.best.latency_s,
        "start_s": found.start.latency_s,
        "refused": found.refused,
        "tried": [{"pipeline": str(g.pipeline), "latency_s": g.latency_s} for g in found.tried],
    }


def _record(t: Tuning, x: Tuned) -> dict[str, Any]:
    kernel = x.task.kernel
    measured = dict(x.measured)
    return {
        "kernel": kernel.work.kernel,
        "dtype": kernel.work.dtype.name,
        "dims": {d: int(n) for d, n in kernel.work.dims},
        "names": ["/".join(path) for path in x.task.paths],
        "layers": list(dict.fromkeys(x.task.labels)),
        "runs": x.task.runs,
        "library": {
            "tile": _tile(kernel.tile),
            "time_s": kernel.time_s,
            "interval_s": kernel.interval_s,
            "by": kernel.cost.by if kernel.cost else None,
        },
        **record(x.ranking, "by tried legal", candidates=x.ranking.count, kept=x.kept),
        "tile": _tile(x.best.tile) if x.best else None,
        "takes": "tile" if t.takes(x) else "library",
        "ranking": [
            _ranked(r, measured)
            for i, r in enumerate(x.ranking.best)
            if i < LISTED or r.tile in measured
        ],
        "failed": [{"tile": tile.settings, "why": why} for tile, why in x.failures],
    }


def _ranked(x: Ranked, measured: dict[Tile, float]) -> dict[str, Any]:
    return record(x, "time_s interval_s", tile=x.tile.settings, measured_s=measured.get(x.tile))


def _tile(tile: Tile | None) -> str | None:
    return tile.settings if tile is not None else None
