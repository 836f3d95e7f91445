"""How a tensor lies in memory, and what views of it look like, as numpy has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Strided(NamedTuple):
    """Cells by axis, and how many cells apart neighbours along each lie."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_packed(self) -> bool:
        """Whether cells lie row by row, without gaps."""
        if 0 in self.shape:
            return True
        step = 1
        for n, s in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and s != step:
                return False
            step *= n
        return True

    def transpose(self, perm: Sequence[int]) -> Strided:
        return Strided(
            tuple(self.shape[i] for i in perm),
            tuple(self.strides[i] for i in perm),
        )

    def swapaxes(self, a: int, b: int) -> Strided:
        perm = [*range(len(self.shape))]
        perm[a], perm[b] = perm[b], perm[a]
        return self.transpose(perm)

    def broadcast_to(self, shape: tuple[int, ...]) -> Strided:
        """In each cell of a shape that it broadcasts to."""
        lead = len(shape) - len(self.shape)
        own = zip(self.shape, self.strides, strict=True)
        return Strided(shape, (*(0,) * lead, *(0 if n == 1 else s for n, s in own)))

    def sliced(self, sizes: Sequence[int], steps: Sequence[int]) -> Strided:
        """So many cells along each axis, steps of one or more apart."""
        rows = zip(self.strides, sizes, steps, strict=True)
        return Strided(tuple(sizes), tuple(s * step if n else s for s, n, step in rows))

    def reshape(self, shape: tuple[int, ...]) -> Strided | None:
        """The same cells in another shape; None where they have to move. Neighbouring axes go
        together where the outer one steps over the inner one (numpy, _attempt_nocopy_reshape)."""
        if shape == self.shape:
            return self
        if self.is_packed:
            return packed(shape)
        old = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        strides = [0] * len(shape)
        i = k = 0
        while i < len(shape) and k < len(old):
            first, last, end = k, k + 1, i + 1
            cells, own = shape[i], old[k][0]
            while cells != own:
                if cells < own:
                    cells *= shape[end]
                    end += 1
                else:
                    own *= old[last][0]
                    last += 1
            for (_, outer), (n, inner) in zip(
                old[first : last - 1], old[first + 1 : last], strict=True
            ):
                if outer != n * inner:
                    return None
            step = old[last - 1][1]
            for axis in reversed(range(i, end)):
                strides[axis] = step
                step *= shape[axis]
            i, k = end, last
        for axis in range(i, len(shape)):
            strides[axis] = strides[i - 1] if i else 1
        return Strided(shape, tuple(strides))


def packed(shape: tuple[int, ...], order: Sequence[int] | None = None) -> Strided:
    """A tensor without gaps, its axes from the outermost to the innermost in this order."""
    strides, step = [1] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis] or 1
    return Strided(shape, tuple(strides))
