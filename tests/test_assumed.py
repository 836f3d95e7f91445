"""Constants that are assumed, each with a value worked from what it means.

No measurement stands behind them, so nothing else would notice a slip. Each value is also asked for
with its constant doubled and halved, and has to differ then.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from inspect import signature
from itertools import count
from math import ceil, exp, hypot, log, log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuir
from gpuir.cost import (
    attention,
    conv,
    cpu,
    generated,
    grouped,
    host,
    nest,
    network,
    routing,
    sized,
    steps,
    stream,
    strips,
    tensor,
    uncertainty,
)
from gpuir.cost.data import table
from gpuir.cost.family import Family
from gpuir.cost.generated import lanes as nested
from gpuir.cost.kriging import Curve, Field
from gpuir.cost.lanes import Function
from gpuir.cost.learned import Interval, Trained
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Factor, Sheet
from gpuir.cost.tile import interval, needs
from gpuir.cost.work import Serial, Work
from gpuir.fit import collect, steady, timing
from gpuir.fit import host as host_fit
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, bf16, f16, f32, i8
from gpuir.ops import tensor as t
from gpuir.passes import views
from gpuir.passes.partition import balance
from gpuir.passes.shard import plan, ways
from gpuir.plan.mig import timetable
from gpuir.simulate import memory, overlap
from gpuir.stacks.serving import pools
from gpuir.targets.cluster import load_cluster
from gpuir.targets.load import load_target
from gpuir.tune import choices, correct, loops, observe

ROOT = Path(__file__).parent.parent / "gpuir"
A100, B200, H100, V100, L40S = (
    load_target(n) for n in ("a100-sxm-40gb", "b200-sxm-180gb", "h100-sxm-80gb", "v100", "l40s")
)
CPU = load_target("x86-64-v4")


# ---------------------------------------------------------------------------- helpers


def sheet(family: Family, work: Work, target: Any, **changed: float) -> dict[str, float]:
    """What a family writes down of a work under its usual tile, with factors as fits start."""
    s, p = Sheet(), {f.name: f.value for f in family.factors} | changed
    tiles = family.choose(work, target, p)
    family.seconds(s, work, tiles, target, p)
    return {name: float(np.ravel(v)[0]) for name, v in s.values.items()} | {
        f"tile {d}": float(np.ravel(n)[0]) for d, n in tiles.dims.items()
    } | {"split": float(np.ravel(tiles.split)[0])}  # fmt: skip


def last(holds: Callable[[Any], bool], among: Iterable[Any]) -> Any:
    """The last of some numbers, in order, for which something holds."""
    return [x for x in among if holds(x)][-1]


def refuses(run: Callable[[], object]) -> bool:
    try:
        run()
    except GpuirError:
        return True
    return False


def routine(fn: str, *shapes: tuple[int, ...], flops: int = 0) -> Any:
    args = tuple(SimpleNamespace(type=TensorType(s, f32)) for s in shapes)
    return SimpleNamespace(fn=fn, args=args, gives=(), attrs=(), flops=lambda: flops)


def sdpa(work: Work) -> Work:
    """The attention, as PyTorch is asked for it."""
    return replace(work, detail=replace(work.detail, call="sdpa"))


# ---------------------------------------------------------------------------- attention


def sync_flops() -> float:
    """A head of 72 cells has no kernel for sm_100: strips of 64 rows, steps of 128 keys, and 128
    cells that keys and values are each padded to. Half of the factors are set to 1."""
    work = sized.attention(1.0, 8.0, 1024.0, 1024.0, 72.0, bf16, library="trtllm")
    v = sheet(attention.FAMILY, work, B200, **{"compute share": 1.0, "trtllm compute": 1.0})
    product_s = v["products of a step"] - v["shared memory of a step"]
    return 2 * 64 * 128 * (128 + 128) / product_s / B200.clock_hz


def gathered_rows() -> float:
    """Of 32 heads that share keys, the parts that one block combines, in f32."""
    work = sized.attention(1.0, 32.0, 1.0, 65536.0, 128.0, bf16, kv_heads=1.0)
    v = sheet(attention.FAMILY, work, A100, **{"combine start": 0.0, "sm bytes": 1.0})
    return v["parts combined"] * A100.clock_hz / (v["split"] * 128 * 4)


def efficient_share() -> float:
    """Twice the share of the rate takes half of the products' time off."""
    work = sdpa(sized.attention(1.0, 8.0, 1024.0, 1024.0, 64.0, f16))
    once, twice = (sheet(attention.FAMILY, work, V100, **{"compute share": x}) for x in (0.5, 1.0))
    saved_s = once["products of a step"] - twice["products of a step"]
    flops = 2 * once["tile s"] * once["tile d"] * (64 + 64)
    return flops / (V100.peak("tensor", f16) / V100.sms) / saved_s


