"""RNN, GRU and LSTM in the variants that onnx's node tests leave out, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_models import Array, agrees, const, info, info_of, loaded, model, node, results

import gpuir
from gpuir.cost.reading import work_of
from gpuir.frontends.onnx.load import load
from gpuir.interp import run
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STEPS, BATCH, INPUTS, HIDDEN = 4, 3, 2, 5


def cell(
    op: str, steps: int = STEPS, state: bool = False, lens: bool = False, peepholes: bool = False,
    bias: bool = True, outputs: str = "YHC", **attrs: Any
) -> tuple[Any, dict[str, Array]]:  # fmt: skip
    """A model of one node, its weights initializers, and numbers for its inputs."""
    draw = np.random.default_rng(3)

    def floats(*shape: int) -> Array:
        return draw.standard_normal(shape).astype(np.float32)

    ways = 2 if attrs.get("direction") == "bidirectional" else 1
    rows = GATES[op] * HIDDEN
    first = (lambda a, b: (b, a)) if attrs.get("layout") else (lambda a, b: (a, b))
    inputs = {"X": floats(*first(steps, BATCH), INPUTS)}
    if lens:
        inputs["lens"] = np.asarray([steps, 1, 2], np.int32)
    if state:
        inputs["h"] = floats(*first(ways, BATCH), HIDDEN)
        inputs["c"] = floats(*first(ways, BATCH), HIDDEN)
    weights = {"W": floats(ways, rows, INPUTS), "R": floats(ways, rows, HIDDEN)}
    weights["B"] = floats(ways, 2 * rows)
    weights["P"] = floats(ways, 3 * HIDDEN)
    names = ["X", "W", "R", "B" if bias else "", "lens" if lens else "", "h" if state else ""]
    if op == "LSTM":
        names += ["c" if state else "", "P" if peepholes else ""]
    else:
        inputs.pop("c", None)
    ends = [name if name in outputs else "" for name in ("Y", "H", "C")][: 2 + (op == "LSTM")]
    made = model(
        [node(op, names, ends, name=op, hidden_size=HIDDEN, **attrs)],
        [info_of(k, v) for k, v in inputs.items()],
        [info(k) for k in ends if k],
        [const(k, v) for k, v in weights.items() if k in names],
        opset=14,
    )
    return made, inputs


def evaluate(made: Any, inputs: dict[str, Array]) -> list[Array]:
    return list(results(loaded(made), **inputs).values())


WAYS = ("forward", "reverse", "bidirectional")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((op, {"direction": way, "state": True}) for op in GATES for way in WAYS),
    *((op, {"direction": way, "lens": True}) for op in GATES for way in WAYS),
    *((op, {"direction": way, "steps": 1, "state": True}) for op in GATES for way in WAYS),
    *((op, {"outputs": kept, "bias": False}) for op in GATES for kept in ("Y", "H")),
    *((op, {"clip": 0.4}) for op in GATES),
    *(("GRU", {"linear_before_reset": 1, "bias": b, "direction": WAYS[2]}) for b in (True, False)),
    ("LSTM", {"peepholes": True, "direction": "bidirectional"}),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"activations": ["HardSigmoid", "Softsign", "ScaledTanh"],
              "activation_alpha": [0.3, 0.7], "activation_beta": [0.4, 0.9]}),
    ("GRU", {"activations": ["Affine", "LeakyRelu"], "activation_alpha": [0.3, 0.2],
             "activation_beta": [0.1]}),
    ("RNN", {"activations": ["ThresholdedRelu"], "activation_alpha": [0.2]}),
    ("RNN", {"activations": ["Elu"], "activation_alpha": [0.2]}),
    ("RNN", {"activations": ["Softplus"]}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("op, how", VARIANTS, ids=str)
def test_as_onnxruntime(op: str, how: dict[str, Any]):
    agrees(*cell(op, **how), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", WAYS)
def test_batch_first_is_time_first_transposed(op: str, direction: str):
    """onnxruntime has no layout 1."""
    how = {"direction": direction, "state": True, "lens": True}
    made, inputs = cell(op, **how)
    transposed = {k: v if k == "lens" else v.swapaxes(0, 1) for k, v in inputs.items()}
    y, *states = evaluate(cell(op, layout=1, **how)[0], transposed)
    expected_y, *expected = evaluate(made, inputs)
    np.testing.assert_allclose(y.transpose(1, 2, 0, 3), expected_y, rtol=1e-5, atol=1e-6)
    for state, wanted in zip(states, expected, strict=True):
        np.testing.assert_allclose(state.swapaxes(0, 1), wanted, rtol=1e-5, atol=1e-6)


def test_inputs_of_all_steps_are_one_product_and_the_loop_holds_the_other():
    loaded = load(cell("LSTM", direction="bidirectional")[0])
    loops = [n.op for n in loaded.graph.nodes if isinstance(n.op, t.Loop)]
    outside = [n.op for n in loaded.graph.nodes if isinstance(n.op, t.Matmul)]
    assert [loop.trips for loop in loops] == [STEPS, STEPS]
    assert [m.types()[0].shape for m in outside] == [(STEPS, BATCH, 4 * HIDDEN)] * 2
    for loop in loops:
        (inside,) = (n.op for n in loop.body.nodes if isinstance(n.op, t.Matmul))
        assert inside.types()[0].shape == (BATCH, 4 * HIDDEN)


def test_one_step_needs_no_loop():
    loaded = load(cell("GRU", steps=1, state=True)[0])
    assert not any(isinstance(n.op, t.Loop) for n in loaded.graph.nodes)


def test_lengths_that_reach_the_end_are_no_lengths():
    made, _ = cell("GRU", lens=True)
    masked = load(made).graph.walk()
    full = load(made, values={"lens": [STEPS] * BATCH}).graph.walk()
    assert [sum(getattr(n.op, "fn", "") == "where" for n in g) for g in (masked, full)] == [2, 0]


LAUNCHES = [
    ("RNN", {}, ["gemm"]),
    ("LSTM", {}, ["gemm", "map"]),
    ("LSTM", {"peepholes": True, "direction": "reverse"}, ["gemm", "map"]),
    ("GRU", {"linear_before_reset": 1}, ["gemm", "map"]),
    ("GRU", {}, ["gemm", "map", "gemm", "map"]),
]


@pytest.mark.parametrize("op, how, wanted", LAUNCHES, ids=str)
def test_a_step_launches_its_products_and_one_pointwise_kernel_behind_each(
    op: str, how: dict[str, Any], wanted: list[str]
):
    """What a step takes of the inputs' product, and gates of its own, are read in place."""
    lowered = gpuir.lower(load(cell(op, **how)[0]).graph, profile="ideal")
    (loop,) = (n.op for n in lowered.nodes if isinstance(n.op, k.Loop))
    kernels = [n.op for n in loop.body.nodes if not isinstance(n.op, k.View)]
    assert [op.name.removeprefix("k.") for op in kernels] == wanted
    assert all(op.between is not None for op in kernels if isinstance(op, k.Gemm))


def test_the_pointwise_kernel_of_an_lstm_reads_four_gates_and_its_memory():
    """And writes the new memory and the hidden state: seven times BATCH x HIDDEN cells in f32."""
    lowered = gpuir.lower(load(cell("LSTM")[0]).graph, profile="ideal")
    (step,) = (n.op for n in lowered.walk() if isinstance(n.op, k.Map) and len(n.results) == 2)
    assert work_of(step).nbytes == 7 * BATCH * HIDDEN * 4


def test_lowered_cells_mean_the_same():
    for op, how in (("LSTM", {"direction": "bidirectional"}), ("GRU", {"lens": True})):
        made, inputs = cell(op, **how)
        model = load(made)
        weights = {p.name: model.weights[p.name] for p in model.graph.params}
        before, after = (
            run(g, inputs | weights)
            for g in (model.graph, gpuir.lower(model.graph, profile="ideal"))
        )
        for name, array in before.items():
            np.testing.assert_allclose(after[name], array, rtol=1e-5, atol=1e-6)
