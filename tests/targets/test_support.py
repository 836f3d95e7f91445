"""What stacks run at all: operators, dtypes, devices; and what the rest costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gpuir
from gpuir.cli.main import main
from gpuir.ir.errors import ModelError, UsageError
from gpuir.run.loading import load_text
from gpuir.run.spaces import latencies
from gpuir.targets.profile import load_profile, profile_names
from gpuir.targets.support import load_operators, reason, refusal

ENCODER = str(Path(__file__).parent.parent.parent / "tests" / "encoder.onnx")
PLAIN = 'graph @g { in %x: f32[4096] %y: f32[4096] = t.map("relu", [%x]) at "m:R" out %y }'


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What onnxruntime's dynamic quantisation makes of two linear layers."""
    onnx = pytest.importorskip("onnx")
    h, nodes, known = onnx.helper, [], []
    x = "x"
    for i in range(2):
        weight = np.ones((256, 256), np.int8)
        known += [onnx.numpy_helper.from_array(weight, f"w{i}")]
        known += [onnx.numpy_helper.from_array(np.zeros((), np.int8), f"z{i}")]
        nodes += [
            h.make_node("DynamicQuantizeLinear", [x], [f"q{i}", f"s{i}", f"a{i}"], name=f"dq{i}"),
            h.make_node("MatMulInteger", [f"q{i}", f"w{i}", f"a{i}", f"z{i}"], [f"m{i}"], f"mm{i}"),
            h.make_node("Cast", [f"m{i}"], [f"c{i}"], to=1, name=f"c{i}"),
            h.make_node("Mul", [f"c{i}", f"s{i}"], [f"y{i}"], name=f"mul{i}"),
        ]
        x = f"y{i}"
    ends = [h.make_tensor_value_info(n, 1, ["batch", 256]) for n in ("x", x)]
    graph = h.make_graph(nodes, "g", ends[:1], ends[1:], known)
    path = str(tmp_path_factory.mktemp("q") / "q.onnx")
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("stack", "origin", "takes"),
    [
        ("onnxruntime-cuda", "MatMulInteger@17 i8 i8 i8 i8", True),
        ("onnxruntime-cuda", "MatMulInteger@17 u8 i8 u8 i8", False),
        ("onnxruntime-cuda", "DynamicQuantizeLinear@17 f32", False),
        ("onnxruntime-cuda", "MatMul@17 bf16 bf16", True),
        ("onnxruntime-cuda", "MatMul@12 bf16 bf16", False),
        ("onnxruntime-cuda", "Where@17 bool f32 f32", True),
        ("onnxruntime-cuda", "Gather@17 bool i64", True),
        ("onnxruntime-cuda", "BitwiseAnd@18 i32 i32", False),
        ("onnxruntime-cuda", "GroupNormalization@21 f32 f32 f32", True),
        ("onnxruntime-cuda", "mine::Special@1 f32", True),
        ("onnxruntime-cuda", "ai.onnx.ml::TreeEnsembleClassifier@3 f32", False),
        ("tensorrt", "ai.onnx.ml::Scaler@1 f32", False),
        ("onnxruntime-cuda", "com.microsoft::GroupQueryAttention@1 f16 f16 f16", True),
        ("onnxruntime-cuda", "com.microsoft::GroupQueryAttention@1 f32 f32 f32", False),
        ("tensorrt", "MatMul@17 f32 f32", True),
        ("tensorrt", "MatMulInteger@17 i8 i8", False),
        ("tensorrt", "DequantizeLinear@17 i8 f32 i8", True),
        ("tensorrt", "DequantizeLinear@17 u8 f32 u8", False),
        ("tensorrt", "QuantizeLinear@17 f32 f32 u8", False),
        ("tensorrt", "com.microsoft::QLinearAdd@1 u8", False),
    ],
)
def test_operators_by_version_and_dtype(stack: str, origin: str, takes: bool):
    assert load_operators(stack).takes(origin) is takes


def test_nodes_say_what_they_were(quantized: str):
    g = gpuir.load(quantized, dims={"batch": 8})
    origins = dict(g.origins)
    assert origins["q.onnx:mm0"] == "MatMulInteger@17 u8 i8 u8 i8"
    assert load_text(gpuir.show(g)).origins == g.origins
    lowered = gpuir.lower(g)
    assert lowered.origins == g.origins, "passes keep them"


def test_a_node_without_a_kernel_runs_on_the_cpu(quantized: str):
    s = gpuir.analyze(quantized, "a100", dims={"batch": 64})
    hosted = {loc for x in s.kernels if x.cost.on_host for loc in x.locs}
    assert hosted == {f"q.onnx:{name}{i}" for name in ("dq", "mm") for i in (0, 1)}
    assert any("no kernel for DynamicQuantizeLinear of f32 (2 nodes)" in t for t in s.assumed)
    rough = next(x for x in s.coverage if x.status == "approximated")
    assert rough.nodes == 4 and dict(rough.what)["on the CPU"] == sum(
        x.cost.on_host for x in s.kernels
    )
    low, high = s.interval or (0.0, 0.0)
    assert low < 0.6 * s.latency_s and high > 2 * s.latency_s, "nothing of it is measured"
    products = [x.cost for x in s.kernels if x.kind == "gemm"]
    assert [c.fact("copies") for c in products] == [1, 1], "its result alone goes to the device"
    fallback = load_profile("ort").fallback
    assert fallback is not None
    assert products[0].term("compute") == pytest.approx(
        2 * 64 * 256**2 / fallback.flops_per_s, rel=0.01
    )
    device = gpuir.analyze(quantized, "a100", dims={"batch": 64}, profile="ideal")
    assert s.latency_s > 3 * device.latency_s


