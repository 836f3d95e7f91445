"""Every op by its name; those of third parties are looked up when asked for."""

from __future__ import annotations

from gpuir.ir.graph import Op
from gpuir.ops.kernel import KERNELS
from gpuir.ops.tensor import OPS
from gpuir.plugins import find_named

VOCABULARY: dict[str, type[Op]] = OPS | KERNELS


def find_op(name: str) -> type[Op]:
    """The op or kernel of that name: ours, or an entry point's of `gpuir.ops`. UsageError, with the
    nearest names, when nobody has it."""
    return find_named(name, VOCABULARY, None, kind="op", group="ops", fits=is_op)


def is_op(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Op) and thing.name[:2] in ("t.", "k.")