def few_rows() -> float:
    """FlashAttention-3 shares out the walk of a cache read among SMs, not that of a prompt."""
    some = {
        q: sized.attention(1.0, 1.0, float(q), 65536.0, 128.0, bf16) for q in (32, 64, 128, 256)
    }
    return last(lambda q: strips.usual(some[q], H100, {}).split > 1, some)


# ---------------------------------------------------------------------------- other families


def mma_sync() -> tuple[float, ...]:
    work = routing.mixture(64.0, 512.0, 512.0, 2, 8, bf16, weight=i8, library="marlin")
    found = []
    for target in (A100, H100, B200):
        v = sheet(grouped.FAMILIES["experts marlin f16 converted"], work, target,
                  **{"compute share": 1.0, "joule share": 0.0})  # fmt: skip
        whole_s = 2 * v["tile m"] * v["tile n"] * 512 / (v["peak"] / target.sms)
        found.append(whole_s / v["arithmetic of a tile"])
    return tuple(found)


def cluster_reads() -> float:
    """A step's operands, at the rate of an SM that takes in a byte a clock."""
    v = sheet(tensor.FAMILY, sized.gemm(4096.0, 4096.0, 4096.0, f16), B200, **{"sm bytes": 1.0})
    whole = (v["tile m"] + v["tile n"]) * v["tile k"] * 2
    return v["loads of a step"] * B200.clock_hz / whole


def beside() -> float:
    v = sheet(tensor.FAMILY, sized.gemm(4096.0, 4096.0, 4096.0, f16), B200, **{"store bytes": 1.0})
    return v["stores of a tile"] * B200.clock_hz / (v["tile m"] * v["tile n"] * 2)


def shared(m: float, k: float) -> float:
    """Blocks that may share a tile of 128 x 128 and steps of 64 cells of k."""
    return float(tensor._widest_split(sized.gemm(m, 128.0, k, f16), A100, 128.0, 128.0, 64.0))


def turns() -> float:
    """Ten turns of one wave of threads."""
    work = replace(sized.pointwise(4096.0, (f32,), (f32,)), detail=Serial(10.0))
    return sheet(stream.FAMILY, work, A100)["turns one after another"]


def thread_start() -> float:
    """All cores at work on little: what is waited for besides arithmetic and bytes."""
    s, p = Sheet(), {f.name: f.value for f in cpu.FACTORS}
    work = sized.pointwise(float(CPU.sms * 32768), (f32,), (f32,), ops=1e6)
    terms = cpu.seconds(s, work, cpu.whole(work, CPU), CPU, p)
    return float(terms.latency)


def unmeasured() -> float:
    """An error of 10 % either way, of a dtype that no table has."""
    work = sized.gemm(512.0, 512.0, 512.0, bf16)
    known = Interval(np.array([-30.0, 0.0]), np.full(2, -log(1.1)), np.full(2, log(1.1)))
    trained = Trained(
        devices=(A100.device,), dtypes=("f16",), kinds={A100.isa: (work.sort,)},
        intervals={"known": known},
    )  # fmt: skip
    _, high = interval(work, A100, 1.0, {"tensor": trained})
    return log(float(high)) / log(1.1)


def spread() -> tuple[float, ...]:
    products = (sized.gemm(64.0, 64.0, 64.0, dtype) for dtype in (f32, f16))
    others = (sized.pointwise(64.0, (f32,), (f32,)), sized.gather(8.0, 8.0, f32, 8.0))
    return tuple(generated.interval(w, V100, 1.0)[1] for w in (*products, *others))


