"""Grouping: no launch waits for itself, whatever is put together in whatever order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from gpuir.fusion.groups import Groups
from gpuir.fusion.launch import is_unpacking
from gpuir.ir.graph import Node, Value
from gpuir.ir.types import TensorType, f16, i8
from gpuir.ops import tensor as t


@dataclass(eq=False)
class Some:
    items: Sequence[int]
    waits: Collection[int] = field(default_factory=set[int])


def waits_for(groups: Groups[Some], group: Some, wanted: Some) -> bool:
    """By walking all there is, which `Groups` does not."""
    seen: set[Some] = set()
    stack = groups.feeders(group)
    while stack:
        other = stack.pop()
        if other not in seen:
            seen.add(other)
            stack += groups.feeders(other)
    return wanted in seen


@given(st.data())
def test_what_would_wait_for_itself_is_seen(data: st.DataObject):
    n = data.draw(st.integers(2, 8))
    waits = [
        set(data.draw(st.sets(st.integers(0, max(i - 1, 0)), max_size=3))) - {i} for i in range(n)
    ]
    readers = {i: [j for j in range(n) if i in waits[j]] for i in range(n)}
    groups = Groups[Some](readers)
    for i in range(n):
        groups.put(Some([i], waits[i]), [i])
    for i, j in data.draw(st.permutations([*combinations(range(n), 2)])):
        a, b = groups.of[i], groups.of[j]
        if a is b:
            continue
        outside = [g for g in groups.made(b.waits) if g not in (a, b)]
        cyclic = any(waits_for(groups, g, a) for g in outside)
        assert groups.leads(a, set(b.waits) - set(b.items)) == cyclic
        if not cyclic and not groups.leads(b, set(a.waits) - set(a.items)):
            both = Some(sorted({*a.items, *b.items}), {*a.waits, *b.waits})
            groups.put(both, both.items)
    order = groups.ordered()
    assert sorted(i for g in order for i in g.items) == list(range(n))
    for at, group in enumerate(order):
        assert set(groups.feeders(group)) <= set(order[:at])


def test_a_launch_that_reaches_over_others_makes_what_is_before_wait():
    """1 reads 0, and is made before 2; since 0 and 3 are one launch, it waits for 2."""
    waits: list[set[int]] = [set(), {0}, set(), {0, 2}, {1, 2}]
    groups = Groups[Some]({i: [j for j in range(5) if i in waits[j]] for i in range(5)})
    for i in range(4):
        groups.put(Some([i], waits[i]), [i])
    assert not groups.leads(groups.of[2], waits[4])
    both = Some([0, 3], {0, 2})
    groups.put(both, both.items)
    assert groups.leads(groups.of[2], waits[4])


X = TensorType((8, 8), f16)
W, Q = Value("w", X), Value("q", TensorType((8, 8), i8))
SCALE, STEP = Value("s", TensorType((8, 1), f16)), Value("i", X)
CAST = Node(t.Cast(Q, f16), (STEP,), ("m:a",))


def scaled(by: Value) -> list[Node]:
    return [CAST, Node(t.Map("mul", (STEP, by)), (W,), ("m:b",))]


def test_a_weight_is_unpacked_from_what_weights_alone_decide():
    params = {Q, SCALE}
    assert is_unpacking(scaled(SCALE), W, params, params)
    assert is_unpacking(scaled(SCALE), W, {Q}, params)  # a scale that another launch makes
    assert not is_unpacking(scaled(SCALE), W, {Q}, {Q})  # a scale that comes in
    assert not is_unpacking(scaled(SCALE), W, {SCALE}, params)  # another launch makes the most


def test_what_is_rounded_for_a_product_or_read_by_strides_is_not_unpacked():
    rounded = Node(t.Cast(W, i8), (Q,), ("m:a",))
    turned = Node(t.Transpose(STEP, (1, 0)), (W,), ("m:a",))
    assert not is_unpacking([rounded], Q, {W}, {W})
    assert not is_unpacking([turned], W, {STEP}, {STEP})
    assert not is_unpacking([], W, {W}, {W})
