"""Kernels of images, by how PyTorch's share out their work: against what an H200 took."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import gpuir
from gpuir.cost.pixels import threads_of
from gpuir.cost.reading import work_of
from gpuir.run.loading import load_text
from gpuir.targets.load import load_target

MEASURED = Path(__file__).parents[2] / "specs" / "measurements" / "pixels.csv"
LAST = "{0, 2, 3, 1}"
MODES = {"bicubic": "cubic", "bilinear": "linear", "nearest": "nearest"}


def costed(reads: str, gives: str, op: str, target="h200-sxm", profile="eager@2.11"):
    text = f'graph @g of pytorch under "{profile}" {{\n{reads}\n  %y: {gives} = {op} at "m:op"\n'
    return gpuir.analyze(load_text(text + "  out %y\n}\n"), target=target, profile=profile).graph


def seconds(graph) -> float:
    return sum(n.cost.time_s for n in graph.nodes if n.cost)


def resized(mode, n, c, hi, wi, ho, wo, order="", dtype="f32", back=False, **under):
    image, result = f"{dtype}[{n}, {c}, {hi}, {wi}]", f"{dtype}[{n}, {c}, {ho}, {wo}]"
    scales = f"[1.0, 1.0, {ho / hi}, {wo / wi}]"
    if back:
        op = f't.resize_gradient(%d, [{n}, {c}, {hi}, {wi}], {scales}, mode="{mode}")'
        return costed(f"  in %d: {result}{order}", image, op, **under)
    op = f't.resize(%x, shape=[{n}, {c}, {ho}, {wo}], scales={scales}, mode="{mode}")'
    return costed(f"  in %x: {image}{order}", result, op, **under)


def pooled(fn, n, c, h, w, window, stride, order="", dtype="f32", back=False):
    low, out = window // 2, (h + 2 * (window // 2) - window) // stride + 1
    high = (out - 1) * stride + window - h - low
    image, result = f"{dtype}[{n}, {c}, {h}, {w}]", f"{dtype}[{n}, {c}, {out}, {out}]"
    parts = ", ".join(f"[{i}, {i}]" for i in (window, stride, low, high, 1))
    if not back:
        return costed(f"  in %x: {image}{order}", result, f't.pool("{fn}", %x, {parts})')
    reads, x = f"  in %d: {result}{order}", ""
    if fn == "max":
        reads, x = f"{reads}\n  in %x: {image}{order}", ", x=%x"
    op = f't.pool_gradient("{fn}", %d, [{n}, {c}, {h}, {w}], {parts}{x})'
    return costed(reads, image, op)


def measured():
    """Seconds of each call: of its kernels, all together."""
    found: dict[tuple[str, ...], float] = defaultdict(float)
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[n] for n in ("op", "sizes", "dtype", "layout", "pass"))
            found[key] += float(row["launches"]) * float(row["latency_us"]) * 1e-6
    return found


def predicted(op, sizes, dtype, layout, back):
    order = LAST if layout == "nhwc" else ""
    if op in MODES:
        return seconds(resized(MODES[op], *sizes, order, dtype, back))
    if op == "avg" or (op == "max" and back):  # torch's max pools give indices too, where forward
        return seconds(pooled({"avg": "mean"}.get(op, op), *sizes, order, dtype, back))
    return None


def test_calls_on_an_h200():
    """Bicubic resampling of channels-last images was predicted to take a three-hundredth of its
    time, averages a fifth, gradients of windows a tenth."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for (op, sizes, dtype, layout, way), time_s in measured().items():
        found = predicted(op, tuple(map(int, sizes.split())), dtype, layout, way == "bwd")
        if found is not None:
            ratios[f"{op} {way}"].append(found / time_s)
    assert len(ratios) == 9
    for op, found in ratios.items():
        error = np.abs(np.log(found))
        assert np.median(error) < np.log(1.3), op
        assert error.max() < np.log(2.1), op


def test_bicubic_has_a_thread_for_a_place_until_2_12():
    """YOLOS's embeddings. Times of torch 2.11 do not depend on the layout by a tenth of a percent
    in the gradient, and by a factor of 13 forward."""
    shape = (11, 384, 32, 54, 50, 66)
    old, last = (seconds(resized("cubic", *shape, order)) for order in ("", LAST))
    assert old == pytest.approx(2.52e-3, rel=0.25) and last == pytest.approx(33.7e-3, rel=0.1)
    new = seconds(resized("cubic", *shape, profile="eager"))
    assert new < old / 5
    back = [
        seconds(resized("cubic", *shape, back=True, profile=p)) for p in ("eager@2.11", "eager")
    ]
    assert back[0] == back[1] == pytest.approx(13.1e-3, rel=0.2)


