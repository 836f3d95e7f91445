"""The fastest tiles of a model's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpuir.backends.structured import record
from gpuir.ir.notes import Tile
from gpuir.report.equal import pattern
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import quantity
from gpuir.tune.groupings import Groupings
from gpuir.tune.space import Ranked
from gpuir.tune.tasks import Tuned, Tuning

LISTED = 16  # tiles of a kernel in JSON, and those that were measured


def tuning_report(t: Tuning, top: int) -> Report:
    """What is chosen and what it comes to, then a line for each distinct kernel. JSON is described
    in docs/reference/json-schema.md."""
    return Report(
        "gpuir.tune/1",
        lambda: _parts(t, top),
        lambda: {
            "model": t.model,
            "target": t.target.name,
            "profile": t.profile,
            "fusion": _groupings(t.fusion) if t.fusion else None,
            "predictor": t.predictor,
            "library_s": t.library_s,
            "chosen_s": t.chosen_s,
            "kernels": _found(t),
        },
    )


def _parts(t: Tuning, top: int) -> Iterator[Part]:
    title = f"{t.target.title} ({t.target.name})" if t.target.title else t.target.name
    yield Heading(f"{t.model} on {title} under {t.profile}: generated kernels")
    yield Notes(list(_head(t)))
    yield _table(t, top)


def _head(t: Tuning) -> Iterator[tuple[str, str]]:
    yield "kernels", _kernels(t)
    yield "device", _device(t)
    if slower := [x for x in t.found if x.best and not x.is_faster]:
        yield "library", _slower(t, len(slower))
    if t.schedule.tiles:
        yield "sure", _sure(t)
    if t.store:
        yield "store", _store(t)
    if failed := sum(len(x.failures) for x in t.found):
        yield "failed", f"{failed:,} measurements, left out"
    if t.fusion:
        yield "fusion", _fusion(t, t.fusion)
        yield "pipeline", str(t.fusion.best.pipeline)
    yield "predictors", _predictors(t)


def _table(t: Tuning, top: int) -> Table:
    def of_best(
        title: str, text: Callable[[Ranked], str], none: str = "", unit: str = ""
    ) -> Column:
        return Column(title, unit, text=lambda x: text(x.best) if x.best else none)

    more = len(t.found) - top
    return Table(
        t.found,
        (
            Column("runs", "x", value="task.runs", drop=2),
            Column("library", "s", value="task.kernel.time_s"),
            of_best("generated", lambda best: quantity(best.time_s, "s"), unit="s"),
            of_best("80 %", _spread, unit="%"),
            Column("measured", "s", value=_measured_s, blank=""),
            Column("takes", value=lambda x: _takes(t, x)),
            of_best("tile", lambda best: tile_text(best.tile), "none but the library's"),
            Column("legal", "count", value="ranking.legal", drop=3),
            Column("of", "count", value="ranking.count", drop=1),
            Column("layer", value=lambda x: pattern(x.task.labels)),
        ),
        top=top,
        more=(f"and {more:,} more: --top",) * (more > 0),
    )


def _measured_s(x: Tuned) -> float | None:
    return dict(x.measured).get(x.best.tile) if x.best else None


def _takes(t: Tuning, x: Tuned) -> str:
    return "tile" if t.takes(x) else "library"


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


def _groupings(found: Groupings) -> dict[str, Any]:
    return {
        "pipeline": str(found.best.pipeline),
        "latency_s": found.best.latency_s,
        "start_s": found.start.latency_s,
        "refused": found.refused,
        "tried": [{"pipeline": str(g.pipeline), "latency_s": g.latency_s} for g in found.tried],
    }


def _found(t: Tuning) -> Table:
    """Each distinct kernel, its library's tile, and the best that were found."""
    return Table(
        t.found,
        (
            Column(field="kernel", value="task.kernel.work.kernel"),
            Column(field="dtype", value="task.kernel.work.dtype.name"),
            Column(field="dims", value=lambda x: {d: int(n) for d, n in x.task.kernel.work.dims}),
            Column(field="names", value=lambda x: ["/".join(path) for path in x.task.paths]),
            Column(field="layers", value=lambda x: list(dict.fromkeys(x.task.labels))),
            *fields("runs", "task"),
            Column(field="library", value=_library),
            *fields("by tried legal", "ranking"),
            Column(field="candidates", value="ranking.count"),
            *fields("kept"),
            Column(field="tile", value=lambda x: _tile(x.best.tile) if x.best else None),
            Column(field="takes", value=lambda x: _takes(t, x)),
            Column(field="ranking", value=_ranking),
            Column(
                field="failed",
                value=lambda x: [{"tile": y.settings, "why": why} for y, why in x.failures],
            ),
        ),
        {"model": t.model, "target": t.target.name, "profile": t.profile},
    )


def _library(x: Tuned) -> dict[str, Any]:
    kernel = x.task.kernel
    by = kernel.cost.by if kernel.cost else None
    return record(kernel, "time_s interval_s", tile=_tile(kernel.tile), by=by)


def _ranking(x: Tuned) -> list[dict[str, Any]]:
    measured = dict(x.measured)
    return [
        record(r, "time_s interval_s", tile=r.tile.settings, measured_s=measured.get(r.tile))
        for i, r in enumerate(x.ranking.best)
        if i < LISTED or r.tile in measured
    ]


def _tile(tile: Tile | None) -> str | None:
    return tile.settings if tile is not None else None
