"""Gathers whose known indices lie beyond their table."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import loaded, one_node

from gpuir.ir.errors import ModelError

TABLE = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize("index", [4, -5])
def test_an_index_beyond_the_table_is_refused(index: int):
    model, _ = one_node("Gather", [TABLE, (np.array([0, index]),)], {"axis": 0})
    with pytest.raises(ModelError, match="an index is out of range") as refused:
        loaded(model)
    assert "-4 to 3" in str(refused.value)


@pytest.mark.parametrize("index", [3, -4])
def test_the_last_row_is_within(index: int):
    model, _ = one_node("Gather", [TABLE, (np.array([0, index]),)], {"axis": 0})
    loaded(model)
