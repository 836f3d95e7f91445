"""How far off a time may be where nothing of its kind was measured: a factor, not a share.

`KIND`: the family's formulas hold, but no table has such kernels (a convolution on matrix units, a
gradient, a pool). Eleven families of experts that B200 alone has were predicted with nothing fitted
to them: 24 % off in the mean, 44 % before the model chose their tiles one by one
(docs/validation/cost-model.md). If errors are normal in the logarithm, a factor of 1.6 holds 80 %
of errors with a mean of 44 %.

`ROUTINE`: passes and steps are counted (`cost.steps`), the library's own losses are not.
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


def is_unfitted(work: Work) -> bool:
    """Whether a kernel has no family that was fitted: its interval is a factor, and all."""
    return work.kernel in UNKNOWN or (work.kernel == "k.routine" and work.kind not in STREAMS)


def uncertainty(work: Work, target: Target, measured: bool) -> Ends:
    """How far beyond its family's errors a kernel may be, whose kind was `measured` or not."""
    if is_written_out(work, target):
        return WRITTEN_OUT
    if is_unfitted(work):
        return KIND if measured else OPAQUE if work.kernel in UNKNOWN else ROUTINE
    return (0.0, 0.0) if measured else KIND
