"""Tables of tuned kernels: sweeps, with the time of every configuration, and those that won.

A `Problem` is a kernel on a GPU with the configurations of its space. What kernels and spaces are
is as the README beside the tables says; hidden sizes that a table does not state are assumed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost.generated.shared import COMPOSABLE
from gpuir.cost.nest import Tiles
from gpuir.cost.work import Work
from gpuir.fit.columns import MOST_COUNT, Columns, Floats, TableFile
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.published import TEMPLATES

# Names that the tables have for a GPU of ours: the same chip, or the variant that is most common.
GPUS = {
    "a800-sxm4-80gb": "a100-sxm-80gb",
    "a100-sxm4-80gb": "a100-sxm-80gb",
    "a100-sxm4-40gb": "a100-sxm-40gb",
    "h100-sxm5-80gb": "h100-sxm-80gb",
    "h100-unspecified": "h100-sxm-80gb",
    "mi350x/mi355x": "mi355x",
    "gb300-288gb": "b300-sxm-288gb",
    "gb300": "b300-sxm-288gb",
}
SWEPT = {
    "gemm": "clblast.xgemm",
    "convolution_a": "kernel_tuner.convolution",
    "convolution_b": "kernel_tuner.convolution",
    "dedispersion": "kernel_tuner.dedispersion",
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "clblast.xgemm": {"m": 4096, "n": 4096, "k": 4096},
    "kernel_tuner.convolution": {"y": 4096, "x": 4096, "i": 15, "j": 15},
    # at most 650 samples over 2048 measures, from none: half of it is the mean
    "kernel_tuner.dedispersion": {"dms": 2048, "samples": 25000, "channels": 1536, "slope": 0.16},
}
# dtype of the products, of the weights where that is another, and how operands are scaled
DTYPES = {
    "f16": ("f16", "", ""),
    "bf16": ("bf16", "", ""),
    "float8": ("f8e4m3", "", "row"),
    "fp8_w8a8": ("f8e4m3", "", "row"),
    "int8_w8a8": ("i8", "", "row"),
    "int8_w8a16": ("bf16", "i8", ""),
    "int4_w4a16": ("bf16", "i4", ""),
}
# Columns that tell a sweep, and tables of winners: of Triton's tuners, of instances, of pairs.
SWEEPS = ("kernel", "gpu", "status", "median_ms")
WINNERS = ("kernel", "gpu", "dtype", "BLOCK_SIZE_M", "space")
INSTANCES_WON = ("kernel", "gpu", "dtype", "kernel_id", "libtype")
PAIRS = ("stage1_kernel", "stage2_kernel")
INSTANCES = {"fp8": "f8e4m3", "int8": "i8"}  # of Composable Kernel
NUMBERLESS = "a size, a parameter or the time is no such number"
MOST_SPLITS = 30  # powers of two
PRODUCTS = {"fused_moe": "vllm.fused_moe", "w8a8_block_gemm": "vllm.block_gemm"}
NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
HIDDEN = 4096  # assumed where a file name leaves it open: common among the models it may be of


@dataclass(frozen=True)
class Problem:
    """Configurations of one kernel on one GPU: `works` run one after another under each of
    `tiles`. Of a sweep `time_s` has a measured time for each; of tables of winners the works have a
    row a problem, and `winners` the place of each one's best."""

    file: str
    kernel: str
    gpu: str
    sort: str
    target: Target
    works: tuple[Work, ...]
    tiles: Tiles
    count: int
    time_s: Floats | None = None
    winners: Any = None

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.gpu}"


@dataclass(frozen=True)
class Skipped:
    """Rows of a table that are not scored, and why."""

    file: str
    rows: int
    reason: str


def read(paths: Sequence[str]) -> tuple[list[Problem], list[Skipped]]:
    """The problems of tables, and what of them is skipped."""
    found: list[Problem] = []
    skipped: list[Skipped] = []
    for one in itertools.chain.from_iterable(_table(Path(path)) for path in paths):
        if isinstance(one, Problem):
            found.append(one)
        else:
            skipped.append(one)
    return found, skipped


def _table(path: Path) -> Iterator[Problem | Skipped]:
    file = TableFile(path)
    t = file.read(file.names)
    if set(SWEEPS).issubset(file.names):
        return _sweeps(t)
    if set(WINNERS).issubset(file.names):
        return _winners(t)
    if set(INSTANCES_WON).issubset(file.names):
        return _instances(t)
    if set(PAIRS).issubset(file.names):
        reason = "pairs of kernels of a mixture, whose space is not published"
        return iter([Skipped(path.name, t.count, reason)])
    raise UsageError(
        "not a table of tuned kernels",
        where=str(path),
        expected="a sweep (status, median_ms), or winners (BLOCK_SIZE_M and space, or libtype)",
        found=", ".join(file.names[:8]),
    )


