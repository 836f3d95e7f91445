"""What searches and measurements found, in a store.

A row is one tile of one kernel on one target, by one version of the predictor. Measured seconds do
not depend on who predicted: they stay when the predictor changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike

from gpuir.cost.generated import BY
from gpuir.ir.notes import Tile
from gpuir.store import Store, version
from gpuir.tune.kernels import Kernel
from gpuir.tune.keys import kernel_key, kernel_text, target_key, tile_in
from gpuir.tune.search import Ranking
from gpuir.tune.space import Ranked, device_of


@dataclass(frozen=True)
class Result:
    """A tile of a kernel, by its text, on a target, with its prediction, and what was measured, in
    seconds."""

    kernel: str
    kernel_text: str
    predicted: Ranked
    measured_s: float | None


class Results(Store):
    """The results in a store. `predictor` is the version that predictions are read and written of;
    those of others stay in the file and are not read."""

    def __init__(self, path: str | PathLike[str], predictor: str = BY):
        super().__init__(path)
        self.predictor = predictor

    # -- rankings

    def ranking(self, kernel: Kernel, search: str) -> Ranking | None:
        """What a search, with its options as text, found for a kernel before, if it did."""
        where = (*_place(kernel), self.predictor)
        rows = self.all(
            "select by, tried, legal, count, tiles from searches"
            " where kernel = ? and target = ? and predictor = ? and search = ?",
            (*where, search),
        )
        if not rows:
            return None
        ((by, tried, legal, count, tiles),) = rows
        found = {
            text: Ranked(tile_in(text), time_s, (low_s, high_s))
            for text, time_s, low_s, high_s in self.all(
                "select tile, predicted_s, low_s, high_s from results"
                " where kernel = ? and target = ? and predictor = ?",
                where,
            )
        }
        best = tuple(found[text] for text in tiles.split("\n") if text in found)
        return Ranking(best, by, tried, legal, count)

    def keep_ranking(self, kernel: Kernel, search: str, ranking: Ranking) -> None:
        """Keeps what a search found."""
        place = (*_place(kernel), self.predictor)
        tiles = "\n".join(x.tile.settings for x in ranking.best)
        numbers = (ranking.tried, ranking.legal, ranking.count)
        with self.writing():
            for x in ranking.best:
                self._keep(kernel, x)
            self.change(
                "insert or replace into searches values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*place, search, ranking.by, *numbers, tiles, _now()),
            )

    # -- measurements

    def keep_measured(self, kernel: Kernel, predicted: Ranked, seconds: float) -> None:
        """Keeps what a tile was measured to take beside what was predicted."""
        place = (*_place(kernel), self.predictor, predicted.tile.settings)
        with self.writing():
            self._keep(kernel, predicted)
            self.change(
                "update results set measured_s = ?, at = ?"
                " where kernel = ? and target = ? and predictor = ? and tile = ?",
                (seconds, _now(), *place),
            )

    def measured(self, kernel: Kernel) -> dict[Tile, float]:
        """What tiles of a kernel were measured to take, whoever predicted them; the last counts."""
        rows = self.all(
            "select tile, measured_s from results"
            " where kernel = ? and target = ? and measured_s is not null order by at, predictor",
            _place(kernel),
        )
        return {tile_in(text): seconds for text, seconds in rows}

    def results(self, target: str) -> list[Result]:
        """What this version of the predictor is known to have said of a target, by its key, in the
        order in which it was found."""
        rows = self.all(
            "select kernel, kernel_text, tile, predicted_s, low_s, high_s, measured_s from results"
            " where target = ? and predictor = ? order by at, kernel, tile",
            (target, self.predictor),
        )
        return [
            Result(key, text, Ranked(tile_in(tile), time_s, (low_s, high_s)), measured_s)
            for key, text, tile, time_s, low_s, high_s, measured_s in rows
        ]

    # -- what others wrote

    def others(self) -> dict[str, int]:
        """How many predictions are by other versions of the predictor, by version."""
        rows = self.all(
            "select predictor, count(*) from results where predictor <> ? group by predictor"
            " order by predictor",
            (self.predictor,),
        )
        return dict(rows)

    def forget_others(self) -> None:
        """Takes out what other versions of the predictor said. Rows with measurements stay."""
        with self.writing():
            self.change(
                "delete from results where predictor <> ? and measured_s is null", (self.predictor,)
            )
            self.change("delete from searches where predictor <> ?", (self.predictor,))

    def _keep(self, kernel: Kernel, x: Ranked) -> None:
        target = device_of(kernel, "")
        self.change(
            "insert into results (kernel, kernel_text, target, target_name, predictor, gpuir, tile,"
            " predicted_s, low_s, high_s, at) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " on conflict do update set predicted_s = excluded.predicted_s,"
            " low_s = excluded.low_s, high_s = excluded.high_s, gpuir = excluded.gpuir",
            (
                *(kernel_key(kernel.work), kernel_text(kernel.work)),
                *(target_key(target), target.name, self.predictor, version()),
                *(x.tile.settings, x.time_s, *x.interval_s, _now()),
            ),
        )


def _place(kernel: Kernel) -> tuple[str, str]:
    return kernel_key(kernel.work), target_key(device_of(kernel, ""))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
