"""Kernels on a CPU: the slower of arithmetic and bytes, by the level that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cost import kernels as op

import gpuir
from gpuir.cost import sized, work
from gpuir.cost.cpu import FACTORS, SCAN_CLOCKS, WEIGHTS_REORDERED, whole
from gpuir.cost.lanes import LANE_OPS, SIMD_OPS
from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Sheet
from gpuir.cost.tile import estimate, predict
from gpuir.cost.work import Looped, WeightBytes
from gpuir.ir.types import f32
from gpuir.targets.load import load_target
from gpuir.targets.target import Flops, FrozenTable

CPU = load_target("cpu")
ENCODER = Path(__file__).parents[2] / "examples" / "encoder.onnx"
SHARE = {f.name: f.value for f in FACTORS}
WORKS = {
    "product": sized.gemm(512.0, 512.0, 512.0, f32),
    "vector": sized.gemm(1.0, 1024.0, 1024.0, f32),
    "convolution": sized.conv(1.0, 64.0, (56.0, 56.0), 64.0, (3.0, 3.0), f32, padding=1.0),
    "attention": sized.attention(1.0, 12.0, 128.0, 128.0, 64.0, f32),
    "softmax": sized.rows(4096.0, 1024.0, f32, "softmax"),
    "add": sized.pointwise(1e6, (f32, f32), (f32,)),
    "transpose": sized.pointwise(1e6, (f32,), (f32,), kind="transpose"),
    "gather": sized.gather(8192.0, 64.0, f32, 1e6),
}


def seconds(w: work.Work, target=CPU) -> float:
    return float(predict(w, target, model={}).time_s[0])


def test_a_large_product_is_its_flops_over_the_share_of_the_peak():
    n = 8192.0
    arithmetic = 2 * n**3 / (CPU.flops_per_s.vector["f32"] * SHARE["product share"])
    assert seconds(sized.gemm(n, n, n, f32)) == pytest.approx(arithmetic, rel=0.05)


def test_a_large_copy_is_twice_its_tensor_over_the_memory():
    """Read and written, as the bandwidth was measured."""
    cells = 2.0**28
    moved = 2 * 4 * cells / (CPU.dram_bytes_per_s * SHARE["dram share"])
    assert seconds(sized.pointwise(cells, (f32,), (f32,), kind="copy")) == pytest.approx(
        moved, 1e-2
    )


def test_functions_cost_what_simd_loops_take():
    """A tanh and an exp a cell, by their instructions; on a GPU they cost what its lanes take."""
    cells = 1e6
    tanh, exp = (sized.mapped(fn, cells, (f32,), f32) for fn in ("tanh", "exp"))
    more = cells * (SIMD_OPS["tanh"] - SIMD_OPS["exp"])
    rate = CPU.flops_per_s.vector["f32"] / 2 * SHARE["lane share"]
    assert seconds(tanh) - seconds(exp) == pytest.approx(more / rate, rel=1e-6)
    gpu = load_target("p100")
    plain = sized.pointwise(cells, (f32,), (f32,), ops=LANE_OPS["tanh"])
    assert seconds(tanh, gpu) == seconds(plain, gpu)


def test_a_model_and_its_extents_say_the_same_functions():
    mapped = op.mapped("tanh", f32, (64, 8))
    assert work_of(mapped).simd_ops == sized.mapped("tanh", 512, (f32,), f32).simd_ops > 0


@pytest.mark.parametrize(
    ("shape", "unfolded"),
    [
        ((1, 16, 14, 32, 3, 1, 1), True),  # one small image
        ((2, 16, 14, 32, 3, 1, 1), False),
        ((1, 64, 56, 32, 3, 1, 1), False),  # 200 704 cells
        ((1, 16, 14, 32, 5, 1, 1), False),
        ((1, 16, 14, 16, 3, 1, 16), False),
        ((8, 256, 56, 64, 1, 1, 1), True),  # a window of one cell
        ((16, 256, 56, 64, 1, 1, 1), False),
        ((8, 256, 56, 64, 1, 2, 1), False),
    ],
)
def test_which_convolutions_are_unfolded(shape: tuple[int, ...], unfolded: bool):
    """PyTorch's use_mkldnn, for one thread."""
    batch, channels, size, filters, window, stride, groups = map(float, shape)
    w = sized.conv(
        batch, channels, (size,) * 2, filters, (window,) * 2, f32, stride=stride, groups=groups
    )
    s = Sheet()
    one = load_target("cpu+sms=1")
    estimate(w, whole(w, one), one, s=s, model={})
    assert s.values["unfolded"] == unfolded


def test_a_channel_less_than_a_word_of_them_costs_the_whole_word():
    def time(channels: float) -> float:
        w = sized.conv(8.0, channels, (56.0, 56.0), 64.0, (3.0, 3.0), f32, padding=1.0)
        s = Sheet()
        estimate(w, whole(w, CPU), CPU, s=s, model={})
        return s.values["arithmetic"]

    assert time(17.0) == pytest.approx(time(32.0))
    assert time(48.0) / time(32.0) == pytest.approx(1.5, rel=0.05)
    assert time(3.0) < time(16.0)


def test_a_causal_mask_saves_whole_blocks_of_keys():
    """Of up to 512 keys none, of many half."""
    full, masked = (
        [sized.attention(1.0, 8.0, n, n, 64.0, f32, causal=causal) for n in (384.0, 16384.0)]
        for causal in (False, True)
    )
    assert seconds(masked[0]) == pytest.approx(seconds(full[0]))
    assert seconds(masked[1]) / seconds(full[1]) == pytest.approx(0.5, abs=0.05)


