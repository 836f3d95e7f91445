"""Whether measurements can be trusted: signs that other work ran on the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gpuir.fit.calibrate import FamilyFit
from gpuir.fit.collect import Row
from gpuir.ir.errors import UsageError

UNSTEADY = 0.2  # of the quartiles' distance over the median, of half of the kernels; assumed
WORSE = 1.5  # times the error before: what few kernels, each left out once, tell apart; assumed
USELESS = 1.0  # mean error: as far off as a prediction of twice the time; assumed
FIX = "end other programs on this machine and measure again"


def check_memories(numbers: Mapping[str, float]) -> None:
    """UsageError where a cache is measured to be slower than the memory behind it."""
    l2, dram = numbers.get("l2.bytes_per_s"), numbers.get("dram.bytes_per_s")
    if l2 is not None and dram is not None and l2 < dram:
        raise UsageError(
            "the measurements contradict each other: the shared cache is slower than memory",
            expected=f"l2.bytes_per_s of at least dram.bytes_per_s ({dram:.4g})",
            found=f"l2.bytes_per_s = {l2:.4g}: other programs were probably running",
            fix=FIX,
        )


def doubts(rows: Sequence[Row]) -> str:
    """What repeats of the same kernels say against a whole measurement; "" for nothing."""
    spreads = [row.spread for row in rows if row.is_measured]
    if not spreads or (middle := float(np.median(spreads))) <= UNSTEADY:
        return ""
    return (
        f"repeats of the same kernel differ by {100 * middle:.0f} % (half of the kernels by more; "
        f"{100 * UNSTEADY:.0f} % is usual at most), so the times are uncertain: {FIX}"
    )


def check_gain(fits: Iterable[FamilyFit]) -> None:
    """UsageError where a calibrated target misses the kernels measured by clearly more than that
    which it started from, or by so much that it says nothing: the file would be worse than none."""
    counted = [(f.rows, f.before, f.after) for f in fits]
    rows = sum(n for n, _, _ in counted)
    if not rows:
        return
    before, after = (sum(x[0] * x[i] for x in counted) / rows for i in (1, 2))
    most = min(WORSE * before, USELESS)
    if after > most:
        raise UsageError(
            "the calibrated target does not predict the kernels measured, so it is not written",
            expected=f"a mean error of at most {100 * most:.1f} %",
            found=f"{100 * after:.1f} %, by calibrations on other kernels; {100 * before:.1f} % "
            "by the target it started from",
            fix=f"{FIX}, or check that the table is of this device",
        )
