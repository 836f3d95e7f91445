"""What is known of an op is a row in each room's table; a missing row fails here."""

from __future__ import annotations

from dataclasses import fields

import pytest

from gpuir.interp.meanings import MEANINGS
from gpuir.interp.scalars import FUNCTIONS
from gpuir.ops import tensor as t
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


@pytest.mark.parametrize("name", OPS)
def test_tensor_op_says_what_it_is(name):
    op = OPS[name]
    if op.control or op is t.Fused:
        return
    assert issubclass(op, t.TensorOp) and op.kernel in KERNELS
    assert op is t.Opaque or op.kernel != "k.opaque"  # else nobody has said
    assert op is t.Opaque or sum(issubclass(op, kind) for kind in t.KINDS) == 1
    assert op.contraction == issubclass(op, t.Contraction)
    assert not op.weight or op.weight in {f.name for f in fields(op)} | set(vars(op))


@pytest.mark.parametrize("fn", SCALARS)
def test_scalar_function_has_a_meaning(fn):
    assert fn in FUNCTIONS
