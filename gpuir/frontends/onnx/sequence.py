"""Sequences and optional values, as far as they are laid out at load time: which tensors they hold
and where is known, only the tensors themselves are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cut, pick, reshaped
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, bool_, i64
from gpuir.ops import tensor as t


@dataclass(frozen=True)
class SequenceItem:
    """An item that lies in a larger tensor: x[index]."""

    x: Value
    index: int

    @property
    def type(self) -> TensorType:
        return self.x.type.with_shape(self.x.type.shape[1:])


Item = Value | SequenceItem


class Items(tuple[Item, ...]):
    """The tensors of a sequence, in order."""

    __slots__ = ()

    def appended(self, items: Iterable[Item]) -> Items:
        return type(self)((*self, *items))

    def renamed(self, names: Mapping[Value, Value]) -> Items:
        """The items, where values go by other names now."""
        return type(self)(
            replace(v, x=names.get(v.x, v.x)) if isinstance(v, SequenceItem) else names.get(v, v)
            for v in self
        )


class Grown(Items):
    """What a trip of a loop appends to a sequence that it hands on: how many items there were
    before depends on the trip, so nothing else can be said of it."""

    __slots__ = ()


class NotAppended(ModelError):
    """A loop does more with a sequence than to append to it: each trip is another."""


def whole(n: OnnxNode, items: Items) -> Items:
    """A sequence of which all items are known."""
    if isinstance(items, Grown):
        raise NotAppended(f"{n.op}: the length of the sequence changes in each trip of a loop")
    return items


def _sequence(n: OnnxNode) -> Items:
    value: Any = n.get(0)
    if isinstance(value, Items):
        return value
    raise n.refused(
        "the first input is not a sequence", found="nothing" if value is None else str(value.type)
    )


def _items(n: OnnxNode) -> Items:
    return whole(n, _sequence(n))


def taken(e: Emitter, item: Item) -> Value:
    """The tensor that an item is."""
    if isinstance(item, Value):
        return item
    return pick(e, item.x, 0, item.index)


def tensors_in(n: OnnxNode, e: Emitter) -> tuple[Value, ...]:
    """The tensors among a node's operands, those of sequences and optional values among them. Of
    rows that are all there are of a tensor, the tensor."""
    found: list[Value] = []
    for given in n.inputs:
        items = whole(n, given) if isinstance(given, Items) else (given,)
        rows = Counter(v.x for v in items if isinstance(v, SequenceItem))
        all_of = [x for x, count in rows.items() if count == x.type.shape[0]]
        found += all_of
        for v in items:
            if v is not None and not (isinstance(v, SequenceItem) and v.x in all_of):
                found.append(taken(e, v))
    return tuple(found)


def _position(n: OnnxNode, i: int, count: int, default: int) -> int:
    """Operand i as an index into `count` items, counted from the front."""
    at = n.integer(i, "the position") if n.get(i) is not None else default
    if not -count <= at < count:
        raise n.refused(
            "the position is outside the sequence",
            f"{-count}..{count - 1}" if count else "none: the sequence is empty",
            at,
        )
    return at % count


def construct(n: OnnxNode, e: Emitter) -> Any:
    return (Items(v for v in n.inputs if v is not None),)


def insert(n: OnnxNode, e: Emitter) -> Any:
    items = _sequence(n)
    if n.get(2) is None:
        return (items.appended((n[1],)),)
    items = whole(n, items)
    at = n.integer(2, "the position")
    if not -len(items) <= at <= len(items):
        raise n.refused("the position is outside the sequence", f"{-len(items)}..{len(items)}", at)
    at += len(items) * (at < 0)
    return (Items((*items[:at], n[1], *items[at:])),)


def erase(n: OnnxNode, e: Emitter) -> Any:
    items = _items(n)
    at = _position(n, 1, len(items), -1)
    return (Items((*items[:at], *items[at + 1 :])),)


def item(n: OnnxNode, e: Emitter) -> Value:
    """The item at a position; of items of one type, at a position that is not known."""
    items = _items(n)
    if n.get(1) is not None and n.known(1) is None and len({v.type for v in items}) == 1:
        return e(t.Gather(joined(e, items, 0, new=True), reshaped(e, n[1], ()), 0))
    return taken(e, items[_position(n, 1, len(items), -1)])


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
            raise n.refused(
                "the length of the pieces is out of range",
                f"at least 1, and so large that there are at most {MOST_PIECES} pieces of "
                f"{extent} elements",
                each,
            )
        lengths = [min(each, extent - at) for at in range(0, extent, each)]
    else:
        lengths = n.ints(1, "the lengths of the pieces")
    if sum(lengths) != extent or min(lengths, default=0) < 0:
        raise n.refused("the sum of the lengths is not the size of the axis", extent, list(lengths))
    if n.get(1) is None and not n.attr("keepdims", 1):
        return (Items([pick(e, x, axis, i) for i in range(extent)]),)
    return (Items(cut(e, x, axis, lengths)),)


def concat(n: OnnxNode, e: Emitter) -> Value:
    items = _items(n)
    if not items:
        raise n.refused("the sequence is empty")
    new = bool(n.attr("new_axis", 0))
    axis = n.from_front(int(n.attr("axis")), items[0].type.rank + new)
    return joined(e, items, axis, new)


def joined(e: Emitter, items: Items, axis: int, new: bool) -> Value:
    """Items side by side along an axis of theirs, or a new one."""
    if (stack := stacked(items)) is not None:
        order = [*range(1, stack.type.rank)]
        order.insert(axis, 0)
        if axis:
            stack = e(t.Transpose(stack, tuple(order)))
        shape = list(stack.type.shape)
        if not new:
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        return reshaped(e, stack, tuple(shape))
    parts = [taken(e, v) for v in items]
    if new:
        parts = [e(t.Reshape(v, (*v.type.shape[:axis], 1, *v.type.shape[axis:]))) for v in parts]
    return parts[0] if len(parts) == 1 else e(t.Concat(tuple(parts), axis))


def stacked(items: Items) -> Value | None:
    """The tensor whose rows the items are, all and in order; None where they are not."""
    (first, *_) = items
    if not isinstance(first, SequenceItem):
        return None
    rows = tuple(SequenceItem(first.x, i) for i in range(first.x.type.shape[0]))
    return first.x if tuple(items) == rows else None


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
READERS = {*CONVERTERS, "If", "Loop", "SequenceMap"}  # operators that read sequences
