"""Weights fitted without a GPU: a folder of files, each called after the GPU left out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuir.cost.learned import Model
    from gpuir.cost.table import Predictor
    from gpuir.targets.target import Target


def weights(folder: str | None, target: Target) -> Predictor | None:
    """The predictor by the weights in the folder that were trained without a target; None where it
    has none."""
    from gpuir.cost.batch import trained_cost

    own = None if folder is None else read_weights(folder, target)
    return None if own is None else trained_cost(own)


def read_weights(folder: str, target: Target) -> Model | None:
    """The weights in the folder that were trained without a target; None where it has none."""
    from gpuir.cost.learned import read
    from gpuir.files import read_text
    from gpuir.ir.errors import UsageError

    if not os.path.isdir(folder):
        raise UsageError(
            "there is no such folder of weights",
            where=folder,
            fix=f"gpuir fit TABLE... --without {target.name} --quick -o"
            f" {folder}/{target.name}.json",
        )
    file = Path(folder) / f"{target.name}.json"
    if not os.path.isfile(file):
        return None
    try:
        return read(read_text(file, "the weights"))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("not a file of weights", where=str(file), found=repr(error)) from error
