"""Mixed-integer linear programs, solved by HiGHS (highspy, MIT licence)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.errors import UsageError

GAP = 1e-6
Row = tuple[float, float, list[tuple[int, float]]]  # least, most, of a sum of columns by factors


@dataclass(frozen=True)
class LinearProgram:
    """Minimises the sum of `cost` of columns between 0 and `upper`, of which some are `whole`,
    where each row's sum lies between its least and its most."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    whole: Sequence[bool]
    rows: Sequence[Row]


def is_there() -> bool:
    return find_spec("highspy") is not None


def require(fix: str) -> None:
    """UsageError where HiGHS is not installed."""
    if not is_there():
        raise UsageError("the solver HiGHS is not installed", fix=fix)


def solve(
    program: LinearProgram, seconds: float, start: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64] | None, float | None]:
    """The columns of the best solution found within so many seconds, None where there is none, and
    a sum that no solution is below. `start` is a solution that is known."""
    import highspy

    h = _silent()
    options = {"time_limit": float(seconds), "mip_rel_gap": GAP, "random_seed": 0}
    for name, value in options.items():
        h.setOptionValue(name, value)
    count = len(program.cost)
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, len(program.rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = program.cost, np.zeros(count), program.upper
    low, high, entries = zip(*program.rows, strict=True)
    lp.row_lower_, lp.row_upper_ = np.array(low), np.array(high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lengths = [len(e) for e in entries]
    lp.a_matrix_.start_ = np.cumsum([0, *lengths]).astype(np.int32)
    lp.a_matrix_.index_ = np.array([i for e in entries for i, _ in e], np.int32)
    lp.a_matrix_.value_ = np.array([v for e in entries for _, v in e], float)
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if w else kinds.kContinuous for w in program.whole]
    h.passModel(lp)
    if start is not None:
        known = highspy.HighsSolution()
        known.col_value = list(start)
        h.setSolution(known)
    h.run()
    info = h.getInfo()
    bound = float(info.mip_dual_bound)
    least = bound if np.isfinite(bound) else None
    if not np.isfinite(info.objective_function_value) or info.primal_solution_status != 2:
        return None, least
    return np.array(h.getSolution().col_value), least


def _silent() -> Any:
    """A solver that writes nothing to stdout. Switching callbacks on, which its constructor does,
    is the first call that prints HiGHS's header, so the option has to be set before that."""
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    h = Silent()
    h.setOptionValue("output_flag", False)  # of versions whose constructor calls nothing
    return h
