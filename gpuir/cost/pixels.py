"""How PyTorch's kernels of images share out their work among threads: resampling, pools, and what
reads images at points. Each is one launch whose threads have nothing to say to each other; what
tells them apart is how many threads there are, and what one does after the other.

Read from aten/src/ATen/native/cuda (UpSampleBicubic2d.cu, UpSampleBilinear2d.cu,
UpSampleNearest2d.cu, GridSampler.cu, AveragePool2d.cu, DilatedMaxPool2d.cu,
AdaptiveAveragePooling.cu, AdaptiveMaxPooling2d.cu) and `roi_align_kernel.cu` of torchvision:

- Bicubic resampling, and bilinear of images whose channels are outermost, have a thread for a place
  of the result, which goes through all channels of all images. So has the gradient of the bicubic
  one. From PyTorch 2.12 on bicubic results of at most 18,432 places have one for each channel, too
  (pull request 174578; its gradient is as before).
- Bilinear resampling of channels-last images, nearest, antialiased, all other gradients, windows of
  one size, `roi_align`: a thread for a cell. `grid_sample` has one for a point, for all channels.
- Windows of unequal size (adaptive pools, `area`): blocks of 8 rows of 32 threads, one or more for
  each channel of each image, whatever its size.

What a warp takes is measured on an H200 with PyTorch 2.11 (specs/measurements/pixels.csv): clocks
of an SM that warps fill, and waits for loads where they do not. One number serves all sizes.
"""

from __future__ import annotations

from math import ceil, prod

from gpuir.cost.work import Threads
from gpuir.ir.types import TensorType
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t

WARP = 32
FEW_PLACES = 18_432  # UpSampleBicubic2d.cu, from PyTorch 2.12
LINE_BYTES = 128.0  # of a cache line: CUDA C++ Programming Guide
LINE_CLOCKS = 1.12  # of the L1, for a line of a load
BLOCK = 32.0  # warps of a block: 1024 threads, of most of these kernels
SAMPLER_BLOCK = 8.0  # 256 threads: GridSampler.cu
PLANE_ROWS, PLANE_BLOCKS = 8, 16  # AdaptiveAveragePooling.cu: block_y, and blocks of few planes
LAST_CHANNELS = 16  # fewer, and bilinear takes channels-last images for others: UpSampleBilinear2d


def threads_of(op: k.KernelOp) -> Threads | None:
    """How threads share out a kernel of images, where it is one of PyTorch's."""
    match op:
        case k.Gather(library=library) if library:
            found = next(
                n.op for n in op.body.nodes if isinstance(n.op, t.Resize | t.ResizeGradient)
            )
            if isinstance(found, t.ResizeGradient):
                return _gradient(found, op.result_types[0])
            return _resized(found, op.args[0].type, op.result_types[0], library)
        case k.Pool(library=library) if library:
            return _pooled(op)
        case k.Routine(routine=t.Routine() as routine):
            return _routine(routine)
        case k.Opaque():
            return next((_opaque(n.op) for n in op.body.nodes if isinstance(n.op, t.Opaque)), None)
        case _:
            return None


# ---------------------------------------------------------------------------- resampling


def _resized(op: t.Resize, x: TensorType, y: TensorType, release: str) -> Threads:
    images, channels, *places = y.shape
    count = prod(places)
    cells, turns = _warps(y.size), float(images * channels)
    last = x.is_channels_last and channels > 1
    if op.antialias:
        return Threads(cells, 1.0, 118.0 + 7.4 * _antialiased_taps(op), 1.0, BLOCK)
    if op.mode == "nearest":
        if last:
            return Threads(cells, 1.0, 54.0, 1.0, BLOCK)
        rows = y.size // places[-1] * ceil(places[-1] / WARP)  # each row's threads by themselves
        return Threads(float(rows), 1.0, 21.0, 1.0, BLOCK)
    if op.mode == "linear":
        if last and channels >= LAST_CHANNELS:
            return Threads(cells, 1.0, 76.0, 2.0, BLOCK)
        return Threads(_warps(count), turns, max(6.0, _lines(op, x, 4)), 2.0, BLOCK, 130.0)
    clocks = max(20.0, _lines(op, x, 16))
    if count <= FEW_PLACES and _is_from(release, "2.12"):
        return Threads(turns * _warps(count), 1.0, clocks + 150.0, 4.0, BLOCK)
    return Threads(_warps(count), turns, clocks, 4.0, BLOCK, 400.0)


def _lines(op: t.Resize, x: TensorType, taps: int) -> float:
    """Clocks for the cache lines that a warp asks for in a turn: those of its pixels, for each of
    `taps`, and of its results. Where channels are innermost each pixel has a line of its own."""
    apart = x.shape[1] if x.is_channels_last else 1
    share = min(1.0, apart * x.dtype.bits / 8 / LINE_BYTES)  # of a line, from pixel to pixel
    ratio = x.shape[-1] / max(op.shape[-1], 1)
    lines = max(1.0, WARP * min(1.0, ratio, ratio * share))
    return LINE_CLOCKS * (taps * lines + max(1.0, WARP * share))