def trips() -> float:
    """A block goes through 1024 cells of k; nobody says how many trips are written out."""
    tiles = Tiles({"b": 1.0, "m": 64.0, "n": 64.0, "k": 8.0}, threads={"m": 16.0, "n": 16.0})
    return float(
        np.ravel(nested.count(sized.gemm(512.0, 512.0, 1024.0, f32), tiles, V100).trips)[0]
    )


def together() -> float:
    """Loads in place that a thread has under way, where nothing but the wait for them counts."""
    tiles = Tiles(
        {"b": 1.0, "m": 64.0, "n": 64.0, "k": 8.0},
        threads={"m": 16.0, "n": 16.0}, direct={0: 1.0, 1: 1.0},
    )  # fmt: skip
    counted = nested.count(sized.gemm(512.0, 512.0, 1024.0, f32), tiles, V100)
    s, p = Sheet(), {f.name: f.value for f in nested.FACTORS} | {"direct wait": 1e9, "leak": 0.0}
    nested.seconds(s, counted, V100, p)
    waits = s.values["busiest SM"] * V100.clock_hz / 1e9
    return float(np.ravel(s.values["loads in place"] / waits)[0])


def moved() -> float:
    """By how much a network that is sure changes a time."""
    work = sized.gemm(512.0, 512.0, 512.0, f16)
    counted = generated.counts(work, Tiles({"b": 1.0, "m": 64.0, "n": 64.0, "k": 64.0}), A100)
    sure: Any = lambda features, isa: 1.0  # noqa: E731
    s, known = Sheet(), generated.shipped()
    assert counted is not None
    generated.seconds(s, work, counted, A100, generated.Fitted(known.factors, sure))
    return float(np.ravel(s.values["learned correction"])[0])


# ---------------------------------------------------------------------------- fit


def host_off(on_gpu: bool) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_fit, "torch_here", lambda: SimpleNamespace(
            __version__="2", cuda=SimpleNamespace(get_device_name=lambda: "a GPU")
        ))  # fmt: skip
        patch.setattr(host_fit, "sees_gpu", lambda: on_gpu)
        steadily = lambda torch, budget_s: (1e-5, [1e-5] * 5)  # noqa: E731
        patch.setattr(host_fit, "_gpu_s", steadily)
        patch.setattr(host_fit, "_cpu_s", steadily)
        return host_fit.measured_host("h", 1.0).host.uncertainty


def wake() -> int:
    """Calls of a GPU that is watched for the first time, a hundredth of a second each."""
    ticks, calls = count(), []
    torch = SimpleNamespace(empty=lambda *_, **__: None, int32=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "perf_counter", lambda: 0.01 * next(ticks))
        patch.setattr(timing.CudaWatch, "_seconds", lambda *_: calls.append(1))
        timing.CudaWatch.of(torch, 1024)
    return len(calls)


def doubted(spread: float = 0.0, waited: float = 0.0) -> bool:
    row: Any = SimpleNamespace(is_measured=True, spread=spread)
    return bool(steady.doubts([row], waited))


def worst(before: float) -> float:
    """The largest mean error, of some, with which a calibration is written."""

    def fits(after: float) -> bool:
        fit: Any = SimpleNamespace(rows=1, before=before, after=after, refused=0.0)
        return not refuses(lambda: steady.check_gain([fit]))

    return last(fits, [0.01 * n for n in range(1, 300)])


# ---------------------------------------------------------------------------- tune, passes


def bold() -> float:
    """The least deviation, of some, with which a tile is tried that is predicted 0.3 slower."""

    class Two:
        log_s = np.zeros(2)

        def __len__(self) -> int:
            return 2

    for sd in (0.31, 0.61, 1.21):
        two: Any = Two()
        two.expected = lambda *_, sd=sd: (np.array([0.0, 0.3]), np.array([0.0, sd]))
        if choices.Choices.next(two, {}, np.random.default_rng(0), 0.0) == 1:
            return sd
    raise AssertionError