def test_weights_that_other_layers_push_out_come_from_memory():
    """Of a model of 300 MB; of one that the caches hold nothing is pushed out."""
    plain = sized.gemm(16.0, 768.0, 3072.0, f32)
    own = 4.0 * 768 * 3072

    def time(others: float) -> float:
        return seconds(replace(plain, weights=WeightBytes(own, others)))

    alone = time(0.0)  # among others all the same, which moved their bytes between
    assert alone > seconds(plain) + SHARE["call in a model"]
    memory = 1 / (CPU.dram_bytes_per_s * SHARE["dram share"])
    assert 0 < time(1e7) - alone < time(3e8) - alone < SHARE["weights away"] * own * memory


def test_what_a_model_does_between_counts_in_a_model_alone():
    """A call is dearer, operands are further away; a library's loop finds them as it left them."""
    add = sized.mapped("add", 1e5, (f32, f32), f32)
    inside = replace(add, weights=WeightBytes(0.0, 1e6))
    more = seconds(inside) - seconds(add)
    assert more > SHARE["call in a model"]
    step = replace(sized.gemm(8.0, 2048.0, 512.0, f32), detail=Looped(0.0))
    assert seconds(step) < 0.7 * seconds(replace(step, detail=None))  # packed before the loop


def test_convolutions_bring_their_weights_in_order_each_time():
    many = sized.conv(1.0, 512.0, (7.0, 7.0), 512.0, (3.0, 3.0), dtype=f32, padding=1.0)
    own = 4.0 * 512 * 512 * 9
    inside = replace(many, weights=WeightBytes(own, 0.0))
    moved = WEIGHTS_REORDERED * own / CPU.dram_bytes_per_s
    assert seconds(inside) - seconds(many) > moved


def test_a_model_larger_than_the_caches_waits_for_its_weights():
    """The encoder's 340 MB of weights; on a CPU whose shared cache holds them, no more."""
    small, large = (
        gpuir.analyze(ENCODER, f"cpu+l2.bytes={n}", dims={"batch": 1, "seq": 16}).graph
        for n in (1 << 25, 1 << 34)
    )
    times = [gpuir.analyze(g).latency_s for g in (small, large)]
    assert times[0] - times[1] > 0.5 * 3.4e8 / CPU.dram_bytes_per_s


def test_a_running_sum_waits_for_each_addition():
    cells = 2.0**20
    total, running = (sized.rows(1024.0, 1024.0, f32, kind, ops=1.0) for kind in ("sum", "norm"))
    waits = SCAN_CLOCKS * cells / (CPU.clock_hz * CPU.sms)
    assert seconds(replace(running, kind="scan")) - seconds(total) > 0.8 * waits


def test_nearer_memory_is_faster():
    copies = [sized.pointwise(n, (f32,), (f32,), kind="copy") for n in (1e5, 1e6, 1e7)]
    rates = [w.nbytes / (seconds(w) - CPU.launch_s - 3e-6) for w in copies]
    assert rates[0] > 1.5 * rates[1] > 2 * rates[2]


@pytest.mark.parametrize("name", WORKS)
def test_a_cpu_with_every_rate_raised_is_never_slower(name: str):
    faster = replace(
        CPU,
        clock_hz=CPU.clock_hz * 1.5,
        flops_per_s=Flops(FrozenTable({d: r * 1.5 for d, r in CPU.flops_per_s.vector.items()})),
        dram=replace(CPU.dram, bytes_per_s=CPU.dram_bytes_per_s * 1.5),
        l2=replace(CPU.l2, bytes_per_s=CPU.l2_bytes_per_s * 1.5),
    )
    assert 0.6 < seconds(WORKS[name], faster) / seconds(WORKS[name]) <= 1


@pytest.mark.parametrize("name", WORKS)
def test_many_at_once_are_as_each_alone(name: str):
    many = WORKS[name].each(lambda n: np.array([n, 2.0 * n, n]))
    times = predict(many, CPU, model={}).time_s
    assert times[0] == times[2] == pytest.approx(seconds(WORKS[name]))


def test_a_model_on_a_cpu():
    g = gpuir.analyze(ENCODER, "cpu", dims={"batch": 1, "seq": 128}).graph
    assert 0.01 < gpuir.analyze(g).latency_s < 0.2
    many = gpuir.analyze(ENCODER, "cpu+sms=32", dims={"batch": 1, "seq": 128}).graph
    assert gpuir.analyze(many).latency_s < gpuir.analyze(g).latency_s


def test_a_copy_into_several_parts_takes_no_less_than_no_time():
    g = gpuir.parse("""
    kernel @split {
      in %x: f32[2, 96]
      %a: f32[1, 96], %b: f32[1, 96] = k.copy([%x], {
        in %x: f32[2, 96]
        %a: f32[1, 96] = t.slice(%x, [0, 0], [1, 96], [1, 1]) at "split:Split"
        %b: f32[1, 96] = t.slice(%x, [1, 0], [1, 96], [1, 1]) at "split:Split"
        out %a, %b
      }) at "split:Split"
      out %a, %b
    }
    """)
    (node,) = gpuir.analyze(g, "epyc-zen5-core", profile="ort").graph.nodes
    assert node.cost and node.cost.term("compute") >= 0
