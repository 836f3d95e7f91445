"""A program at many points: what `analyze` says of the model loaded there, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_models as m
import pytest

import gpuir
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.run.symbols import Sampled

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")


def pyramid(tmp_path):
    """Images that are cut in two, and in two again."""
    path = tmp_path / "pyramid.onnx"
    w = np.zeros((16, 3, 3, 3), np.float32)
    g = m.graph(
        [
            m.node("Conv", ["x", "w"], ["c"], pads=[1] * 4, strides=[2, 2]),
            m.node("Relu", ["c"], ["r"]),
            m.node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            m.node("GlobalAveragePool", ["p"], ["s"]),
            m.node("Flatten", ["s"], ["y"]),
        ],
        [m.info("x", ["batch", 3, "height", 64])],
        [m.info("y", ["batch", 16])],
        [m.const("w", w)],
    )
    onnx.save(m.model_of(g), str(path))
    return str(path)


def assert_points(program, points, target, profile):
    """Each point is what `analyze` says of the model that is loaded there."""
    times = program.times(points, target)
    for i in range(len(times.latency_s)):
        point = {name: int(np.ravel(n)[i]) for name, n in points.items()}
        try:
            found = gpuir.analyze(program.load(point), target, profile=profile)
        except GpuirError:
            assert times.why[i]
            assert np.isnan(times.latency_s[i])
            continue
        assert times.why[i] == ""
        assert times.latency_s[i] == pytest.approx(found.latency_s, rel=1e-12)
        ends = times.low_s[i], times.high_s[i]
        assert ends == pytest.approx(found.interval, rel=1e-12)
        assert times.peak_bytes[i] == found.peak_bytes
        assert times.reserved_bytes[i] == found.reserved_bytes
        assert times.available_bytes[i] == found.available_bytes
        assert times.fits[i] == found.fits


SIZES = {"batch": [1, 2, 3, 64, 7], "seq": [16, 16, 1, 128, 127]}


@pytest.mark.parametrize(
    ("profile", "target"),
    [
        *(("ort", "a100"), ("ort", "x86-64-v3"), ("tensorrt", "b200"), ("eager", "mi300x")),
        *(("compiled", "h100-sxm"), ("cudagraph", "a100")),
    ],
)
def test_points_are_what_analyze_says(profile, target):
    program = gpuir.program(ENCODER, profile=profile)
    assert_points(program, SIZES, target, profile)


def test_bytes_of_workspace_that_32_bits_do_not_hold():
    program = gpuir.program(ENCODER, profile="ort", dims={"seq": 128})
    assert_points(program, {"batch": [1 << 20]}, "t4", "ort")


def test_a_training_step():
    program = gpuir.program(ENCODER, train=True, optimizer="adamw")
    assert_points(program, {"batch": [4, 32, 5], "seq": [64, 16, 100]}, "a100", None)


def test_images_that_are_cut_in_two(tmp_path):
    program = gpuir.program(pyramid(tmp_path), profile="eager")
    points = {"batch": [2, 5, 9, 16], "height": [32, 64, 40, 224]}
    assert_points(program, points, "t4", "eager")
    assert len(program.sampled["batch", "height"].known) == 1


def test_points_within_ask_no_frontend():
    program = gpuir.program(ENCODER)
    ends = {"batch": [2, 64], "seq": [16, 128]}
    program.times(ends, "a100")
    (sampled,) = program.sampled.values()
    sampled.load = lambda point: pytest.fail(f"loads {point}")
    found = program.times({"batch": np.arange(2, 65)[:, None], "seq": [16, 77, 128]}, "h100-sxm")
    assert found.latency_s.shape == (63 * 3,)
    assert not np.isnan(found.latency_s).any()


def test_a_size_that_the_model_does_not_take_says_why():
    program = gpuir.program(ENCODER)
    times = program.times({"batch": 2, "seq": [16, 100_000]}, "a100")
    assert np.isnan(times.latency_s).tolist() == [False, True]
    assert times.why[0] == ""
    assert times.why[1]
    with pytest.raises(GpuirError) as alone:
        gpuir.analyze(ENCODER, "a100", dims={"batch": 2, "seq": 100_000})
    assert alone.value.what in times.why[1]
    with pytest.raises(GpuirError):
        program.at({"batch": 2, "seq": 100_000}, "a100")


def test_a_stack_that_does_not_run_there_says_why():
    times = gpuir.program(ENCODER, profile="vllm").times({"batch": [2, 3], "seq": 16}, "x86-64-v3")
    assert all(times.why)


def test_one_point_whole():
    program = gpuir.program(ENCODER, profile="ort")
    program.times({"batch": [2, 64], "seq": [16, 128]}, "a100")
    found = program.at({"batch": 5, "seq": 96}, "a100")
    alone = gpuir.analyze(ENCODER, "a100", dims={"batch": 5, "seq": 96}, profile="ort")
    assert found == alone
    assert gpuir.show(found.graph) == gpuir.show(alone.graph)
    assert found.warnings == alone.warnings
    assert found.assumed == alone.assumed


@pytest.mark.parametrize(
    ("points", "what"),
    [
        ({}, "no sizes are given"),
        ({"batch": 2.5}, "batch is not a size"),
        ({"batch": [-1]}, "batch is not a size"),
        ({"batch": [1, 2], "seq": [1, 2, 3]}, "sizes do not broadcast together"),
    ],
)
def test_sizes_that_are_none_are_refused(points, what):
    with pytest.raises(UsageError, match=what):
        gpuir.program(ENCODER).times(points, "a100")


def test_no_points_no_times():
    assert gpuir.program(ENCODER).times({"batch": [], "seq": 16}, "a100").latency_s.size == 0


def test_more_than_one_point_is_not_one():
    with pytest.raises(UsageError, match="more than one point"):
        gpuir.program(ENCODER).at({"batch": [1, 2], "seq": 16}, "a100")


def test_loads_are_few():
    """The ends, the corners, and a point between that proves what they say."""
    loads = []
    program = gpuir.program(ENCODER)
    sampled = Sampled(lambda point: loads.append(point) or program.load(point))
    columns = {"batch": np.arange(2, 500), "seq": np.full(498, 64)}
    assert [len(places) for _, places in sampled.graphs(columns)] == [498]
    assert len(loads) == 3
    columns["batch"] += 20
    assert [len(places) for _, places in sampled.graphs(columns)] == [478, 20]
    assert len(loads) == 4  # the new end alone


def test_two_points_tell_those_far_beyond():
    """With one that is far and odd; where the model does not take it, with one that is less far, or
    one between."""
    program = gpuir.program(ENCODER)
    loads = []
    sampled = Sampled(lambda point: loads.append(point) or program.load(point))
    found = sampled.beyond({"batch": 4, "seq": 64}, [{"batch": 2, "seq": 64}])
    assert len(loads) == 3
    assert found.low == {"batch": 2, "seq": 64}
    assert found.high["batch"] > 64
    for n in (3, 7, 64):
        assert found.at({"batch": n, "seq": 64}) == program.load({"batch": n, "seq": 64})
    both = sampled.beyond({"batch": 8, "seq": 48}, [{"batch": 2, "seq": 64}])
    assert both.low == {"batch": 2, "seq": 48}
    for point in ({"batch": 3, "seq": 50}, {"batch": 100, "seq": 51}):
        assert both.at(point) == program.load(point)
    long = sampled.beyond({"batch": 2, "seq": 500}, [{"batch": 2, "seq": 64}])
    assert long.high == {"batch": 2, "seq": 500}
    assert long.at({"batch": 2, "seq": 301}) == program.load({"batch": 2, "seq": 301})


def test_what_is_known_reaches_to_a_point_where_it_is_right():
    program = gpuir.program(ENCODER)
    sampled = Sampled(program.load)
    assert sampled.reached({"batch": 4, "seq": 64}, {"batch": 4, "seq": 64}) is None
    sampled.known.append(sampled.sample({"batch": 4, "seq": 64}, {"batch": 9, "seq": 64}))
    far = {"batch": 70, "seq": 64}
    assert sampled.reached(far, far).high == far
    assert sampled.known[0].low == {"batch": 4, "seq": 64}


def test_a_step_over_many_ranks():
    plan = gpuir.Parallel(dp=2, tp=2, microbatches=2)
    program = gpuir.program(ENCODER, plan=plan, train=True, optimizer="adamw")
    points = {"batch": [8, 16, 12, 6], "seq": [64, 32, 64, 64]}
    times = program.times(points, "dgx-a100")
    for i in range(3):
        dims = {name: n[i] for name, n in points.items()}
        g = gpuir.load(ENCODER, dims=dims, train=True, optimizer="adamw")
        g = gpuir.pipeline("microbatch{count=2}").run(g)
        alone = gpuir.simulate_ranks(g, "dgx-a100", plan)
        assert times.latency_s[i] == pytest.approx(alone.latency_s, rel=1e-12)
        assert times.reserved_bytes[i] == alone.reserved_bytes
        assert times.fits[i]
    assert "cannot be split evenly" in times.why[3]
    assert program.at({"batch": 8, "seq": 64}, "dgx-a100").step.time_s == times.latency_s[0]


def test_what_takes_no_sizes_gets_numbers(monkeypatch):
    """A pass that does with a size what only numbers can."""
    from gpuir.run import program as m

    whole = m.program_of

    def picky(graph, on_cpu=False):
        if any(type(n) is not int for v in graph.inputs for n in v.type.shape):
            raise TypeError("no number")
        return whole(graph, on_cpu)

    monkeypatch.setattr(m, "program_of", picky)
    program = gpuir.program(ENCODER)
    assert_points(program, {"batch": [2, 3], "seq": [16, 24]}, "a100", None)
    assert len(next(iter(program.variants.values()))) == 2


def test_blocks_that_are_filled_up_are_no_straight_line():
    """Ends that are multiples of a block hide it; a size between shows it."""
    blocks = [gpuir.load(ENCODER, dims={"batch": 2, "seq": 8 * n}) for n in range(1, 10)]
    made = {n: blocks[-(-n // 8) - 1] for n in range(8, 73)}
    sampled = Sampled(lambda point: made[point["n"]])
    for found, places in sampled.graphs({"n": np.arange(8, 73)}):
        for i in places.tolist():
            assert found.at({"n": 8 + i}) == made[8 + i]


def test_blocks_are_counted_as_they_are_rounded():
    """Up, or down, where the ends are multiples and do not tell."""
    batches = [gpuir.load(ENCODER, dims={"batch": n, "seq": 8}) for n in range(2, 13)]
    for up in (7, 0):
        made = {n: batches[(n + up) // 8] for n in range(8, 73)}
        sampled = Sampled(lambda point, made=made: made[point["n"]])
        ((found, places),) = sampled.graphs({"n": np.arange(8, 73)})
        assert len(places) == 65
        for n in range(8, 73):
            assert found.at({"n": n}) == made[n], (up, n)


def test_a_model_that_takes_no_point_says_so():
    with pytest.raises(GpuirError, match=r"none\.onnx"):
        gpuir.program("none.onnx").times({"batch": [1, 2]}, "a100")
    with pytest.raises(GpuirError, match="no such dimension"):
        gpuir.program(ENCODER).times({"bach": [1, 2], "seq": 16}, "a100")
    with pytest.raises(GpuirError, match="a100"):
        gpuir.program(ENCODER, plan=gpuir.Parallel(tp=2)).times({"batch": 4, "seq": 16}, "a100")
