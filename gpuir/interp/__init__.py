"""What every op means, in numpy: for folding constants and for tests. Plain on purpose."""

from gpuir.interp.arrays import NoMeaning, cast, to_numpy_dtype, to_type, wide
from gpuir.interp.meanings import evaluate, run
from gpuir.interp.tensor import unseen

__all__ = ["NoMeaning", "cast", "evaluate", "run", "to_numpy_dtype", "to_type", "unseen", "wide"]
