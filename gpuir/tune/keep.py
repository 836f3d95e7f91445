"""Which configurations to measure where predictions may be wrong: the best, and some unlike it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles
from gpuir.tune.space import Floats, Predictions

SAFE = 4  # one in so many of what is kept is there whatever was predicted


def keep(time_s: Floats, tiles: Tiles, top: int) -> list[int]:
    """Places of at most `top` configurations to measure, the fastest predicted first.

    Those whose time is infinite are left out. Of `top`, one in `SAFE` (one at least, where `top` is
    2 or more) is a safety set: the first of all that can run, as people put first what usually
    does well; then the fastest of each block shape that is not yet there, the shape first that is
    farthest, in doublings, from all that are. The other places go to the fastest predicted.
    """
    order = [int(i) for i in np.argsort(time_s, kind="stable") if np.isfinite(time_s[i])]
    if len(order) <= top:
        return order
    safe = max(top // SAFE, 1) if top > 1 else 0
    kept = order[: top - safe]
    if safe and min(order) not in kept:
        kept.append(min(order))
    columns = [np.broadcast_to(np.asarray(n, float), time_s.shape) for n in tiles.dims.values()]
    points = np.log2(np.maximum(np.stack(columns, 1), 1.0))
    near = _distances(points[order], points[kept])
    while len(kept) < top and near.max(initial=0.0) > 0:
        place = int(np.argmax(near))  # of equal ones the first, which is the fastest of its shape
        kept.append(order[place])
        near = np.minimum(near, _distances(points[order], points[[order[place]]]))
    rest = [i for i in order if i not in set(kept)]
    rank = {place: i for i, place in enumerate(order)}
    return sorted([*kept, *rest[: top - len(kept)]], key=rank.__getitem__)


def _distances(points: Any, kept: Any) -> Any:
    """Of each point, doublings to the nearest that is kept, summed over the dimensions."""
    return np.abs(points[:, None] - kept[None]).sum(2).min(1)


def worst_loss(found: Predictions, kept: Sequence[int]) -> float:
    """How many times the fastest of all the fastest kept can take, at most, while each of them lies
    within its interval: 1 where what is left out cannot win.

    The fastest kept takes no more than the least `high_s` of what is kept, and nothing that is left
    out less than the least `low_s` there. An interval holds 80 % of measurements, so this is no
    law; with intervals of t/e to t·e it is never above e².
    """
    out = np.isfinite(found.time_s)
    out[list(kept)] = False
    if not out.any():
        return 1.0
    return max(1.0, float(found.high_s[list(kept)].min() / found.low_s[out].min()))
