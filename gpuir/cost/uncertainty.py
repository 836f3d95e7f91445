"""How far off a time may be where nothing of its kind was measured: a factor, not a share.

`KIND`: the family's formulas hold, but no table has such kernels (a convolution on matrix units, a
gradient, a pool). Eleven families of experts that B200 alone has were predicted with nothing fitted
to them: 24 % off in the mean, 44 % before the model chose their tiles one by one
(docs/validation/cost-model.md). If errors are normal in the logarithm, a factor of 1.6 holds 80 %
of errors with a mean of 44 %.

`ROUTINE`: passes and steps are counted (`cost.steps`), the library's own losses are not; and a
family with formulas of its own that nothing was fitted to, whose constants are all assumed.
`OPAQUE`: an operator that nobody knows reads its operands and writes its results, and what else it
does is not known: as far off as the bytes of a routine alone would be. 5 is what held 82 % of 51
routines timed on a CPU that the counts had not been set by, in its first run (tools/routines.py;
docs/validation/unfitted.md); public timings of GPUs are held by it too. Were nobody
to know the same routines, half of them would take more than 79 times their bytes once; operators
that only stream take as long as that. 100 is between.

`WRITTEN_OUT`: several launches that are costed as one fused kernel: 5, as of routines, is assumed.
"""

from __future__ import annotations

from math import log

from gpuir.cost.steps import STREAMS
from gpuir.cost.strips import is_written_out
from gpuir.cost.work import Work
from gpuir.targets.target import Target

Ends = tuple[float, float]  # logarithms: down, up
KIND: Ends = (log(1.6), log(1.6))
ROUTINE: Ends = (log(5.0), log(5.0))
WRITTEN_OUT: Ends = (log(1.6), log(5.0))
OPAQUE: Ends = (log(2.0), log(100.0))
UNKNOWN = ("k.opaque", "k.collective")


def is_unfitted(work: Work, backtest: str) -> bool:
    """Whether a kernel's interval is a factor, and all: no `backtest` says how far off its family
    is on such a device (a family that was added has none), or its family does not describe it."""
    undescribed = work.kernel == "k.routine" and work.kind not in STREAMS
    return not backtest or undescribed or work.kernel in UNKNOWN


def uncertainty(work: Work, target: Target, measured: bool, backtest: str) -> Ends:
    """How far beyond its family's errors a kernel may be, whose kind was `measured` or not."""
    if is_written_out(work, target):
        return WRITTEN_OUT
    if is_unfitted(work, backtest):
        return KIND if measured else OPAQUE if work.kernel in UNKNOWN else ROUTINE
    return (0.0, 0.0) if measured else KIND