def test_later_bicubic_is_as_its_authors_timed_it():
    """64 x 64 of 1,152 channels on a B200: pytorch pull request 174578. Beyond 18,432 places the
    kernel is the former one."""
    for size, us in (((38, 38), 48), ((56, 56), 81), ((74, 74), 121), ((74, 92), 144)):
        found = resized("cubic", 1, 1152, 64, 64, *size, target="b200", profile="eager")
        assert seconds(found) * 1e6 == pytest.approx(us, rel=0.35)
    large = (1, 64, 64, 64, 160, 160)
    old, new = (seconds(resized("cubic", *large, profile=p)) for p in ("eager@2.11", "eager"))
    assert old == new


def test_threads_by_hand():
    """One warp each 32 places; a turn for each channel of each image; of channels-last images a
    line of the cache for each pixel that a warp reads."""
    (kernel,) = resized("cubic", 2, 64, 16, 32, 16, 64, LAST).nodes
    threads = threads_of(kernel.op)
    assert (threads.warps, threads.turns) == (16 * 64 / 32, 2 * 64)
    assert threads.clocks == pytest.approx(1.12 * (16 * 16 + 32))
    (kernel,) = resized("nearest", 2, 64, 16, 32, 16, 66).nodes
    assert threads_of(kernel.op).warps == 2 * 64 * 16 * 3  # rows of 66 take three warps


def threads(reads, gives, op, order=""):
    (kernel,) = costed(f"  in %x: {reads}{order}", gives, op).nodes
    return threads_of(kernel.op)


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("back", [False, True])
def test_rows_and_volumes_have_a_thread_for_a_place(axes, back):
    """All channels of all images, one after another, as in images whose channels are outermost:
    upsample_linear1d_out_frame, upsample_trilinear3d_out_frame and their gradients."""
    image, result = (2, 24, *[16] * axes), (2, 24, *[32] * axes)
    scales = [1.0, 1.0, *[2.0] * axes]
    if back:
        op = f't.resize_gradient(%x, {list(image)}, {scales}, mode="linear")'
        found = threads(f"f32{list(result)}", f"f32{list(image)}", op)
    else:
        op = f't.resize(%x, shape={list(result)}, scales={scales}, mode="linear")'
        found = threads(f"f32{list(image)}", f"f32{list(result)}", op)
    assert (found.warps, found.turns) == (32**axes / 32, 2 * 24)


@pytest.mark.parametrize("axes", [1, 3])
def test_nearest_rows_and_volumes_have_a_thread_for_all_images(axes):
    """upsample_nearest1d_out_frame, upsample_nearest3d_out_frame: one image after another; and the
    gradient of packed images too."""
    image, result = [8, 24, *[16] * axes], [8, 24, *[32] * axes]
    scales = [1.0, 1.0, *[2.0] * axes]
    op = f't.resize(%x, shape={result}, scales={scales}, mode="nearest")'
    found = threads(f"f32{image}", f"f32{result}", op)
    assert (found.warps, found.turns) == (24 * 32**axes / 32, 8)
    op = f't.resize_gradient(%x, {image}, {scales}, mode="nearest")'
    found = threads(f"f32{result}", f"f32{image}", op)
    assert (found.warps, found.turns) == (24 * 16**axes / 32, 8)


@pytest.mark.parametrize(
    ("height", "width", "warps"), [(7, 7, 1.75), (14, 14, 7), (20, 20, 20), (64, 64, 128)]
)
def test_a_warp_has_several_rows_of_narrow_images(height, width, warps):
    """Blocks of 4 by 4, 8 by 8, 16 by 16 and 64 by 8: upsample_nearest2d_out_frame."""
    (kernel,) = resized("nearest", 4, 64, 4, 4, height, width).nodes
    assert threads_of(kernel.op).warps == pytest.approx(4 * 64 * warps)


def test_averages_of_equal_windows_are_no_adaptive_pools():
    """avg_pool2d has a thread for a cell; adaptive_avg_pool2d has 8 rows of 32 for each channel of
    each image, of which a narrow result leaves most idle: DenseNet's last transition."""
    parts = "[2, 2], [2, 2], [0, 0], [0, 0], [1, 1]"
    gives = "f32[64, 512, 7, 7]"
    for adaptive, warps in ((False, 64 * 512 * 49 / 32), (True, 64 * 512 * 7)):
        op = f't.pool("mean", %x, {parts}, adaptive={str(adaptive).lower()})'
        assert threads("f32[64, 512, 14, 14]", gives, op).warps == warps


def test_an_adaptive_pool_of_rows_has_one_row():
    """adaptive_avg_pool1d is that of images of one row."""
    op = 't.pool("mean", %x, [40], [40], [0], [0], [1], adaptive=true)'
    found = threads("f32[8, 512, 2000]", "f32[8, 512, 50]", op)
    assert (found.warps, found.turns) == (8 * 512, 2)
    op = 't.routine("adaptive_pool", [%x], [f32[8, 512, 50]], attrs=[["fn", "mean"], '
    op += '["shape", [8, 512, 50]], ["count", 1]], work=8232960)'
    found = threads("f32[8, 512, 2010]", "f32[8, 512, 50]", op)
    assert (found.warps, found.turns) == (8 * 512, 2)


