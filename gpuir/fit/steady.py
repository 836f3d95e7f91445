"""Whether measurements can be trusted: signs that other work ran on the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from gpuir.fit.calibrate import FamilyFit
from gpuir.fit.collect import MeasuredRow
from gpuir.ir.errors import UsageError

UNSTEADY = 0.2  # of the quartiles' distance over the median, of half of the kernels; assumed
WAITED = 0.2  # seconds a second that threads wait for a core others have, all together; assumed
WORSE = 1.5  # times the error before: what few kernels, each left out once, tell apart; assumed
USELESS = 1.0  # mean error: as far off as a prediction of twice the time; assumed
FIX = "end other programs on this machine and measure again"


def host_doubts(spread: float) -> str:
    """What rounds of the same operation say against the time of a host; "" for nothing. `spread` is
    the distance between their quartiles over the median."""
    if spread <= UNSTEADY:
        return ""
    return (
        f"rounds of the same operation differ by {100 * spread:.0f} % ({100 * UNSTEADY:.0f} % is "
        f"usual at most), so the host's slowdown is uncertain: {FIX}"
    )


def waited_s(threads: Path = Path("/proc/self/task")) -> float:
    """Seconds that threads of this process were ready and had no core, all together, until now: the
    second number of schedstat (Linux, Documentation/scheduler/sched-stats.rst). 0 where the system
    does not say."""
    found = 0
    for path in threads.glob("*/schedstat"):
        try:
            found += int(path.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # a thread that ended meanwhile
            continue
    return found * 1e-9


def doubts(rows: Sequence[MeasuredRow], waited: float = 0.0) -> str:
    """What repeats of the same kernels say against a whole measurement; "" for nothing. On a CPU
    they may all be late alike, by the slices of time that others have: `waited` is how many seconds
    a second its threads waited for a core."""
    spreads = [row.spread for row in rows if row.is_measured]
    if not spreads:
        return ""
    if (middle := float(np.median(spreads))) > UNSTEADY:
        return (
            f"repeats of the same kernel differ by {100 * middle:.0f} % (half of the kernels by "
            f"more; {100 * UNSTEADY:.0f} % is usual at most), so the times are uncertain: {FIX}"
        )
    if waited > WAITED:
        return (
            f"other programs had the cores: of each second the kernels' threads waited "
            f"{waited:.2g} s, all together ({WAITED:g} s is usual at most), so the times are too "
            f"long: {FIX}"
        )
    return ""


def left_as_they_were(fits: Iterable[FamilyFit]) -> list[str]:
    """The families that a calibration would have made worse, a sentence each, and those that none
    would have made clearly better."""
    fits = list(fits)
    alike = ", ".join(f.family for f in fits if f.kept and not f.refused)
    said = (
        f"not calibrated, as no calibration predicts the kernels left out clearly better: {alike}"
    )
    return [
        f"{f.family} is not calibrated: kernels left out would be missed by "
        f"{100 * f.refused:.1f} %, and are by {100 * f.before:.1f} % without. "
        f"If other programs were running, {FIX}"
        for f in fits
        if f.refused
    ] + [said] * bool(alike)


def check_gain(fits: Iterable[FamilyFit], has_numbers: bool = True) -> None:
    """UsageError where a calibrated target misses the kernels measured by clearly more than that
    which it started from, or by so much that it says nothing: the file would be worse than none.
    Or where it made every family worse and says nothing else: no rates, no sizes of caches."""
    fits = list(fits)
    counted = [(f.rows, f.before, max(f.after, f.refused)) for f in fits]
    rows = sum(n for n, _, _ in counted)
    if not rows:
        return
    before, after = (sum(x[0] * x[i] for x in counted) / rows for i in (1, 2))
    nothing_left = not has_numbers and all(f.refused for f in fits)
    most = before if nothing_left else min(WORSE * before, USELESS)
    if after > most:
        raise UsageError(
            "the calibrated target does not predict the kernels measured, so it is not written",
            expected=f"a mean error of at most {100 * most:.1f} %",
            found=f"{100 * after:.1f} %, by calibrations on other kernels; {100 * before:.1f} % "
            "by the target it started from",
            fix=f"{FIX}, or check that the table is of this device",
        )
