"""What images cost by how they lie: cuDNN's conversions, pools, norms of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuir.cost.batch import best_tiles
from gpuir.cost.nest import Tiles
from gpuir.cost.reading import work_of
from gpuir.cost.stream import LOAD_CLOCKS
from gpuir.cost.tile import choose, estimate
from gpuir.cost.work import Channels, Threads, Windowed
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import DType, TensorType, channels_last, f16, f32, i64, tf32
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.targets.load import load_target

N, C, SIDE = 64, 256, 56


def image(name: str, dtype: DType, last: bool, *shape: int) -> Value:
    type = TensorType(shape, dtype)
    return Value(name, type.with_order(channels_last(len(shape))) if last else type)


def conv(last: bool, dtype: DType = f16, library: str = "cudnn", groups: int = 1) -> k.Conv:
    x = image("x", dtype, last, N, C, SIDE, SIDE)
    w = image("w", dtype, last, C, C // groups, 3, 3)
    math = tf32 if dtype == f32 else None
    parts = ((1, 1), (1, 1), (1, 1), (1, 1), groups)
    return k.Conv.of(t.Conv(x, w, *parts), math=math, library=library)


def seconds(op: k.KernelOp, target: str) -> float:
    work, device = work_of(op), load_target(target)
    (tile,) = best_tiles({work: op.name}, device).values()
    return float(estimate(work, Tiles.of(tile, work), device).time_s)


def body(inputs: Sequence[Value], *nodes: Node) -> Graph:
    outputs = tuple(v for n in nodes for v in n.results)
    return Graph(Level.graph, "", tuple(inputs), (), nodes, outputs)


@pytest.mark.parametrize("target", ["rtx3090", "rtx4090", "a100-sxm-80gb", "h100-sxm-80gb", "t4"])
def test_channels_last_is_quicker_on_matrix_units(target: str):
    assert seconds(conv(last=True), target) < seconds(conv(last=False), target)


def test_what_is_converted_is_read_and_written_once():
    """x has 64 x 256 x 56 x 56 cells, w 256 x 256 x 3 x 3, of two bytes."""
    x, w = work_of(conv(last=False)).beside
    assert x.nbytes == 2 * 2 * N * C * SIDE * SIDE
    assert w.nbytes == 2 * 2 * C * C * 9
    assert work_of(conv(last=True)).beside == ()
    assert work_of(conv(last=False, library="")).beside == ()
    assert work_of(conv(last=False, groups=8)).beside == ()


def test_conversions_take_at_least_their_bytes():
    a100 = load_target("a100-sxm-80gb")
    apart = seconds(conv(last=False), a100.name) - seconds(conv(last=True), a100.name)
    assert apart > 4 * N * C * SIDE * SIDE / a100.dram_bytes_per_s


def test_conversions_are_launched():
    """Of the image and of the weight, besides the convolution itself."""
    slow = seconds(conv(last=False), "a100-sxm-80gb+launch_s=1e-4")
    quick = seconds(conv(last=False), "a100-sxm-80gb+launch_s=1e-8")
    assert slow - quick == pytest.approx(3e-4, rel=0.02)


@pytest.mark.parametrize(
    ("target", "dtype", "groups"),
    [("p100-pcie-16gb", f16, 1), ("v100-pcie-32gb", f32, 1), ("a100-sxm-80gb", f16, C)],
)
def test_lanes_take_images_as_they_lie(target: str, dtype: DType, groups: int):
    """No matrix units; none for TF32; a channel a group."""
    layouts = (conv(last, dtype, groups=groups) for last in (True, False))
    assert len({seconds(op, target) for op in layouts}) == 1


def test_a_pixel_needs_no_conversion():
    x = image("x", f16, False, N, C, 1, 1)
    w = image("w", f16, False, C, C, 1, 1)
    parts = ((1, 1), (0, 0), (0, 0), (1, 1))
    assert work_of(k.Conv.of(t.Conv(x, w, *parts), library="cudnn")).beside == ()


def test_gradients_of_weights_convert_both_operands():
    x, dy = (image(name, f16, False, N, C, SIDE, SIDE) for name in ("x", "dy"))
    parts = ((1, 1), (1, 1), (1, 1), (1, 1))
    op = k.Conv.of(t.ConvWeightGradient(x, dy, (3, 3), *parts), library="cudnn")
    assert [w.nbytes for w in work_of(op).beside] == 2 * [4 * N * C * SIDE * SIDE]


def max_pool(last: bool, indices: bool = True) -> k.Pool:
    x = image("x", f16, last, N, C, SIDE, SIDE)
    inner = Value("x", TensorType(x.type.shape, f16))
    parts = ((3, 3), (2, 2), (1, 1), (1, 1), (1, 1))
    ops = [t.Pool(fn, inner, *parts) for fn in ("max", "argmax")[: 1 + indices]]
    nodes = [Node(op, (Value(op.fn, op.result_types[0]),), ("m:pool",)) for op in ops]
    return k.Pool((x,), body((inner,), *nodes))


def test_indices_of_a_pool_are_written():
    """28 x 28 results an image and channel: two bytes each, and eight of an index."""
    cells = N * C * 28 * 28
    plain, whole = (work_of(max_pool(False, indices)) for indices in (False, True))
    assert whole.nbytes - plain.nbytes == 8 * cells
    assert [a.type.dtype for a in max_pool(False).nest.writes] == [f16, i64]


def test_a_row_major_pool_goes_cell_by_cell():
    work = work_of(max_pool(last=False))
    assert work.kind == "scalar" and work.detail == Windowed(3.0)
    assert work_of(max_pool(last=True)).detail is None
    times = [seconds(max_pool(last, indices), "rtx3090") for last, indices in CASES]
    assert times == sorted(times) and len({*times}) == 3


CASES = ((True, False), (True, True), (False, True))


def batch_norm(last: bool) -> k.Reduce:
    x = image("x", f16, last, 256, 64, SIDE, SIDE)
    inner = Value("x", TensorType(x.type.shape, f16))
    op = t.Normalize(inner, (0, 2, 3))
    return k.Reduce((x,), body((inner,), Node(op, (Value("y", op.result_types[0]),), ("m:bn",))))


def test_blocks_share_a_channel_where_channels_are_columns():
    """64 channels keep 64 of 108 SMs busy, where each is one block's."""
    assert work_of(batch_norm(last=True)).detail == Channels(batch=True, last=True)
    assert work_of(batch_norm(last=False)).detail == Channels(batch=True, last=False)
    a100 = load_target("a100-sxm-80gb")
    assert choose(work_of(batch_norm(last=True)), a100).split > 1
    assert seconds(batch_norm(True), a100.name) < seconds(batch_norm(False), a100.name)