def test_windows_over_volumes_have_a_row_of_threads_for_a_row():
    """avg_pool3d_cuda_update_output: a block is 32 wide, however narrow the result."""
    parts = "[2, 2, 2], [2, 2, 2], [0, 0, 0], [0, 0, 0], [1, 1, 1]"
    op = f't.pool("mean", %x, {parts})'
    found = threads("f32[2, 16, 8, 14, 14]", "f32[2, 16, 4, 7, 7]", op)
    assert found.warps == 2 * 16 * 4 * 7
    op = f't.pool_gradient("mean", %x, [2, 16, 8, 14, 14], {parts})'
    found = threads("f32[2, 16, 4, 7, 7]", "f32[2, 16, 8, 14, 14]", op)
    assert found.warps == 2 * 16 * 4 * 7


def test_points_in_volumes_have_a_thread_each():
    """grid_sampler_3d_kernel: all channels one after another."""
    shape = "[2, 48, 8, 8, 16]"
    op = f't.routine("grid_sample", [%x, %g], [f32{shape}], attrs=[["mode", "linear"]], work=1)'
    reads = f"  in %x: f32{shape}\n  in %g: f32[2, 8, 8, 16, 3]"
    (kernel,) = costed(reads, f"f32{shape}", op).nodes
    found = threads_of(kernel.op)
    assert (found.warps, found.turns) == (2 * 8 * 8 * 16 / 32, 48)


def test_a_compiler_has_kernels_of_its_own():
    graph = resized("cubic", 2, 64, 16, 16, 32, 32, profile="compiled")
    assert all(threads_of(n.op) is None for n in graph.nodes)


@pytest.mark.parametrize("factor", [2, 4])
def test_more_channels_take_as_many_turns(factor):
    once, more = (seconds(resized("cubic", 1, c, 16, 16, 32, 32)) for c in (256, 256 * factor))
    assert more / once == pytest.approx(factor, rel=0.1)


def test_work_is_stacked_with_its_threads():
    (kernel,) = resized("linear", 1, 32, 16, 16, 32, 32).nodes
    work = work_of(kernel.op)
    assert work.each(np.asarray).detail.turns == 32


ROUTINES = {
    "grid_sample": (
        "  in %x: f32[2, 64, 64, 64]\n  in %at: f32[2, 32, 32, 2]",
        *("f32[2, 64, 32, 32]", '[%x, %at], [f32[2, 64, 32, 32]], attrs=[["mode", "linear"]]'),
    ),
    "adaptive_pool": (
        "  in %x: f32[8, 256, 30, 30]",
        *("f32[8, 256, 7, 7]", "[%x], [f32[8, 256, 7, 7]]"),
    ),
    "roi_align": (
        "  in %x: f32[1, 64, 50, 50]\n  in %at: f32[100, 5]",
        *("f32[100, 64, 7, 7]", "[%x, %at], [f32[100, 64, 7, 7]], work=10035200"),
    ),
}


@pytest.mark.parametrize("fn", ROUTINES)
def test_a_routine_has_threads_on_a_gpu_and_clocks_on_a_cpu(fn):
    """A CPU's time was read off threads that it does not have."""
    reads, gives, rest = ROUTINES[fn]
    if fn == "adaptive_pool":
        rest += ', attrs=[["fn", "mean"], ["count", 2]]'
    op = f't.routine("{fn}", {rest})'
    (kernel,) = costed(reads, gives, op).nodes
    work = work_of(kernel.op)
    assert work.detail.threads == threads_of(kernel.op) is not None
    (kernel,) = costed(reads, gives, op, target="cpu").nodes
    clock_hz = load_target("cpu").clock_hz
    assert kernel.cost.time_s > work.detail.cpu_clocks / clock_hz / load_target("cpu").sms


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*grid_sampler_2d_backward")
@pytest.mark.parametrize(
    ("mode", "shape", "points", "us"),
    [
        ("bilinear", (8, 256, 50, 50), (300, 4), 279),
        ("bilinear", (48, 32, 64, 64), (900, 4), 318),
        ("nearest", (8, 64, 64, 64), (64, 64), 27),
        ("bicubic", (8, 64, 64, 64), (64, 64), 709),
    ],
)
def test_the_gradient_of_images_read_at_points(mode, shape, points, us):
    torch = pytest.importorskip("torch")

    class Sampled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.image = torch.nn.Parameter(torch.zeros(shape))

        def forward(self, grid):
            sample = torch.nn.functional.grid_sample
            return sample(self.image, grid, mode=mode, align_corners=False).sum()

    grid = torch.zeros(shape[0], *points, 2)
    graph = gpuir.analyze(gpuir.load(Sampled(), args=(grid,), train=True), target="h200-sxm").graph
    (back,) = (n for n in graph.nodes if n.op.name == "k.opaque")
    assert back.cost.time_s * 1e6 == pytest.approx(us, rel=0.5)
