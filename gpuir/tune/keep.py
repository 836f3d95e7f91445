"""Which configurations to measure where predictions may be wrong: the best, and some of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuir.tune.space import Floats, Predictions

SAFE = 4  # one in so many of what is kept is there whatever was predicted


def keep(time_s: Floats, top: int, usual: Sequence[int] | None = None) -> list[int]:
    """Places of at most `top` configurations to measure, the fastest predicted first.

    Those whose time is infinite are left out. Of `top`, one in `SAFE` (one at least, where `top` is
    2 or more) is a safety set: the `usual` ones, in place of which the first of all that can run is
    taken, as people put first what usually does well; then, of what is left in the order of
    prediction, the middle one of equal parts.

    Measured (validation/safety.py) on sweeps of a matrix product and a convolution, 288
    configurations at a time, 8 of them kept: the fastest kept took 1.07 and 1.08 times the fastest
    of all with predictions 30 % off, where the 8 fastest predicted had 1.05 and 1.06; 1.96 and 2.24
    times it with predictions upside down, where these had 9.7 and 8.5.
    """
    order = [int(i) for i in np.argsort(time_s, kind="stable") if np.isfinite(time_s[i])]
    if len(order) <= top:
        return order
    safe = max(top // SAFE, 1) if top > 1 else 0
    kept = set(order[: top - safe])
    for i in [min(order)] if usual is None else usual:
        if i in order and len(kept) < top and safe:
            kept.add(i)
    rest = [i for i in order if i not in kept]
    parts = np.array_split(np.array(rest), top - len(kept)) if top > len(kept) else []
    kept |= {int(part[len(part) // 2]) for part in parts}
    return [i for i in order if i in kept]


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