def _antialiased_taps(op: t.Resize) -> float:
    support = {"linear": 2.0, "cubic": 4.0}.get(op.mode, 1.0)
    ratios = zip(op.x.type.shape[2:], op.shape[2:], strict=True)
    return prod(support * max(1.0, a / max(b, 1)) for a, b in ratios)


def _gradient(op: t.ResizeGradient, y: TensorType) -> Threads:
    dy = op.dy.type
    images, channels, *places = dy.shape
    if op.mode == "cubic" and not op.antialias:
        turns = float(images * channels)
        return Threads(_warps(prod(places)), turns, 175.0, 1.0, BLOCK, 400.0)
    if op.mode == "nearest":
        return Threads(_warps(y.size), 1.0, 110.0 if dy.is_channels_last else 62.0, 1.0, BLOCK)
    taps = _antialiased_taps(op.direct()) if op.antialias else 4.0
    return Threads(_warps(dy.size), 1.0, 40.0 + 9.0 * taps, 1.0, BLOCK)


# ---------------------------------------------------------------------------- pools


def _pooled(op: k.Pool) -> Threads | None:
    """Of a max pool of images whose channels are outermost, and of what is no image, `cost.stream`
    knows more."""
    pool = op.window
    y = op.result_types[0]
    last = y.is_channels_last
    taps = float(prod(pool.window))
    if isinstance(pool, t.PoolGradient):
        over = taps / prod(pool.strides)  # windows that a cell lies in, on average
        if pool.fn == "max":
            each = 20.0 + 22.0 * over if last else 90.0 + 4.5 * over
        else:
            each = 160.0 + 15.8 * over if last else 140.0 + 11.8 * over
        return Threads(_warps(y.size), 1.0, each, 1.0, BLOCK)
    if pool.fn in ("max", "argmax"):
        return Threads(_warps(y.size), 1.0, 20.0 + 15.2 * taps, 1.0, BLOCK) if last else None
    if pool.window == pool.strides and not any(pool.low):  # what adaptive pools are, if even
        return _planes(y, last, 85.0, 3.9, taps)
    each = 170.0 + 3.4 * taps if last else 75.0 + 3.45 * taps
    return Threads(_warps(y.size), 1.0, each, 1.0, BLOCK)


def _planes(y: TensorType, last: bool, own: float, each: float, taps: float) -> Threads:
    """Adaptive pools: blocks of rows of 32 threads for each channel of each image."""
    planes = max(prod(y.shape[:-2]), 1)
    if last:
        return Threads(_warps(y.size), 1.0, 16.0 + 20.0 * taps, 1.0, BLOCK)
    rows, columns = y.shape[-2], ceil(y.shape[-1] / WARP)
    blocks = max(PLANE_BLOCKS // planes, 1)
    warps = min(blocks * PLANE_ROWS, rows)
    turns = rows * columns / max(warps, 1)
    return Threads(float(planes * warps), turns, own + each * taps, 1.0, float(PLANE_ROWS))


# ---------------------------------------------------------------------------- at points


def _routine(op: t.Routine) -> Threads | None:
    attrs = dict(op.attrs)
    y = op.result_types[0]
    match op.fn:
        case "grid_sample" if y.rank == 4:
            x = op.args[0].type
            last = x.is_channels_last
            clocks, waits = {
                "nearest": (52.0, 2.0),
                "linear": (152.0 if last else 80.0, 3.0),
                "cubic": (735.0 if last else 252.0, 28.0),
            }[str(attrs["mode"])]
            points = y.shape[0] * prod(y.shape[2:])
            return Threads(_warps(points), float(y.shape[1]), clocks, waits, SAMPLER_BLOCK)
        case "adaptive_pool" if y.rank >= 3 and attrs.get("count") == 2:
            x = op.args[0].type
            sizes = zip(x.shape[-2:], y.shape[-2:], strict=True)
            taps = prod(max(1.0, a / b) + (1.0 if a % b else 0.0) for a, b in sizes)
            if attrs["fn"] == "max":  # of packed images, whatever they were
                return _planes(y, False, 100.0, 4.5, taps)
            return _planes(y, x.is_channels_last, 85.0, 3.9, taps)
        case "roi_align":
            samples = op.work / max(8.0 * y.size, 1.0)
            return Threads(_warps(y.size), 1.0, 40.0 + 40.0 * samples, 1.0, BLOCK)
        case _:
            return None


def _opaque(op: t.Opaque) -> Threads | None:
    """Of operators that gpuir does not compute, but whose kernels are known."""
    attrs = dict(op.attrs)
    match op.kind.partition(".")[0]:
        case "grid_sampler_2d_backward":
            dy, x = op.args[0].type, op.args[1].type
            last = x.is_channels_last
            mode = attrs.get("interpolation_mode", 0)
            clocks = {0: 400.0 if last else 330.0, 1: 75.0}.get(int(str(mode)), 2000.0)
            points = dy.shape[0] * prod(dy.shape[2:])
            return Threads(_warps(points), float(dy.shape[1]), clocks, 3.0, SAMPLER_BLOCK)
        case _:
            return None


def _warps(threads: int) -> float:
    return float(ceil(threads / WARP))


def _is_from(release: str, first: str) -> bool:
    """Whether a release is one or a later one."""
    numbers = (tuple(map(int, text.split(".")[:2])) for text in (release, first))
    return next(numbers) >= next(numbers)