def line(extent: int) -> loops.Statement:
    """A loop over cells of 4 bytes in a row."""
    cells = loops.BufferAccess("x", "", 4.0, (((1, "i"),),), (1,))
    return loops.Statement("s", (loops.NestLoop("i", extent),), {"i": "i"}, frozenset(), (cells,))


def words() -> float:
    """Instructions a cell of a loop of 16 that LLVM makes vectors of 8 of."""
    return loops._words(loops.Statement("s", (loops.NestLoop("i", 16),), {}, frozenset(), ()), 8)


def learned() -> tuple[float, ...]:
    """Of one measurement that is e times the prediction: what it adds to itself, and to one a
    tenth of the way to the other end of eleven."""
    points = np.linspace(0.0, 1.0, 11)[:, None]
    mean, _ = correct.differences(points, points[:1], np.ones(1))
    return float(mean[0]), float(mean[1])


def parts() -> float:
    """Two parts of a hundred nodes, of a second each: by how much a cut may make the longer part
    longer at most, if fewer bytes are alive there."""

    def cut(longer: int) -> bool:
        weights = [[1.0] * 200] * 2
        bytes = [10] * 201
        bytes[100], bytes[100 + longer] = 5, 1
        return balance.best_cuts(weights, range(1, 200), bytes) == (100 + longer,)

    return last(cut, range(1, 99)) / 100


def limit_of_modules() -> int:
    hf = pytest.importorskip("gpuir.frontends.torch.hf")
    counted: list[Callable[..., None]] = []
    with pytest.MonkeyPatch.context() as patch:
        hook = SimpleNamespace(remove=lambda: None)
        register = lambda f: counted.append(f) or hook  # noqa: E731
        patch.setattr(hf, "register_module_module_registration_hook", register)
        with hf.of_modules("model"):
            made = 0
            while not refuses(counted[0]):
                made += 1
            return made


def operands() -> int:
    def made(inputs: int) -> bool:
        return not refuses(
            lambda: gpuir.kernel("map", cells=8, inputs=inputs, fn="add", dtype="f32", target=A100)
        )

    return last(made, (16, 32, 33, 64, 65, 128, 129))


ELSEWHERE = Curve("g/1/x", "sm_90/nvlink", "nccl", "2", "eager_loop", "send", "a", 2, 2)
SLICE = load_target("a100:1g.5gb")


def few(rows: int) -> t.Matmul:
    """A batch of two by a matrix, of so many rows each."""
    a, b = TensorType((2, rows, 8), f16), TensorType((8, 8), f16)
    return t.Matmul(Value("a", a), Value("b", b))


def pinned() -> tuple[float, float]:
    """The call of a copy, and the share of the link's rate that its bytes have."""
    cpu_part: Any = SimpleNamespace(bytes_per_s=1e9, flops_per_s=1e9, call_s=0.0, uncertainty=2.0)
    profile: Any = SimpleNamespace(copies=None, fallback=cpu_part)
    one = host.Hosted(flops=0, bytes=0, moved=1000, copies=1, is_first=False)
    terms = dict(host.host_cost(one, A100, profile).terms)
    assert A100.pcie is not None
    return terms["latency"], 1000 / terms["memory"] / A100.pcie.bytes_per_s


def blocks() -> tuple[float, ...]:
    """Of the SMs of H100 beside NVSwitch, and of L40S beside PCIe."""
    time: Any = SimpleNamespace(time_s=1.0)
    return tuple(network.device_share(time, 0.0, load_cluster(n)) for n in ("dgx-h100", "8xl40s"))


def selecting(length: float) -> float:
    return steps._selected(1.0, length, 1.0, 4.0)[0].clocks


def off(kernel: str) -> tuple[float, ...]:
    """By what factors a time may be off where no backtest says so."""
    work = replace(sized.pointwise(64.0, (f32,), (f32,)), kernel=kernel, kind="odd")
    known = kernel == "k.map"
    return tuple(np.exp(uncertainty.uncertainty(work, A100, known, "")))


