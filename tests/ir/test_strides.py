"""Views of tensors, held against numpy's own on arrays of bytes."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from gpuir.ir.strides import Strided, packed

EXTENTS = st.sampled_from([1, 1, 2, 3, 4, 6])


@st.composite
def steps(draw, x):
    """A view as numpy makes it, None where cells have to move, and the same step of ours."""
    rank = x.ndim
    match draw(st.sampled_from(["transpose", "slice", "broadcast", "reshape"])):
        case "transpose":
            perm = draw(st.permutations(range(rank)))
            return x.transpose(perm), lambda y: y.transpose(perm)
        case "slice":
            every = [draw(st.integers(1, 2)) for _ in x.shape]
            sizes = [
                draw(st.integers(min(n, 1), -(-n // s)))
                for n, s in zip(x.shape, every, strict=True)
            ]
            rows = zip(sizes, every, strict=True)
            return x[tuple(slice(0, n * s, s) for n, s in rows)], lambda y: y.sliced(sizes, every)
        case "broadcast":
            shape = tuple(draw(st.integers(1, 3)) if n == 1 else n for n in x.shape)
            shape = (*draw(st.lists(EXTENTS, max_size=1)), *shape)
            return np.broadcast_to(x, shape), lambda y: y.broadcast_to(shape)
        case _:
            shape, left = [], prod(x.shape)
            while left > 1:
                shape.append(
                    draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
                )
                left //= shape[-1]
            shape = tuple(shape) if left else (*draw(st.permutations(x.shape)),)
            try:
                return x.reshape(shape, copy=False), lambda y: y.reshape(shape)
            except ValueError:
                return None, lambda y: y.reshape(shape)


@given(st.data())
def test_views_are_those_of_numpy(data):
    shape = tuple(data.draw(st.lists(EXTENTS | st.integers(0, 1), max_size=5)))
    order = data.draw(st.permutations(range(len(shape))))
    ours = packed(shape, order)
    x = as_strided(np.empty(1, np.int8), shape, ours.strides)
    for _ in range(4):
        x, view = data.draw(steps(x))
        ours = view(ours)
        assert (ours is None) == (x is None)
        if x is None or prod(x.shape) > 500:
            return
        assert ours == Strided(x.shape, x.strides)
        assert ours.is_packed == x.flags.c_contiguous
