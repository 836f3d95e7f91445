"""How PyTorch's kernels of images share out their work among threads: resampling, pools, and what
reads images at points. Each is one launch whose threads have nothing to say to each other; what
tells them apart is how many threads there are, and what one does after the other.

Read from aten/src/ATen/native/cuda (UpSampleBicubic2d.cu, UpSampleBilinear2d.cu,
UpSampleNearest2d.cu, GridSampler.cu, AveragePool2d.cu, DilatedMaxPool2d.cu,
AdaptiveAveragePooling.cu, AdaptiveMaxPooling2d.cu, and those of one and three axes) and
`roi_align_kernel.cu` of torchvision:

- Bicubic resampling, and linear of rows, of volumes and of images whose channels are outermost,
  have a thread for a place of the result, which goes through all channels of all images. So have
  the gradients of these, but for bilinear's. From PyTorch 2.12 on bicubic results of at most 18,432
  places have one for each channel, too (pull request 174578; its gradient is as before).
- Nearest resampling of rows and volumes, and its gradient but for channels-last images: a thread
  for a cell of one image, which goes through all images.
- Bilinear resampling of channels-last images and its gradient, nearest of images, antialiased,
  windows of one size, `roi_align`: a thread for a cell. `grid_sample` has one for a point, for all
  channels.
- Adaptive pools (`area` too): blocks of 8 rows of 32 threads, one or more for each channel of each
  image, whatever its size. Windows over volumes: a row of 32 threads for each row of the result.

What a warp takes is measured on an H200 with PyTorch 2.11 (specs/measurements/pixels.csv): clocks
of an SM that warps fill, and waits for loads where they do not. One number serves all sizes. Rows
and volumes were not measured: they have the numbers of images, by as many cells as they read.
"""

from __future__ import annotations

from math import ceil, prod

from gpuir.cost.work import Threads
from gpuir.ir.sizes import real
from gpuir.ir.types import TensorType
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t

WARP = 32
FEW_PLACES = 18_432  # UpSampleBicubic2d.cu, from PyTorch 2.12
LINE_BYTES = 128.0  # of a cache line: CUDA C++ Programming Guide
LINE_CLOCKS = 1.12  # of the L1, for a line of a load
ADD_CLOCKS = 175.0 / 16  # of an atomic addition: of the bicubic gradient's 16
BLOCK = 32.0  # warps of a block: 1024 threads, of most of these kernels
SAMPLER_BLOCK = 8.0  # 256 threads: GridSampler.cu
VOLUME_BLOCK = 16.0  # 512 threads: grid_sampler_3d_kernel, UpSampleTrilinear3d.cu
MOST_THREADS = 512  # of a block of images: UpSampleNearest2d.cu
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
    count, flat = prod(places), len(places) == 2  # no rows, no volumes
    cells, turns = _warps(y.size), float(images * channels)
    last = x.is_channels_last and channels > 1 and flat
    if op.antialias:
        return Threads(cells, 1.0, 118.0 + 7.4 * _antialiased_taps(op), 1.0, BLOCK)
    if op.mode == "nearest":
        if last:
            return Threads(cells, 1.0, 54.0, 1.0, BLOCK)
        if flat:
            return Threads(_tiled(y), 1.0, 21.0, 1.0, BLOCK)
        return Threads(_warps(channels * count), float(images), 21.0, 1.0, BLOCK, once=33.0)
    if op.mode == "linear":
        if last and channels >= LAST_CHANNELS:
            return Threads(cells, 1.0, 76.0, 2.0, BLOCK)
        taps = 2 ** len(places)
        clocks = max(1.5 * taps, _lines(op, x, taps))
        block = VOLUME_BLOCK if len(places) == 3 else BLOCK
        return Threads(_warps(count), turns, clocks, 2.0, block, once=130.0)
    clocks = max(20.0, _lines(op, x, 16))
    if count <= FEW_PLACES and _is_from(release, "2.12"):
        return Threads(turns * _warps(count), 1.0, clocks + 150.0, 4.0, BLOCK)
    return Threads(_warps(count), turns, clocks, 4.0, BLOCK, once=400.0)