def test_of_what_the_cpu_runs_nothing_was_measured(quantized: str):
    done = CliRunner().invoke(main, ("analyze", quantized, "--target", "h100", "--dims", "batch=8"))
    fitted = done.stdout[done.stdout.index("fitted on") :]
    assert "no measurements of the CPU, whose rates are assumed" in " ".join(fitted.split())


def test_the_host_waits_for_what_it_runs_itself(quantized: str):
    g = gpuir.analyze(quantized, "a100", dims={"batch": 64}).graph
    launches = gpuir.analyze(g).timeline.launches
    assert [x.waits for x in launches] == [n.cost.on_host for n in g.nodes if n.cost.time_s]


def test_of_many_devices_each_waits_for_the_host_as_alone(quantized: str):
    g = gpuir.load(quantized, dims={"batch": 64})
    names = ["a100", "t4", "x86-64-v3"]
    for name, found in zip(names, latencies([g], names, "ort")[0], strict=True):
        alone = gpuir.analyze(g, name, profile="ort")
        assert (found.latency_s, found.device_s) == (alone.latency_s, alone.device_s)
        assert found.interval == alone.interval
        assert found.is_host_bound == alone.timeline.is_host_bound
        assert found.reserved_bytes == alone.memory.reserved_bytes


def test_text_keeps_what_runs_on_the_cpu(quantized: str, tmp_path: Path):
    file = tmp_path / "x.gir"
    args = ("opt", quantized, "--dims", "batch=64", "--pipeline", load_profile("ort").passes)
    assert CliRunner().invoke(main, (*args, "-o", str(file))).exit_code == 0
    again = gpuir.analyze(str(file), "a100")
    once = gpuir.analyze(quantized, "a100", dims={"batch": 64})
    assert again.latency_s == once.latency_s


def test_tensorrt_refuses_what_its_parser_does_not_know(quantized: str):
    with pytest.raises(ModelError, match="does not support DynamicQuantizeLinear of f32") as caught:
        gpuir.analyze(quantized, "a100", dims={"batch": 8}, profile="tensorrt").graph
    assert "q.onnx:dq0" in str(caught.value) and "--profile ort" in str(caught.value)


@pytest.mark.parametrize(
    ("profile", "target", "runs"),
    [
        *(
            ("tensorrt", t, t in ("t4", "h100-sxm"))
            for t in ("t4", "h100-sxm", "p4", "v100-sxm-16gb")
        ),
        *(("tensorrt", t, False) for t in ("mi300x", "x86-64-v4")),
        *(("compiled", t, True) for t in ("v100-sxm-16gb", "mi300x", "x86-64-v4")),
        *(("compiled", t, False) for t in ("p4", "p100")),
        ("cudagraph", "x86-64-v4", False),
        *(("eager", t, True) for t in ("p4", "mi300x", "x86-64-v4")),
        *(("ideal", t, True) for t in ("p4", "mi300x", "x86-64-v4")),
    ],
)
def test_which_devices_a_stack_runs_on(profile: str, target: str, runs: bool):
    g = gpuir.lower(load_text(PLAIN), profile=profile)
    error = refusal(g, gpuir.load_target(target))
    assert (error is None) is runs
    if error is not None:
        assert profile in profile_names() and "it needs NVIDIA sm_7" in reason(error)
        with pytest.raises(UsageError, match="does not run on this GPU"):
            gpuir.analyze(g, target).graph


def test_bf16_before_ampere():
    g = load_text(PLAIN.replace("f32", "bf16"))
    for profile in ("compiled", "tensorrt"):
        with pytest.raises(UsageError, match="does not run bf16"):
            gpuir.analyze(g, "t4", profile=profile).graph
        gpuir.analyze(g, "a100", profile=profile).graph
    said = "bf16: sm_75 has no units for this type"
    eager = gpuir.analyze(g, "t4", profile="eager").assumed
    assert any(text.startswith(said) for text in eager)
    assert not any(said in t for t in gpuir.analyze(g, "a100", profile="eager").assumed)


def test_comparisons_leave_out_what_does_not_run():
    args = ("analyze", ENCODER, "--dims", "batch=1,seq=16", "--profile", "tensorrt,ort")
    done = CliRunner().invoke(main, (*args, "--target", "p4,t4", "--format", "json"))
    assert done.exit_code == 0, done.output
    found = [
        (r["target"]["name"], r["profile"]["name"]) for r in json.loads(done.stdout)["reports"]
    ]
    assert found == [("p4", "ort"), ("t4", "tensorrt"), ("t4", "ort")]
    assert "not supported: tensorrt on p4" in done.stderr
    alone = CliRunner().invoke(main, (*args[:-1], "tensorrt", "--target", "p4"))
    assert alone.exit_code == 2 and "NVIDIA sm_75+" in alone.stderr


def test_sweeps_rank_no_pair_that_does_not_run():
    args = ("sweep", ENCODER, "--dims", "seq=16", "--batch", "1", "--profile", "tensorrt,ort")
    done = CliRunner().invoke(main, (*args, "--target", "p4,mi300x,t4", "--format", "json"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {(p["target"], p["profile"]) for p in report["points"]} == {
        *(("p4", "ort"), ("mi300x", "ort"), ("t4", "ort"), ("t4", "tensorrt"))
    }
    assert {(x["target"], x["profile"]) for x in report["unsupported"]} == {
        *(("p4", "tensorrt"), ("mi300x", "tensorrt"))
    }


def test_advice_does_not_rank_a_stack_that_refuses_the_model(quantized: str):
    args = ("advise", quantized, "--dims", "batch=64", "--target", "a100", "--only", "stack")
    done = CliRunner().invoke(main, (*args, "--json"))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    (trial,) = report["rest"]
    assert report["advice"] == [] and "does not support DynamicQuantizeLinear" in trial["refusal"]