def interpolated(library: str) -> k.Gather:
    x = image("x", f32, False, N, C, 14, 14)
    op = t.Resize(x, (N, C, 28, 28), (1.0, 1.0, 2.0, 2.0), "linear")
    y = Value("y", op.result_types[0])
    return k.Gather((x,), body([x], Node(op, (y,))), library=library)


def test_a_thread_that_takes_every_image_waits_for_its_loads():
    """28 x 28 threads, each of 64 x 256 turns of two loads, however many SMs there are."""
    work = work_of(interpolated("2.11"))
    detail = work.detail_as(Threads)
    assert (detail.warps, detail.turns) == (25, N * C)
    least_s = 2 * N * C * LOAD_CLOCKS / load_target("rtx4090").under_load.clock_hz
    assert least_s < seconds(interpolated("2.11"), "rtx4090") < 2 * least_s
    assert seconds(interpolated(""), "rtx4090") < least_s / 10


def depthwise(library: str, window: int = 3, stride: int = 1, way: str = "forward") -> k.Conv:
    side = SIDE // stride
    x, y = image("x", f16, False, N, C, SIDE, SIDE), image("y", f16, False, N, C, side, side)
    w = image("w", f16, False, C, 1, window, window)
    edge = (window // 2,) * 2
    parts = ((stride, stride), edge, edge, (1, 1), C)
    if way == "weights":
        gradient = t.ConvWeightGradient(x, y, (window, window), *parts)
        return k.Conv.of(gradient, library=library)
    if way == "images":
        grow = (stride - 1,) * 2
        return k.Conv.of(t.ConvTranspose(y, w, *parts, extra=grow), library=library)
    return k.Conv.of(t.Conv(x, w, *parts), library=library)


@pytest.mark.parametrize("target", ["rtx3090", "a100-sxm-80gb", "t4", "p100"])
@pytest.mark.parametrize("way", ["forward", "images", "weights"])
def test_instructions_bound_atens_depthwise_kernels_of_wide_windows(target: str, way: str):
    """49 cells of a window for each output: an instruction or more for each, whoever's they are."""
    device = load_target(target)
    own, cudnn = (seconds(depthwise(name, 7, way=way), target) for name in ("aten", "cudnn"))
    lanes = 128 * device.sms * device.clock_hz
    assert own > 2 * cudnn
    assert own > 9 * 49 * N * C * SIDE**2 / (2 * lanes)
    assert own > 2 * seconds(depthwise("aten", 3, way=way), target)


def test_atens_gradient_of_images_goes_through_whole_windows():
    """A fourth of a window's cells have an output where the stride is two; all are looked at."""
    whole, half = (seconds(depthwise("aten", 7, stride, "images"), "rtx3090") for stride in (1, 2))
    assert half == pytest.approx(whole, rel=0.1)


def test_a_depthwise_convolution_is_bound_by_memory_under_cudnn():
    op = depthwise("cudnn")
    moved = sum(a.type.nbytes for a in (*op.nest.reads, *op.nest.writes))
    assert seconds(op, "rtx3090") < 1.5 * moved / load_target("rtx3090").dram_bytes_per_s


def test_cells_found_by_strides_are_waited_for():
    """One after another in a thread; of two bytes they do not fill the memory's pipeline."""
    x = image("x", f16, False, N, C, SIDE, SIDE)
    inner, result = Value("x", x.type), Value("y", x.type)
    op = k.Map((x,), body((inner,), Node(t.Map("relu", (inner,)), (result,), ("m:a",))))
    for target in ("rtx3090", "rtx4090", "a100-sxm-80gb"):
        assert seconds(replace(op, apart=1), target) > 1.1 * seconds(op, target)


def test_more_lanes_bring_the_statistics_of_short_rows_together_sooner():
    x = image("x", f16, False, 1 << 20, 96)
    inner = Value("x", x.type)
    op = t.Normalize(inner, (1,))
    norm = k.Reduce((x,), body((inner,), Node(op, (Value("y", op.result_types[0]),), ("m:ln",))))
    assert seconds(norm, "a100+sm.fp32_lanes=128") < 0.9 * seconds(norm, "a100")