def _tiled(y: TensorType) -> float:
    """Warps of blocks that are as wide and as high as the largest powers of two in an image: a warp
    has several rows of a narrow one (UpSampleNearest2d.cu)."""
    *planes, height, width = y.shape
    wide = min(1 << max(width.bit_length() - 1, 0), MOST_THREADS)
    if wide >= WARP:
        return float(prod(planes) * height * ceil(width / WARP))
    return float(prod(planes)) * ceil(width / wide) * height * wide / WARP


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
    flat, turns = len(places) == 2, float(images * channels)
    if op.mode == "nearest":
        if flat and dy.is_channels_last:
            return Threads(_warps(y.size), 1.0, 110.0, 1.0, BLOCK)
        return Threads(_warps(y.size // max(images, 1)), float(images), 62.0, 1.0, BLOCK)
    if op.mode == "cubic" and not op.antialias:
        return Threads(_warps(prod(places)), turns, ADD_CLOCKS * 16, 1.0, BLOCK, once=400.0)
    if not flat:
        adds = ADD_CLOCKS * 2 ** len(places)
        block = SAMPLER_BLOCK if len(places) == 3 else BLOCK
        return Threads(_warps(prod(places)), turns, adds, 1.0, block, once=400.0)
    taps = _antialiased_taps(op.direct()) if op.antialias else 4.0
    return Threads(_warps(dy.size), 1.0, 40.0 + 9.0 * taps, 1.0, BLOCK)


# ---------------------------------------------------------------------------- pools


def _pooled(op: k.Pool) -> Threads | None:
    """Of a max pool of images whose channels are outermost, and of what is no image, `cost.stream`
    knows more."""
    pool = op.window
    y = op.result_types[0]
    last, volumes = y.is_channels_last, y.rank == 5
    taps = float(prod(pool.window))
    if isinstance(pool, t.PoolGradient) and volumes:  # from cells of the result to those it has
        overlap = pool.fn == "max" or any(
            w > step for w, step in zip(pool.window, pool.strides, strict=True)
        )
        adds = 1.0 if pool.fn == "max" else taps
        each = 75.0 + adds * (ADD_CLOCKS if overlap else 3.45)
        return Threads(_rows(pool.dy.type), 1.0, each, 1.0, float(PLANE_ROWS))
    if isinstance(pool, t.PoolGradient):
        over = taps / prod(pool.strides)  # windows that a cell lies in, on average
        if pool.fn == "max":
            each = 20.0 + 22.0 * over if last else 90.0 + 4.5 * over
        else:
            each = 160.0 + 15.8 * over if last else 140.0 + 11.8 * over
        return Threads(_warps(y.size), 1.0, each, 1.0, BLOCK)
    if pool.fn in ("max", "argmax"):
        warps = _rows(y) if volumes else _warps(y.size)
        return Threads(warps, 1.0, 20.0 + 15.2 * taps, 1.0, BLOCK) if last else None
    if pool.adaptive:
        last = last and not volumes
        return _planes(y, len(pool.window), taps, own=85.0, each=3.9, last=last)
    if volumes:  # packed, however the operand lies
        return Threads(_rows(y), 1.0, 75.0 + 3.45 * taps, 1.0, float(PLANE_ROWS))
    each = 170.0 + 3.4 * taps if last else 75.0 + 3.45 * taps
    return Threads(_warps(y.size), 1.0, each, 1.0, BLOCK)


def _rows(y: TensorType) -> float:
    """Warps of which each has 32 cells of one row: AveragePool3d.cu, DilatedMaxPool3d.cu."""
    return float(prod(y.shape[:-1]) * ceil(y.shape[-1] / WARP))


def _planes(
    y: TensorType, axes: int, taps: float, *, own: float, each: float, last: bool = False
) -> Threads:
    """Adaptive pools: blocks of rows of 32 threads for each channel of each image, and each of a
    volume's; what has one axis is an image of one row."""
    if last:
        return Threads(_warps(y.size), 1.0, 16.0 + 20.0 * taps, 1.0, BLOCK)
    *planes_of, columns = y.shape
    rows = planes_of.pop() if axes > 1 else 1
    planes, columns = max(prod(planes_of), 1), ceil(columns / WARP)
    blocks = max(PLANE_BLOCKS // planes, 1)
    warps = min(blocks * PLANE_ROWS, rows)
    turns = rows * columns / max(warps, 1)
    return Threads(float(planes * warps), turns, own + each * taps, 1.0, float(PLANE_ROWS))


# ---------------------------------------------------------------------------- at points


def _routine(op: t.Routine) -> Threads | None:
    attrs = dict(op.attrs)
    y = op.result_types[0]
    match op.fn:
        case "grid_sample":
            x = op.args[0].type
            last, volumes = x.is_channels_last, y.rank == 5
            clocks, waits = {
                "nearest": (52.0, 2.0),
                "linear": (152.0 if last else 80.0, 3.0),
                "cubic": (735.0 if last else 252.0, 28.0),
            }[str(attrs["mode"])]
            if volumes and attrs["mode"] == "linear":
                clocks *= 2  # of 8 cells, not 4
            points = y.shape[0] * prod(y.shape[2:])
            block = VOLUME_BLOCK if volumes else SAMPLER_BLOCK
            return Threads(_warps(points), float(y.shape[1]), clocks, waits, block)
        case "adaptive_pool":
            x, axes = op.args[0].type, int(str(attrs["count"]))
            sizes = zip(x.shape[-axes:], y.shape[-axes:], strict=True)
            taps = prod(max(1.0, a / b) + (1.0 if a % b else 0.0) for a, b in sizes)
            if attrs["fn"] == "max":  # of packed images, whatever they were
                return _planes(y, axes, taps, own=100.0, each=4.5)
            last = x.is_channels_last and x.rank == 4
            return _planes(y, axes, taps, own=85.0, each=3.9, last=last)
        case "roi_align":
            samples = op.work / max(8.0 * y.size, 1.0)
            return Threads(_warps(y.size), 1.0, 40.0 + 40.0 * samples, 1.0, BLOCK)
        case _:
            return None


def _opaque(op: t.Opaque) -> Threads | None:
    """Of operators that gpuir does not compute, but whose kernels are known."""
    attrs = dict(op.attrs)
    match op.kind.partition(".")[0]:
        case "grid_sampler_2d_backward" | "grid_sampler_3d_backward":
            dy, x = op.args[0].type, op.args[1].type
            last = x.is_channels_last
            mode = attrs.get("interpolation_mode", 0)
            clocks = {0: 400.0 if last else 330.0, 1: 75.0}.get(int(str(mode)), 2000.0)
            if dy.rank == 5 and mode == 0:
                clocks *= 2  # of 8 cells, not 4
            points = dy.shape[0] * prod(dy.shape[2:])
            return Threads(_warps(points), float(dy.shape[1]), clocks, 3.0, SAMPLER_BLOCK)
        case _:
            return None


def _warps(threads: int) -> float:
    return real(ceil(threads / WARP))


def _is_from(release: str, first: str) -> bool:
    """Whether a release is one or a later one."""
    numbers = (tuple(map(int, text.split(".")[:2])) for text in (release, first))
    return next(numbers) >= next(numbers)