@lru_cache(maxsize=256)
def _target(gpu: str) -> Target | None:
    name = gpu.lower()
    try:
        return load_target(GPUS.get(name, name))
    except GpuirError:
        return None


def _parted(t: Columns, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Which rows agree in some columns, by what these say."""
    words = [t.words(name) for name in names]
    keys = np.stack([w.codes for w in words], axis=1)
    _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    for group in np.argsort(first):
        rows = np.flatnonzero(which.reshape(-1) == group)
        yield tuple(w.names[w.codes[rows[0]]] for w in words), rows


# ---- sweeps -----------------------------------------------------------------------------------


def _sweeps(t: Columns) -> Iterator[Problem | Skipped]:
    file = Path(t.file).name
    ran = t.words("status").where("ok")
    for (kernel, gpu), rows in _parted(t, "kernel", "gpu"):
        target = _target(gpu)
        if kernel not in SWEPT or target is None:
            reason = f"no target for {gpu}" if kernel in SWEPT else f"no template for {kernel}"
            yield Skipped(file, len(rows), reason)
            continue
        if failed := int((~ran[rows]).sum()):
            yield Skipped(file, failed, "did not compile, or did not run")
        rows = rows[ran[rows]]
        template = TEMPLATES[SWEPT[kernel]]
        columns = {p: t.numbers(p) for p in template.parameters}
        if "staged" in t.cells:  # convolution_b always stages, and has no parameter for it
            columns["use_shmem"] = t.numbers("staged")
        time_ms = t.numbers("median_ms")[rows]
        whole = np.isfinite(time_ms) & (time_ms > 0)
        for values in columns.values():
            whole &= np.isfinite(values[rows])
        if not whole.all():
            yield Skipped(file, int((~whole).sum()), NUMBERLESS)
        rows = rows[whole]
        if not len(rows):
            continue
        yield Problem(
            *(file, kernel, gpu, "f32", target),
            works=(template.kernel(SIZES[template.name]).work,),
            tiles=template.tile({p: values[rows] for p, values in columns.items()}),
            count=len(rows),
            time_s=time_ms[whole] / 1e3,
        )


# ---- winners of Triton's tuners ---------------------------------------------------------------


def _winners(t: Columns) -> Iterator[Problem | Skipped]:
    path = Path(t.file)
    spaces = path.with_name("space_triton.json")
    known: dict[str, dict[str, list[int]]] = {}
    if spaces.is_file():
        known = json.loads(spaces.read_text())
    blocked = np.where(np.isnan(t.numbers("block_n")), 0.0, 1.0)
    t = t.with_cells({"blocked": blocked})
    inside = t.words("in_space").mapped(lambda x: "yes" if x in ("1", "True", "true") else "")
    for key, rows in _parted(t, "kernel", "gpu", "space", "dtype", "blocked"):
        kernel, gpu, space, dtype, scales = key
        target = _target(gpu)
        if kernel not in PRODUCTS or space not in known or dtype not in DTYPES or target is None:
            reason = f"no known space: {kernel} {dtype}" if target else f"no target for {gpu}"
            yield Skipped(path.name, len(rows), reason)
            continue
        configs = np.array(list(itertools.product(*known[space].values())), float)
        names = list(known[space])
        places = {tuple(c): i for i, c in enumerate(configs.tolist())}
        chosen = np.stack([t.numbers(name)[rows] for name in names], axis=1)
        found = np.array([places.get(tuple(c), -1) for c in chosen.tolist()])
        good = inside.where("yes")[rows] & (found >= 0)
        if not good.all():
            reason = "not from the tuner's space as it is today"
            yield Skipped(path.name, int((~good).sum()), reason)
        sized = _sized(t, rows, "m", "n", "k", "experts", "topk")
        if odd := int((good & ~sized).sum()):
            yield Skipped(path.name, odd, NUMBERLESS)
        good &= sized
        if not good.any():
            continue
        template = TEMPLATES[PRODUCTS[kernel]]
        yield Problem(
            *(path.name, kernel, gpu, f"{dtype}{' block scales' if scales == '1' else ''}", target),
            works=tuple(_products(t, rows[good], kernel, dtype, scales == "1")),
            tiles=template.tile({n: configs[:, names.index(n)][None] for n in NAMES}),
            count=len(configs),
            winners=found[good],
        )


def _sized(t: Columns, rows: Any, *names: str) -> Any:
    """Which rows have no size that is none; one that is not there is assumed."""
    columns = np.stack([t.numbers(name)[rows] for name in names])
    return (np.isnan(columns) | ((columns >= 1) & (columns == np.floor(columns)))).all(axis=0) & (
        np.nan_to_num(columns) <= MOST_COUNT
    ).all(axis=0)


def _numbers(t: Columns, rows: Any, name: str, missing: float = HIDDEN) -> Floats:
    values = t.numbers(name)[rows]
    return np.where(np.isnan(values), missing, values)[:, None]


def _products(t: Columns, rows: Any, kernel: str, dtype: str, blocked: bool) -> Iterator[Work]:
    """The products of each problem, with a column of sizes: a mixture has two, which one
    configuration serves."""
    product = TEMPLATES[PRODUCTS[kernel]].kernel
    column = partial(_numbers, t, rows)
    multiplied, stored, scales = DTYPES[dtype]
    given: dict[str, Any] = {"dtype": multiplied, "scales": "block" if blocked else scales}
    if stored:
        given["weight"] = stored
    m, n, k = column("m"), column("n"), column("k")
    if kernel != "fused_moe":
        yield product({**given, "rows": m, "n": n, "k": k}).work
        return
    experts = column("experts", 1.0)
    # assumed where a file name leaves it open
    topk = column("topk", np.nan)
    topk = np.minimum(np.where(np.isnan(topk), np.where(experts >= 32, 8, 2), topk), experts)
    given |= {"rows": m * topk, "groups": experts}
    yield product({**given, "n": 2 * n, "k": k}).work
    yield product({**given, "n": k, "k": n}).work


# ---- instances of Composable Kernel -----------------------------------------------------------


def _instances(t: Columns) -> Iterator[Problem | Skipped]:
    """Winners among instances whose tiles are fixed."""
    path = Path(t.file)
    place = path.with_name("space_aiter_ck.csv")
    space = TableFile(place).read(TableFile(place).names) if place.is_file() else None
    for (kernel, gpu, library, dtype), rows in _parted(t, "kernel", "gpu", "libtype", "dtype"):
        target = _target(gpu)
        mine = space.words("kernel").where(kernel) if space else np.zeros(0, bool)
        known = space is not None and library == "ck" and bool(mine.any())
        if space is None or not known or target is None or dtype not in INSTANCES:
            reason = f"no known space: {kernel} of {library}"
            if target is None:
                reason = f"no target for {gpu}"
            elif known:
                reason = f"instances of {dtype or 'a dtype that is not stated'} are not modelled"
            yield Skipped(path.name, len(rows), reason)
            continue
        ids: list[float] = space.numbers("kernel_id")[mine].tolist()
        chosen = t.numbers("kernel_id")[rows].tolist()
        found = np.array([ids.index(i) if i in ids else -1 for i in chosen])
        good = found >= 0
        if not good.all():
            yield Skipped(path.name, int((~good).sum()), "not among the instances of the space")
        sized = _sized(t, rows, "m", "n", "k")
        splits = np.nan_to_num(t.numbers("split_k")[rows])
        sized &= (splits >= 0) & (splits <= MOST_SPLITS)
        if odd := int((good & ~sized).sum()):
            yield Skipped(path.name, odd, NUMBERLESS)
        good &= sized
        if not good.any():
            continue
        rows = rows[good]
        sizes = {r: _numbers(t, rows, c) for r, c in (("rows", "m"), ("n", "n"), ("k", "k"))}
        scales = "block" if "blockscale" in kernel else "row"
        given: dict[str, Any] = {"dtype": INSTANCES[dtype], "scales": scales}
        tiles = Tiles(
            {**{d: space.numbers(f"tile_{d}")[mine][None] for d in "mnk"}, "b": 1.0},
            3.0,  # assumed: two tiles of the operands at once
            space.numbers("threads")[mine][None] / target.sm.warp,
            2.0 ** _numbers(t, rows, "split_k", 0.0),
        )
        work = TEMPLATES["vllm.block_gemm"].kernel(given | sizes).work
        yield Problem(
            *(path.name, kernel, gpu, f"{dtype} of ck", target),
            works=(replace(work, form=COMPOSABLE),),
            tiles=tiles,
            count=len(ids),
            winners=found[good],
        )