def stages(target: Any) -> float:
    """How deep a product may be staged."""
    work, tile = sized.gemm(64.0, 64.0, 64.0, f16), Tiles(dict.fromkeys("mnk", 32.0))
    return next(n.has for n in needs(work, tile, target) if n.what == "stages")


def setting_up() -> float:
    """A row of which the calls take as good as no time: none are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "FEWEST", 0)
        problem = collect.Problem("add", "f32", (("cells", 1024),))
        return collect.expected_s(A100, [problem], 0.0)


def nothing_known() -> float:
    _, sd = correct.differences(np.zeros((1, 1)), np.zeros((0, 1)), np.zeros(0))
    return float(sd[0])


def observed() -> float:
    """The weight of the only observation, of a deviation."""
    one: Any = SimpleNamespace(seen=[SimpleNamespace(error=1.0, deviation=1.0)], _kinds={})
    return float(observe.Observed._fitted.func(one)[1][0])


def alike(apart: float) -> float:
    """What two tiles of a kind have in common, so many doublings apart."""
    return float(observe._alike(np.array([[apart]]), np.array([[0.0]]))[0, 0])


# ---------------------------------------------------------------------------- the list

# What is computed, and the number that it has to be: of each constant, by its module and its name.
PINNED: dict[str, tuple[Callable[[], Any], Any]] = {
    "cost.attention SYNC_FLOPS": (sync_flops, 2048),
    "cost.attention GATHERED_ROWS": (gathered_rows, 16),
    # half of what is beyond the L2's bytes by a fourth
    "cost.attention LOST": (
        lambda: attention._missed(Sheet(), 1.125 * L40S.l2_bytes, L40S, {}), 0.5,
    ),
    "cost.attention EFFICIENT_SHARE": (efficient_share, 0.59),
    "cost.conv CUDNN_SLOTS": (
        lambda: sheet(
            conv.FAMILY, sized.conv(8.0, 64.0, (56, 56), 64.0, (3, 3), f32, groups=64.0), V100
        )["direct: instructions for each"], 5,
    ),
    "cost.cpu GRAIN_CELLS": (
        lambda: sheet(cpu.FAMILY, sized.pointwise(3.0 * 32768, (f32,), (f32,)), CPU)[
            "cores at work"
        ], 3,
    ),
    "cost.cpu HELD_SHARE": (lambda: cpu._held(83.0, 100.0), 1 / 2),
    "cost.cpu HELD_POWER": (lambda: cpu._held(166.0, 100.0), 1 / (1 + 2**4)),
    "cost.cpu THREAD_START_S": (thread_start, 3e-6),
    "cost.generated SPREAD": (spread, (1.6, 1.6, 2.0, 2.0)),
    "cost.generated.lanes UNROLLED": (trips, 1024 / 4),
    "cost.generated.lanes TOGETHER": (together, 8),
    "cost.generated.matrix BOUND": (moved, exp(0.25)),
    "cost.grouped STEP_BYTES": (
        lambda: grouped.candidates(routing.mixture(64.0, 512.0, 512.0, 2, 8, bf16), H100).dims[
            "k"
        ][0], 32,
    ),
    "cost.grouped MMA_SYNC": (mma_sync, (1, 0.629, 0.629 / 2)),
    "cost.host PINNED": (pinned, (10e-6, 0.8)),
    "cost.kriging OTHER_NETWORK": (
        lambda: tuple(np.exp(Field({}).interval(ELSEWHERE, 1024.0))), (0.75, 2),
    ),
    # an addition, and what it takes to write a result
    "cost.lanes OWN_LANE_OPS": (
        lambda: sized.pointwise(1.0, (f32, f32), (f32,), ops=1.0).lane_ops, 1 + 4,
    ),
    "cost.lanes DEQUANTISE_LANE_OPS": (
        lambda: sized.gemm(4.0, 3.0, 5.0, f16, weight=i8).lane_ops
        - sized.gemm(4.0, 3.0, 5.0, f16).lane_ops, 3 * 5 * 2,
    ),
    # four cells a thread and 32, by eights
    "cost.nest OWN_REGISTERS": (
        lambda: nest.library_block(
            nest.cut(sized.pointwise(4096.0, (f32,), (f32,)), Tiles({"i": 512.0})), A100
        ).registers, 40,
    ),
    # on sm_75, which copies through registers, and on sm_80
    "cost.legal PLAIN_STAGES": (lambda: stages(load_target("t4")), 2),
    "cost.legal MOST_STAGES": (lambda: stages(A100), 8),
    "cost.nest IDLE_SHARE": (lambda: nest.board_watts(A100), 300),
    # a head of 1024 cells of 2 bytes, and one cell of its values
    "cost.nest WIDEST_HEAD_BYTES": (
        lambda: nest._bytes_in(
            Sheet(), sized.attention(1.0, 1.0, 1.0, 1.0, 1024.0, f16),
            dict.fromkeys("bhsed", 1.0), "staged",
        ), 512 + 2,
    ),
    "cost.network BLOCKS": (blocks, (24 / 132, 8 / 142)),
    # two digits of a byte, and eight more, a key
    "cost.steps BLOCK_DIGIT_OPS": (lambda: steps._sorted(1.0, 1024.0, 1.0).ops / 1024, 2 * 30 + 8),
    # three launches, and half as many again of a pass for each byte and one
    "cost.steps SEGMENTED": (lambda: steps._sorted(2.0, 1e6, 4.0).launches, 3 + 1.5 * (4 + 1)),
    "cost.steps WARP_CLOCKS": (
        lambda: (selecting(2048.0) - selecting(1024.0)) / (ceil(32 / steps.SELECT_BITS) + 2), 20,
    ),
    # ten halvings of 1024 cells for each of seven
    "cost.steps SEARCH_OPS": (
        lambda: steps._search(routine("search", (1024,), (7,))).ways[0].ops, 7 * 10 * 12,
    ),
    "cost.steps SEARCH_CLOCKS": (
        lambda: steps._search(routine("search", (1024,), (7,))).cpu_clocks, 7 * 10 * 20,
    ),
    # two launches a panel and one
    "cost.steps PANEL": (
        lambda: steps._decomposition(routine("lu", (64, 64))).ways[0].launches, 1 + 2 * 2,
    ),
    "cost.steps OUTER": (
        lambda: steps._decomposition(routine("lu", (256, 256))).ways[0].moved / (4 * 256 * 256),
        1 + 2 / 3,
    ),
    "cost.steps SORT_CLOCKS": (lambda: steps.top_k(1, 1024, 1024, 4).cpu_clocks, 12 * 1024 * 10),
    "cost.steps SELECT_CELL_CLOCKS": (
        lambda: steps.top_k(1, 1024, 1, 4).cpu_clocks, 16 * 1024 + 12,
    ),
    "cost.steps RANDOM_CLOCKS": (lambda: steps._random(routine("random", (50,))).cpu_clocks, 1000),
    "cost.steps ASKED_CLOCKS": (
        lambda: steps._picked(routine("nonzero", (50,))).cpu_clocks, 50 * 30,
    ),
    "cost.steps COUNT_CLOCKS": (
        lambda: steps._once(routine("im2col", (50,), flops=7)).cpu_clocks, 50 * 3 + 7,
    ),
    "cost.stream TURN_S": (turns, 2.75e-6),
    "cost.strips FEW_ROWS": (few_rows, 128),
    "cost.tensor MOST_STAGES": (lambda: tensor._table.__wrapped__(A100, 16)[3].max(), 4),
    "cost.tensor MOST_SPLIT": (lambda: shared(128.0, 1e6), 32),
    "cost.tensor LEAST_STEPS": (lambda: shared(128.0, 16 * 64.0), 16 / 4),
    "cost.tensor CLUSTER_READS": (cluster_reads, 0.75),
    "cost.tensor BESIDE": (beside, 0.5),
    # rows of nine cells of 2 bytes
    "cost.tensor UNALIGNED": (
        lambda: tensor._misaligned(Sheet(), sized.gemm(8.0, 8.0, 9.0, f16)), 2,
    ),
    "cost.tensor BOUND": (lambda: tensor.FAMILY.bound, 0.3),
    "cost.tile UNMEASURED": (unmeasured, 1.5),
    "cost.uncertainty KIND": (lambda: off("k.map"), (1.6, 1.6)),
    "cost.uncertainty ROUTINE": (lambda: off("k.routine"), (5, 5)),
    "cost.uncertainty OPAQUE": (lambda: off("k.opaque"), (2, 100)),
    "cost.uncertainty WRITTEN_OUT": (
        lambda: tuple(np.exp(uncertainty.uncertainty(
            sdpa(sized.attention(1.0, 1.0, 64.0, 64.0, 64.0, bf16)), V100, True, "known"
        ))), (1.6, 5),
    ),
    "fit.collect SETUP_S": (setting_up, 0.05),
    "fit.host ROUNDS_OFF": (lambda: host_off(True), 1.1),
    "fit.host CPU_OFF": (lambda: host_off(False), 1.3),
    "fit.steady UNSTEADY": (
        lambda: last(lambda x: not doubted(x), (0.05, 0.1, 0.19, 0.21, 0.39, 0.41)), 0.19,
    ),
    "fit.steady WAITED": (
        lambda: last(lambda x: not doubted(waited=x), (0.05, 0.1, 0.19, 0.21, 0.39, 0.41)), 0.19,
    ),
    "fit.steady WORSE": (lambda: worst(0.1), 0.15),
    "fit.steady USELESS": (lambda: worst(0.9), 1),
    "fit.timing WAKE_S": (wake, 29),
    "frontends.torch.hf MOST_MODULES": (limit_of_modules, 1 << 19),
    # the longer part has a fourth more
    "passes.partition.balance SPARE": (parts, 0.25),
    # half of 2000 operations at a thousand a byte
    "passes.shard.place FLOPS_A_BYTE": (
        lambda: ways.repeated_bytes(
            SimpleNamespace(operands=(), result_types=(), flops=lambda: 2000),
            ways.ShardWay((), ()),
            2,
        ), 1,
    ),
    "passes.shard.plan EACH": (
        lambda: plan.Planner.each.fget(SimpleNamespace(replicas=3)), 3e6,
    ),
    "passes.views ROWS": (
        lambda: last(
            lambda n: views.has_few_rows(few(n)),
            (128, 255, 256, 511, 512, 1023, 1024),
        ), 511,
    ),
    "plan.mig.timetable CHANGE_S": (
        lambda: signature(timetable.timetable).parameters["change_s"].default, 30,
    ),
    "simulate.memory CONTEXT_BYTES": (
        lambda: memory.available_bytes(SLICE) - SLICE.dram.bytes, -512 * 2**20,
    ),
    "simulate.memory DRIVER_SHARE": (
        lambda: memory.available_bytes(A100) + 512 * 2**20, round(0.985 * 40 * 2**30),
    ),
    "simulate.overlap LEAST_RATE": (lambda: overlap.rate_beside(1.0, 1.0), 0.1),
    "stacks.serving.pools SGLANG_SHARE": (lambda: pools.sglang([], (), 1000), 880),
    # 0.3 / 0.5 is less than 0.61
    "tune.choices BOLD": (bold, 0.61),
    "tune.correct SCALE": (nothing_known, hypot(2, 0.35)),
    "tune.correct OWN": (nothing_known, hypot(2, 0.35)),
    "tune.correct NOISE": (lambda: learned()[0], 4.1225 / 4.125),
    # a tenth is 0.894 reaches of 0.5 deviations, 0.316, over the square root of 2
    "tune.correct REACH": (lambda: learned()[1], (4 + 0.1225 * exp(-0.4)) / 4.125),
    "tune.kernels MOST_OPERANDS": (operands, 64),
    # 256 bytes a tile can count on of 366
    "tune.loops HELD": (
        lambda: last(lambda n: loops._traffic(line(64), n) > 256, (182, 183, 365, 366, 731, 732)),
        365,
    ),
    "tune.loops FORK_S": (lambda: loops.cpu_seconds((), CPU, 1), 5e-6),
    "tune.loops HALF_VECTOR": (words, 16 / 8 / 16 / 0.5),
    "tune.observe COMMON": (observed, 1 / (0.1 + 0.15)),
    "tune.observe ALONE": (observed, 1 / (0.1 + 0.15)),
    "tune.observe KIND": (lambda: alike(100.0), 0.1),
    "tune.observe WIDE": (lambda: alike(0.0), 0.1 + 0.15 + 0.5),
    "tune.observe NARROW": (lambda: alike(0.0), 0.1 + 0.15 + 0.5),
}  # fmt: skip
# Where a module that only names the constant for others is not the one to change.
READ_IN = {
    "cost.lanes OWN_LANE_OPS": "cost.sized",
    "cost.lanes DEQUANTISE_LANE_OPS": "cost.sized",
    "passes.shard.place FLOPS_A_BYTE": "passes.shard.ways",
}
# Read when a module is made: a value that is right says that the constant is.
AT_ONCE = ("cost.tensor BOUND", "plan.mig.timetable CHANGE_S")


@pytest.mark.parametrize("name", PINNED)
def test_an_assumed_constant_is_what_it_means(name: str, monkeypatch: pytest.MonkeyPatch):
    compute, wanted = PINNED[name]
    assert compute() == pytest.approx(wanted, rel=1e-6)
    if name in AT_ONCE:
        return
    module, _, constant = name.partition(" ")
    where = import_module(f"gpuir.{READ_IN.get(name, module)}")
    for factor in (2, 0.5):
        with monkeypatch.context() as patch:
            patch.setattr(where, constant, scaled(getattr(where, constant), factor))
            try:
                found = compute()
            except (IndexError, AssertionError):  # none of the numbers tried
                continue
            assert found != pytest.approx(wanted, rel=1e-6), f"{constant} x {factor}"


def scaled(value: Any, factor: float) -> Any:
    """A constant, or all numbers in it, times a factor."""
    match value:
        case Mapping():
            return {name: scaled(x, factor) for name, x in value.items()}
        case tuple():
            return tuple(scaled(x, factor) for x in value)
        case int():
            return int(value * factor)
        case float():
            return value * factor
    assert is_dataclass(value)
    return type(value)(*(scaled(getattr(value, f.name), factor) for f in fields(value)))


def constants(path: Path) -> Iterable[str]:
    """Numbers of a module that a comment says are assumed: on their line, or above it."""
    text = path.read_text()
    lines = text.split("\n")
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not node.value:
            continue
        inside = (x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant))
        if not any(isinstance(x, int | float) and not isinstance(x, bool) for x in inside):
            continue
        own = [x.partition("#")[2] for x in lines[node.lineno - 1 : node.end_lineno] if "#" in x]
        above = node.lineno - 1
        while above and lines[above - 1].startswith("#"):
            above -= 1
        said = " ".join(own or lines[above : node.lineno - 1])
        if "ssumed" in said:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for x in (x for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)):
                yield f"{module} {x.id}"


def test_every_assumed_constant_is_in_the_list():
    found = {name for path in sorted(ROOT.rglob("*.py")) for name in constants(path)}
    assert found - set(PINNED) == set()
    for name in PINNED:
        module, _, constant = name.partition(" ")
        assert hasattr(import_module(f"gpuir.{module}"), constant), name


def ones(rows: Iterable[Any], *columns: str) -> float:
    """The sum of the logarithms to base 2: one more where one number is doubled."""
    return sum(log2(n) for row in rows for c in columns if (n := getattr(row, c)) > 0)


def test_the_assumed_numbers_of_tables_are_what_they_were():
    """A table whose numbers are all assumed has nothing to be worked from. A number that is
    doubled or halved changes its sum by one."""
    matrices = [x for x in steps.of_matrices().values() if "assumed" in x.source]
    found = {
        "functions": ones(table("functions", Function), "lane_ops"),
        "matrices": ones(matrices, "column_clocks"),
        "routines": ones(table("factors/routines", Factor), "value"),
        "generated rows": ones(table("factors/generated_rows", Factor), "value"),
    }
    assert found == pytest.approx(
        {
            "functions": 148.5035,
            "matrices": 112.6351,
            "routines": -7.3217,
            "generated rows": 33.5724,
        },
        abs=1e-3,
    )
