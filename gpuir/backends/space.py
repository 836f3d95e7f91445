"""What became of a design space, as text."""

from __future__ import annotations

from typing import Protocol

from gpuir.plan.space.space import DesignSpace


class PointCounts(Protocol):
    """How many points there are, how many of them have no latency, do not fit, and were there
    before."""

    @property
    def points(self) -> int: ...
    @property
    def without(self) -> int: ...
    @property
    def unfit(self) -> int: ...
    @property
    def there(self) -> int: ...


def space_text(space: DesignSpace, done: PointCounts, folder: str, took_s: float) -> str:
    """What there is, where it is, and how long that took."""
    new = done.points - done.there
    rate = f": {new / took_s:,.0f} a second" if new else ""
    lines = [
        f"{done.points:,} points: {space.jobs:,} jobs (a model, its sizes, dtype and profile) "
        f"on {space.devices:,} devices and {len(space.plans):,} plans",
        f"{new:,} of them computed in {took_s:.1f} s{rate}",
        *([f"{done.there:,} were there already"] if done.there else []),
        *([f"{done.unfit:,} do not fit the device's memory"] if done.unfit else []),
        *([f"{done.without:,} have no latency: the column `why` says why"] if done.without else []),
        f"Parquet in {folder}",
    ]
    return "\n".join(lines) + "\n"
