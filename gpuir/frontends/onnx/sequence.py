"""Sequences and optional values, as far as they are laid out at load time: which tensors they hold
and where is known, only the tensors themselves are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import bool_, i64
from gpuir.ops import tensor as t


class Items(tuple[Value, ...]):
    """The tensors of a sequence, in order."""

    __slots__ = ()


def _items(n: OnnxNode) -> Items:
    value: Any = n.get(0)
    if isinstance(value, Items):
        return value
    found = "nothing" if value is None else str(value.type)
    raise ModelError(f"{n.op}: the first input is not a sequence", found=found)


def _position(n: OnnxNode, i: int, count: int, default: int) -> int:
    """Operand i as an index into `count` items, counted from the front."""
    at = n.integer(i, "the position") if n.get(i) is not None else default
    if not -count <= at < count:
        raise ModelError(
            f"{n.op}: the position is outside the sequence",
            expected=f"{-count}..{count - 1}",
            found=str(at),
        )
    return at % count


def construct(n: OnnxNode, e: Emitter) -> Any:
    return (Items(v for v in n.inputs if v is not None),)


def insert(n: OnnxNode, e: Emitter) -> Any:
    items = _items(n)
    at = n.integer(2, "the position") if n.get(2) is not None else len(items)
    if not -len(items) <= at <= len(items):
        expected = f"{-len(items)}..{len(items)}"
        raise ModelError(
            "SequenceInsert: the position is outside the sequence", expected=expected, found=str(at)
        )
    at += len(items) * (at < 0)
    return (Items((*items[:at], n[1], *items[at:])),)


def erase(n: OnnxNode, e: Emitter) -> Any:
    items = _items(n)
    at = _position(n, 1, len(items), -1)
    return (Items((*items[:at], *items[at + 1 :])),)


def item(n: OnnxNode, e: Emitter) -> Value:
    items = _items(n)
    return items[_position(n, 1, len(items), -1)]


def length(n: OnnxNode, e: Emitter) -> Value:
    return e.constant(len(_items(n)), i64, "length")


MOST_PIECES = 10_000  # of a tensor that is split: each is a node


def split(n: OnnxNode, e: Emitter) -> Any:
    """Pieces of the given lengths; of one cell each, its axis dropped unless `keepdims`, when no
    length is given."""
    x = n[0]
    axis = n.axis(x.type.rank)
    extent = x.type.shape[axis]
    lengths: Sequence[int]
    if n.get(1) is None or not n[1].type.shape:
        each = 1 if n.get(1) is None else n.integer(1, "the length of a piece")
        if each < 1 or extent // each > MOST_PIECES:
            raise ModelError(
                "SplitToSequence: the length of the pieces is out of range",
                expected=f"at least 1, and so large that there are at most {MOST_PIECES} pieces of "
                f"{extent} elements",
                found=str(each),
            )
        lengths = [min(each, extent - at) for at in range(0, extent, each)]
    else:
        lengths = n.ints(1, "the lengths of the pieces")
    if sum(lengths) != extent or min(lengths, default=0) < 0:
        found = str(list(lengths))
        raise ModelError(
            "SplitToSequence: the sum of the lengths is not the size of the axis",
            expected=str(extent),
            found=found,
        )
    pieces: list[Value] = []
    start = 0
    for size in lengths:
        starts = tuple(start if i == axis else 0 for i in range(x.type.rank))
        sizes = tuple(size if i == axis else d for i, d in enumerate(x.type.shape))
        piece = e(t.Slice(x, starts, sizes, (1,) * x.type.rank))
        if n.get(1) is None and not n.attr("keepdims", 1):
            piece = e(t.Reshape(piece, sizes[:axis] + sizes[axis + 1 :]))
        pieces.append(piece)
        start += size
    return (Items(pieces),)


def concat(n: OnnxNode, e: Emitter) -> Value:
    items = _items(n)
    if not items:
        raise ModelError("ConcatFromSequence: the sequence is empty")
    new = bool(n.attr("new_axis", 0))
    axis = n.from_front(int(n.attr("axis", 0)), items[0].type.rank + new)
    if new:
        items = tuple(
            e(t.Reshape(v, (*v.type.shape[:axis], 1, *v.type.shape[axis:]))) for v in items
        )
    return items[0] if len(items) == 1 else e(t.Concat(tuple(items), axis))


def wrapped(n: OnnxNode, e: Emitter) -> Any:
    """Optional and OptionalGetElement: an optional value that is there is the value itself."""
    return (n[0],)


def is_there(n: OnnxNode, e: Emitter) -> Value:
    return e.constant(n.get(0) is not None, bool_, "has_element")


CONVERTERS: dict[str, Converter] = {
    "SequenceConstruct": construct,
    "SequenceEmpty": construct,
    "SequenceInsert": insert,
    "SequenceErase": erase,
    "SequenceAt": item,
    "SequenceLength": length,
    "SplitToSequence": split,
    "ConcatFromSequence": concat,
    "Optional": wrapped,
    "OptionalGetElement": wrapped,
    "OptionalHasElement": is_there,
}
