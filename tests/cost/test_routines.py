"""Library routines and what nobody measured: costs that grow with sizes, intervals of a factor."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.cost import steps
from gpuir.cost.batch import best_tiles, costs_of
from gpuir.cost.families import FAMILIES
from gpuir.cost.reading import work_of
from gpuir.cost.sized import top_k
from gpuir.cost.uncertainty import KIND, OPAQUE, ROUTINE
from gpuir.interp.routines import ROUTINES
from gpuir.ir.build import Builder
from gpuir.ir.graph import Level, Op, Value
from gpuir.ir.types import TensorType, bf16, f32, i64
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.targets.load import load_target

TARGETS = ("h100-sxm", "a100", "t4", "mi300x", "x86-64-v4")


def kernel(kind: type[k.BodyKernel], make, *types: TensorType) -> k.BodyKernel:
    values = tuple(Value(f"x{i}", type) for i, type in enumerate(types))
    b = Builder(Level.graph, "body")
    b.locs = ("test:routine",)
    for v in values:
        b.capture(v)
    op: Op = make(*values)
    return kind(values, b.finish(list(b.add(op))))


def cost(op: k.KernelOp, target: str):
    gpu, work = load_target(target), work_of(op)
    (cost,) = costs_of([*best_tiles({work: ""}, gpu).items()], gpu)
    return cost


def selected(rows: int, cells: int, found: int, target: str = "h100-sxm", dtype=f32):
    x = TensorType((rows, cells), dtype)
    return cost(kernel(k.Routine, lambda v: t.TopK(v, found, 1), x), target)


def matrix(fn: str, n: int, target: str = "h100-sxm", batch: int = 1):
    x = TensorType((batch, n, n), f32)
    make = lambda v: t.Routine(fn, (v,), (x,), (), work=20 * batch * n**3)  # noqa: E731
    return cost(kernel(k.Routine, make, x), target)


def test_a_whole_sort_is_no_quicker_than_its_largest():
    """All of a million cells took 6.2 us, a hundred of them 92."""
    few, nearly, whole = (selected(1, 1_000_000, n) for n in (100, 999_999, 1_000_000))
    assert few.time_s < nearly.time_s <= whole.time_s * (1 + 1e-9)
    # keys and indices, read and written in four passes, can not be quicker than the L2
    assert whole.time_s > 4 * 2 * 12e6 / load_target("h100-sxm").l2_bytes_per_s


@given(
    st.integers(1, 3000), st.integers(1, 200_000), st.data(),
    st.sampled_from(TARGETS), st.sampled_from([f32, bf16, i64]),
)  # fmt: skip
def test_more_is_never_cheaper(rows, cells, data, target, dtype):
    found = data.draw(st.integers(1, cells))
    more = data.draw(st.integers(found, cells))
    at = selected(rows, cells, found, target, dtype).time_s
    assert at <= selected(rows, cells, more, target, dtype).time_s * (1 + 1e-9)
    assert at <= selected(rows, cells, cells, target, dtype).time_s * (1 + 1e-9)
    assert at <= selected(rows, 2 * cells, found, target, dtype).time_s * (1 + 1e-9)
    assert at <= selected(2 * rows, cells, found, target, dtype).time_s * (1 + 1e-9)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fn", sorted(steps.of_matrices()))
def test_larger_matrices_take_longer(fn, target):
    times = [matrix(fn, n, target).time_s for n in (8, 33, 64, 257, 512, 1500)]
    assert all(a < b for a, b in pairwise(times))
    assert matrix(fn, 64, target, 8).time_s >= matrix(fn, 64, target).time_s


def test_a_decomposition_waits_for_its_columns():
    """512 x 512 took 153 us: its operands once, and its flops at the peak."""
    assert 5e-3 < matrix("svd", 512).time_s < 0.1
    assert matrix("cholesky", 512).time_s < matrix("qr", 512).time_s < matrix("svd", 512).time_s


def test_a_selection_of_extents_is_that_of_an_op():
    x = TensorType((64, 4096), f32)
    op = kernel(k.Routine, lambda v: t.TopK(v, 50, 1), x)
    assert work_of(op).detail == top_k(64, 4096, 50, f32).detail
    many = top_k([64.0, 8.0], 4096.0, 50.0, f32)
    assert many.take(0).detail == top_k(64, 4096, 50, f32).detail


# ---------------------------------------------------------------------------- what is not known


def test_a_routine_and_an_unknown_operator_have_intervals_of_a_factor():
    """They were 6.03 to 6.41 us, and 3 % each way."""
    from math import exp

    routine = selected(1024, 32768, 32768)
    x = TensorType((4, 4), f32)
    opaque = cost(kernel(k.Opaque, lambda v: t.Opaque("acme::Thing", (v,), (x,)), x), "h100-sxm")
    for found, ends in ((routine, ROUTINE), (opaque, OPAQUE)):
        low, high = found.interval
        assert low == pytest.approx(found.time_s * exp(-ends[0]))
        assert high == pytest.approx(found.time_s * exp(ends[1]))
        assert found.unseen == ("kind",)


def test_each_family_says_what_it_measured():
    """And no kind is said that its family does not get. A family may be without: it has no
    measurements yet, and an interval of a factor."""
    place = Path(__file__).parents[2] / "gpuir/cost/weights/tile2.json"
    families = json.loads(place.read_text())["families"]
    assert all(entry["kinds"] for entry in families.values())
    assert set(families) <= set(FAMILIES) - {"routines"}


def pooled(x: Value) -> t.Pool:
    return t.Pool("max", x, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))


UNMEASURED = {
    "pool": (k.Pool, pooled, (TensorType((8, 64, 56, 56), f32),)),
    "running sums": (k.Reduce, lambda x: t.Cumulative("sum", x, 1), (TensorType((64, 4096), f32),)),
    "a sum": (k.Reduce, lambda x: t.Reduce("sum", x, (1,)), (TensorType((64, 4096), f32),)),
    "elements by index": (
        k.Gather, lambda x, i: t.GatherElements(x, i, 0),
        (TensorType((4096, 64), f32), TensorType((4096, 64), i64)),
    ),
    "random numbers": (
        k.Map, lambda x: t.Routine("random", (x,), (x.type,), (("kind", "keep"),)),
        (TensorType((4096, 64), f32),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNMEASURED)
def test_a_kind_that_no_table_has_is_named_and_uncertain(name):
    kind, make, types = UNMEASURED[name]
    op = kernel(kind, make, *types)
    found = cost(op, "v100")
    assert "kind" in found.unseen
    low, high = found.interval
    assert low <= found.time_s * 1.001 / 1.6 and high >= found.time_s * 0.999 * 1.6
    assert KIND[1] > 0


def test_what_tables_have_is_not_uncertain():
    from cost.kernels import gemm, mapped, softmax

    for op in (
        gemm(512, 512, 512, f32),
        mapped("add", f32, (4096, 64), (4096, 64)),
        softmax(512, 1024),
    ):
        assert "kind" not in cost(op, "v100").unseen


def test_every_routine_has_steps():
    """By a row, or as bytes once: which is a choice, said here."""
    once = set(ROUTINES) - set(steps.ROUTINES) - set(steps.of_matrices())
    assert once == {
        "adaptive_pool", "adaptive_pool_gradient", "col2im", "coupled", "crop_and_resize",
        "deform_conv", "digit_sort", "edge_padding_gradient", "grid_sample", "im2col",
        "lookup", "lu_unpack", "max_roi_pool", "multi_tensor", "part_starts", "part_sums",
        "reverse_sequence", "roi_align", "run_parts", "run_starts", "sums_before", "tf_idf",
        "trees",
    }  # fmt: skip
