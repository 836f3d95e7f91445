"""What is known of an op is a row in each room's table; a missing row fails here."""

from __future__ import annotations

import pytest

from gpuir.interp.meanings import MEANINGS
from gpuir.interp.scalars import FUNCTIONS
from gpuir.ops.kernel import KERNELS
from gpuir.ops.scalar import SCALARS
from gpuir.ops.tensor import OPS


@pytest.mark.parametrize("name", [*OPS, *KERNELS])
def test_op_is_documented_and_named_after_its_level(name):
    op = {**OPS, **KERNELS}[name]
    assert op.name == name and name[:2] in ("t.", "k.")
    assert op.__doc__ and not op.__doc__.startswith(op.__name__ + "(")


@pytest.mark.parametrize("name", [*OPS, *KERNELS])
def test_interp_has_a_meaning(name):
    assert {**OPS, **KERNELS}[name] in MEANINGS


@pytest.mark.parametrize("fn", SCALARS)
def test_scalar_function_has_a_meaning(fn):
    assert fn in FUNCTIONS
