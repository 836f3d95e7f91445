"""Graphs in parts for a pipeline of ranks: microbatch by microbatch, the parts compute what the
whole graph does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import LLAMA
from hypothesis import given
from hypothesis import strategies as st
from strategies import arrays, graphs

import gpuir
from gpuir.interp import run, to_numpy_dtype
from gpuir.interp.ranks import gathered, run_ranks, scattered
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.phases import phase_of
from gpuir.ir.verify import verify
from gpuir.ops import tensor as t
from gpuir.passes.partition.partition import Partition, partition
from gpuir.simulate.microbatches import PartTimes, run_pipeline, task_orders

Arrays = dict[str, np.ndarray]
ENCODER = Path(__file__).parents[2] / "examples" / "encoder.onnx"
SMALL_ENCODER = Path(__file__).parents[1] / "small_encoder.onnx"  # of four layers
SMALL = LLAMA | {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}


def in_parts(g: Graph, parts: int, apart: bool = False) -> Partition:
    found = partition(g, parts, apart=apart)
    assert len(found.parts) == parts
    for part in found.parts:
        for graph in part.graphs:
            verify(graph)
            assert gpuir.parse(gpuir.show(graph)) == graph
    return found


def tasks(schedule: str, ranks: int, microbatches: int, chunks: int = 1):
    """(part, kind, microbatch) in the order in which ranks of a schedule start them."""
    orders = task_orders(schedule, ranks, microbatches, chunks)  # pyright: ignore
    found = run_pipeline(orders, [PartTimes(1, 1, 1)] * (ranks * chunks))
    starts = [
        (start, rank + ranks * task.chunk, task.kind, task.microbatch)
        for rank, order in enumerate(found.orders)
        for start, task in zip(found.starts[rank], order, strict=True)
    ]
    return [task for _, *task in sorted(starts, key=lambda x: x[0])]


def run_parts(
    made: Partition, order: Sequence[Any], microbatches: Sequence[Arrays], weights: Arrays
) -> tuple[list[Arrays], Arrays]:
    """Each part with memory of its own: what crosses between them is what they say they send.
    Of the last microbatch, where there is one, the graph runs that sums gradients over ranks. Gives
    what each microbatch's passes give, and what the gradients add up to and the updates."""
    order = list(order)
    ends = {p: (p, kind, m) for p, kind, m in order if kind in ("backward", "weights")}
    parts, last = made.parts, len(made.parts) - 1
    here: list[list[Arrays]] = [[dict(m) for _ in parts] for m in microbatches]
    buffers: list[Arrays] = [
        {
            v.name: np.zeros(v.type.shape, to_numpy_dtype(v.type.dtype))
            for g in part.graphs
            for v in g.params
            if g.role_of(v) == "gradient"
        }
        for part in parts
    ]
    found: list[Arrays] = [{} for _ in microbatches]

    def pass_of(g: Graph | None, p: int, m: int) -> None:
        if g is None:
            return
        known = {**weights, **buffers[p], **here[m][p]}
        made = run(g, {v.name: known[v.name] for v in (*g.inputs, *g.params)})
        taken = {o.name: v.name for o, v in zip(g.outputs, g.over, strict=False) if v}
        buffers[p].update({taken[k]: x for k, x in made.items() if taken.get(k) in buffers[p]})
        here[m][p] |= made
        found[m] |= made
        if g is parts[p].last:
            sums = {v.name for v in g.outputs if g.role_of(v) == "gradient"}
            buffers[p].update({name: made[name] for name in sums})

    for p, kind, m in order:
        part = parts[p]
        if part.last is not None and ends[p] == (p, kind, m):
            pass_of(part.last, p, m)
            if p and kind == "backward":
                here[m][p - 1] |= {v.name: here[m][p][v.name] for v in part.sends_back}
        elif kind == "forward":
            pass_of(part.forward, p, m)
            if p < last:
                here[m][p + 1] |= {v.name: here[m][p][v.name] for v in part.sends}
        elif kind == "backward":
            pass_of(part.backward, p, m)
            if p:
                here[m][p - 1] |= {v.name: here[m][p][v.name] for v in part.sends_back}
        elif kind == "weights":
            pass_of(part.weights, p, m)
    for shared in made.shared:
        name = shared.value.name
        total = sum(buffers[p][name] for p in shared.parts if name in buffers[p])
        for p in shared.parts:
            buffers[p][name] = np.asarray(total)
    done: Arrays = {name: x for own in buffers for name, x in own.items()}
    norms: list[Arrays] = [{} for _ in parts]
    for p, part in enumerate(parts):
        if part.norm is not None:
            known = {**weights, **buffers[p]}
            ends = (*part.norm.inputs, *part.norm.params)
            norms[p] = run(part.norm, {v.name: known[v.name] for v in ends})
            done |= norms[p]
    for total in made.norms:
        name = total.value.name
        norms = [{**own, name: sum(norms[p][name] for p in total.parts)} for own in norms]
    for p, part in enumerate(parts):
        if part.update is not None:
            known = {**weights, **buffers[p], **norms[p]}
            ends = (*part.update.inputs, *part.update.params)
            for name, x in run(part.update, {v.name: known[v.name] for v in ends}).items():
                if name in done and made.shared:
                    np.testing.assert_array_equal(done[name], x)  # copies stay the same
                done[name] = x
    return found, done


def close(found: np.ndarray, wanted: np.ndarray, tolerance: float, name: str) -> None:
    a, b = (np.nan_to_num(np.asarray(x, np.complex128)) for x in (found, wanted))
    assert a.shape == b.shape
    scale = 1e-3 + np.abs(b).max(initial=0)
    np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, err_msg=name)


def flops(graphs: Sequence[Graph]) -> int:
    return sum(n.op.flops() for g in graphs for n in g.nodes)


SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]


# ---- any graph ---------------------------------------------------------------------------------


@given(graphs(), st.integers(1, 4), st.sampled_from(SHAPES), st.sampled_from([0.0, 0.5]))
def test_any_graph_in_parts_trains_as_the_whole(g: Graph, parts: int, shape, clip: float):
    """In f64: outputs of each microbatch, gradients of inputs, sums of gradients, the update."""
    schedule, chunks = shape
    g = gpuir.parse(gpuir.show(g).replace("f32", "f64").replace("f16", "f64"))
    g = replace(g, outputs=g.outputs[:1], over=(), roles=())
    if not g.outputs[0].type.dtype.is_float or not g.nodes:
        return
    whole = gpuir.pipeline('autodiff{wrt="*"}').run(g)
    params = {v.name for v in g.params}
    grads = {f"{n}.grad" for n in params} & {v.name for v in whole.outputs}
    step = whole
    if grads:
        options = f"kind=sgd,lr=0.5,momentum=0.5,clip={clip}"
        step = gpuir.pipeline(f"optimizer{{{options}}}").run(whole)
    count = 2 * parts
    try:
        made = in_parts(step, parts * chunks, apart=schedule == "zero-bubble")
    except UsageError as error:
        assert "cannot be split" in str(error)
        return
    weights = {k: x for k, x in arrays(step).items() if k not in {v.name for v in g.inputs}}
    inputs = [{v.name: arrays(g, seed)[v.name] for v in g.inputs} for seed in range(count)]
    with np.errstate(all="ignore"):
        wanted = [run(whole, {**x, **{n: weights[n] for n in params}}) for x in inputs]
        order = tasks(schedule, parts, count, chunks)
        found, done = run_parts(made, order, inputs, weights)
        for one, all in zip(found, wanted, strict=True):
            for name in all.keys() - grads:
                close(one[name], all[name], 1e-9, name)
        totals = {name: sum(x[name] for x in wanted) for name in grads}
        factor = clipped(totals.values(), clip)
        for name, total in totals.items():
            w = name.removesuffix(".grad")
            buffer = 0.5 * weights[f"{w}.momentum_buffer"] + factor * total
            if all_finite(list(totals.values()) if clip else total):
                close(done[name], total, 1e-9, name)
                close(done[f"{w}.new"], weights[w] - 0.5 * buffer, 1e-9, name)
                close(done[f"{w}.momentum_buffer.new"], buffer, 1e-9, name)


def clipped(gradients: Iterable[Any], clip: float) -> float:
    """What torch's clip_grad_norm_ multiplies gradients by; 1 without."""
    norm = sum(float(np.square(np.asarray(x, np.float64)).sum()) for x in gradients) ** 0.5
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def all_finite(x) -> bool:
    some = x if isinstance(x, list) else [x]
    return all(bool(np.isfinite(np.asarray(each)).all()) for each in some)


@given(graphs(), st.integers(1, 4))
def test_work_is_in_one_part_and_weights_too(g: Graph, parts: int):
    """Every node but a free one is in one part; every weight is somewhere, and in one place where
    no two parts read it."""
    g = replace(g, roles=())
    try:
        made = in_parts(g, parts)
    except UsageError as error:
        assert "cannot be split" in str(error)
        return
    whole = {n.results[0].name: n for n in g.nodes}
    seen = Counter(n.results[0].name for part in made.parts for n in part.forward.nodes)
    for name, count in seen.items():
        assert count == 1 or not any(v in g.inputs for v in whole[name].op.operands)
    again = sum((c - 1) * whole[name].op.flops() for name, c in seen.items())
    lost = sum(whole[name].op.flops() for name in whole.keys() - seen.keys())
    assert flops([part.forward for part in made.parts]) == flops([g]) + again - lost
    params = Counter(v.name for part in made.parts for v in part.forward.params)
    unread = {v.name for n in g.nodes for v in n.op.operands} - params.keys()
    assert {v.name for v in g.params} - params.keys() <= unread


# ---- models ------------------------------------------------------------------------------------


def encoder(batch: int) -> Graph:
    """The training step of some of its weights."""
    some = "*bias encoder.layer.*.query.weight embeddings.position.weight"
    g = gpuir.load(SMALL_ENCODER, dims={"batch": batch, "seq": 4})
    steps = f"autodiff{{wrt={json.dumps(some)}}},optimizer{{kind=adamw,fused=true}}"
    return gpuir.pipeline(f"canonicalize,recognize,{steps}").run(g)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), SHAPES[2:])
def test_an_encoder_learns_from_microbatches_as_from_their_batch(schedule: str, chunks: int):
    """Its loss is a sum: so are the gradients of four microbatches, of one sequence each."""
    whole, part = encoder(4), encoder(1)
    made = in_parts(part, 2 * chunks, apart=schedule == "zero-bubble")
    values = {n: x * 0.05 if x.dtype.kind == "f" else x for n, x in arrays(whole).items()}
    for v in whole.params:
        if v.name.endswith("exp_avg_sq"):
            values[v.name] = np.abs(values[v.name])
    values["input_ids"] = np.arange(16).reshape(4, 4)
    values["attention_mask"] = np.array([[1, 1, 1, 1]] * 3 + [[1, 1, 0, 0]])
    wanted = run(whole, values)
    inputs = [{v.name: values[v.name][i : i + 1] for v in whole.inputs} for i in range(4)]
    weights = {v.name: values[v.name] for v in whole.params}
    found, done = run_parts(made, tasks(schedule, 2, 4, chunks), inputs, weights)
    outputs = np.concatenate([x["last_hidden_state"] for x in found])
    close(outputs, wanted["last_hidden_state"], 1e-4, "last_hidden_state")
    for name in wanted.keys() - {"last_hidden_state"}:
        close(done[name], wanted[name], 1e-4, name)


def test_an_encoder_s_parts_hold_its_layers_and_send_one_tensor():
    options = {"dims": {"batch": 2, "seq": 4}, "train": True, "optimizer": "adamw"}
    g = gpuir.load(ENCODER, **options)
    made = in_parts(g, 4)
    assert [len(p.sends) for p in made.parts] == [1, 1, 1, 0]
    assert [len(p.sends_back) for p in made.parts] == [0, 1, 1, 1]
    assert all(v.type.shape == (2, 4, 768) for p in made.parts for v in (*p.sends, *p.sends_back))
    assert not made.shared and max(made.lengths) < 1.1 * sum(made.lengths) / 4
    steps = [x for p in made.parts for x in p.graphs]
    adds = sum(v.type.size for v in g.outputs if v.name.endswith(".grad"))  # to the buffers
    again = 3 * sum(n.op.flops() for n in g.nodes[:5])  # the mask, in each part
    assert flops(steps) == flops([g]) + adds + again
    owners = Counter(v.name for p in made.parts for v in p.update.params)
    assert set(owners.values()) == {1}
    assert sum(v.type.size for v in g.params if g.role_of(v) == "weight") == sum(
        v.type.size for p in made.parts for v in p.forward.params
    )


def test_what_is_computed_again_together_stays_together():
    """Layers that backward runs again are not cut: else their second halves would need, in the
    backward pass, what the part before has to compute again."""
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 64})
    g = gpuir.pipeline("canonicalize,recognize,autodiff{every=1}").run(g)
    made = in_parts(g, 5)
    assert [len(p.sends) for p in made.parts] == [1, 1, 1, 1, 0]
    assert [len(p.sends_back) for p in made.parts] == [0, 1, 1, 1, 1]
    for part in made.parts:
        assert len(part.saved) <= 4  # inputs of layers, and the mask
        assert {v.type.shape for v in part.saved} <= {(2, 64, 768), (2, 1, 1, 64), (2, 64)}
        assert all("attention" not in v.name for v in part.sends)
    with pytest.raises(UsageError, match="checkpointed segments"):
        partition(g, 40)


def test_gradients_of_weights_are_as_much_work_as_the_forward_products():
    """Qi et al., arXiv 2401.10241, table 1: of each layer's products by weights, one in F, B and
    W; attention's products are twice in B."""
    options = {"dims": {"batch": 2, "seq": 64}, "train": True}
    g = gpuir.load(ENCODER, **options)
    whole, made = in_parts(g, 3), in_parts(g, 3, apart=True)

    def products(graph: Graph | None) -> int:
        assert graph is not None
        return sum(n.op.flops() for n in graph.nodes if n.op.contraction)

    for before, part in zip(whole.parts, made.parts, strict=True):
        assert part.backward is not None and part.weights is not None
        weights = {v for v in part.forward.params if v.type.rank == 2}
        by_weights = sum(
            n.op.flops()
            for n in part.forward.nodes
            if n.op.contraction and weights.intersection(n.op.operands)
        )
        scores = products(part.forward) - by_weights
        assert products(part.weights) == by_weights
        assert products(part.backward) == by_weights + 2 * scores
        assert flops([part.backward, part.weights]) == flops([before.backward])  # pyright: ignore
        assert {v.name for v in part.kept} <= {v.name for v in part.weights.inputs}


def llama(tmp_path: Path, batch: int, tied: bool = False, **options: Any) -> Graph:
    pytest.importorskip("transformers", reason="pip install 'gpuir[hf]'")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"tie_word_embeddings": tied}))
    options = {"dtype": "f32", "dims": {"batch": batch, "seq": 8}, "train": True} | options
    return gpuir.load(f"hf:{path}", **options)


def trained_as_whole(part: Graph, made: Partition) -> None:
    """Four microbatches through the parts, against the whole graph that adds up gradients."""
    pipeline = "optimizer{kind=adamw,fused=true}"
    base = replace(part, name="whole")
    step = gpuir.pipeline(f"accumulate,{pipeline}").run(base)
    values = {n: 0.2 * np.abs(x) if x.dtype.kind == "f" else x for n, x in arrays(step).items()}
    rng = np.random.default_rng(1)
    for v in part.inputs:
        values.pop(v.name)
    inputs = [{v.name: rng.integers(0, 96, v.type.shape) for v in part.inputs} for _ in range(4)]
    values |= {v.name: 0 * values[v.name] for v in step.params if step.role_of(v) == "gradient"}
    wanted: list[Arrays] = []
    for x in inputs:
        wanted.append(run(step, {**values, **x}))
        over = {o.name: v.name for o, v in zip(step.outputs, step.over, strict=True) if v}
        values |= {over[n]: a for n, a in wanted[-1].items() if over.get(n, "").endswith(".grad")}
    weights = {v.name: values[v.name] for v in step.params if step.role_of(v) != "gradient"}
    order = tasks("1f1b", len(made.parts), 4)
    found, done = run_parts(made, order, inputs, weights)
    each = {v.name for v in part.outputs if part.role_of(v) != "gradient"}
    for one, whole in zip(found, wanted, strict=True):
        for name in each:
            close(one[name], whole[name], 1e-4, name)
    updated = {name for name in wanted[-1].keys() - each if not name.endswith(".grad.new")}
    assert len(updated) >= 3 * len(made.parts)
    for name in updated:
        close(done[name], wanted[-1][name], 2e-4, name)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("derived", ["gpuir", "torch"])
def test_a_decoder_in_parts(tmp_path: Path, tied: bool, derived: str):
    """Embedding and head on the first and the last part, one table or two, whoever derived the
    backward pass."""
    g = llama(tmp_path, 2, tied, autodiff=derived)
    step = gpuir.pipeline("optimizer{kind=adamw,fused=true}").run(g)
    made = in_parts(step, 3)
    assert [len(p.sends) for p in made.parts] == [1, 1, 0]
    assert [x.parts for x in made.shared] == [(0, 2)] * tied
    assert sum(v.type.size for p in made.parts for v in p.sends_back) <= 2 * 3 * 2 * 8 * 64
    trained_as_whole(g, made)


TWO = """graph @two {
  in %x: f32[4, 6]
  param %w: f32[6, 8]
  param %v: f32[8, 6]
  param %u: f32[6, 8]
  %a: f32[4, 8] = t.matmul(%x, %w) at "m:a"
  %h: f32[4, 8] = t.map("relu", [%a]) at "m:h"
  %b: f32[4, 6] = t.matmul(%h, %v) at "m:b"
  %c: f32[4, 8] = t.matmul(%b, %u) at "m:c"
  %s: f32[4, 8] = t.map("tanh", [%c]) at "m:s"
  %t: f32[8, 6] = t.transpose(%w, [1, 0]) at "m:t"
  %y: f32[4, 6] = t.matmul(%s, %t) at "m:y"
  out %y
}"""


def sums_over(g: Graph | None) -> list[str]:
    """The groups of a graph's collectives."""
    return [n.op.group for n in g.nodes if isinstance(n.op, t.Collective)] if g else []


def test_a_graph_without_sums_has_no_last_pass():
    whole = gpuir.pipeline("autodiff,optimizer{kind=sgd},shard{ranks=2}").run(gpuir.parse(TWO))
    assert all(part.last is None for part in in_parts(whole, 2).parts)
    assert all(part.last is None for part in in_parts(gpuir.parse(TWO), 2).parts)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("tensor", ["", "shard{ranks=2},"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(
    ("schedule", "count"), [("1f1b", 2), ("zero-bubble", 2), ("zero-bubble", 1)]
)
def test_parts_of_a_graph_that_is_sharded(
    tensor: str, zero: int, clip: float, schedule: str, count: int
):
    """Gradients are summed over ranks once a step, with the last microbatch, before the sum over
    two parts that have the same weight, which counts once in a norm. In one part by itself that
    weight's gradient is no later than what goes back."""
    steps = f"autodiff,optimizer{{kind=sgd,lr=0.5,momentum=0.5,clip={clip}}}"
    whole = gpuir.pipeline(steps).run(gpuir.parse(TWO))
    made = gpuir.pipeline(f"{tensor}shard{{ranks=2,by=data,zero={zero}}}").run(whole)
    parts = in_parts(made, count, schedule == "zero-bubble")
    assert [x.parts for x in parts.shared] == [(0, 1)] * (count > 1)
    for part in parts.parts:
        for g in (part.backward, part.weights):
            assert "dp" not in sums_over(g) or zero == 3
        assert "dp" in sums_over(part.last) and part.update is not None
        assert not any(
            n.op.name == "t.collective" and phase_of(n) == "backward"
            for g in (part.norm, part.update)
            for n in (g.nodes if g else ())
        )
    assert [x.parts for x in parts.norms] == [tuple(range(count))] * bool(clip)
    values = arrays(whole)
    inputs = [{"x": arrays(whole, seed)["x"]} for seed in range(3)]
    weights = {n: x for n, x in values.items() if n != "x"}
    order = tasks(schedule, count, 3)
    given = [scattered(made, {**values, **x}) for x in inputs]

    def work(own: Arrays) -> Arrays:
        rank = int(own["rank"])
        mine = [{"x": ranks[rank]["x"]} for ranks in given]
        held = {n: x for n, x in given[0][rank].items() if n != "x"}
        return run_parts(parts, order, mine, held)[1]

    ranks = [{"rank": np.array(r)} for r in range(made.ranks)]
    outputs = [v.name for v in made.outputs if v.name != "y"]
    wanted: Arrays = {}
    grads = [run(whole, {**values, **x}) for x in inputs]
    for n in weights:
        if f"{n}.grad" in grads[0]:
            wanted[f"{n}.grad"] = sum(x[f"{n}.grad"] for x in grads)  # pyright: ignore
    factor = clipped(list(wanted.values()), clip)
    for n in weights:
        if f"{n}.grad" in grads[0]:
            buffer = 0.5 * values[f"{n}.momentum_buffer"] + factor * wanted[f"{n}.grad"]
            wanted[f"{n}.momentum_buffer.new"] = buffer
            wanted[f"{n}.new"] = values[n] - 0.5 * buffer
    found = run_ranks(work, ranks)
    ends = replace(made, outputs=tuple(v for v in made.outputs if v.name in outputs), over=())
    for own in gathered(ends, found):
        for name, x in wanted.items():
            close(own[name], x, 1e-4, name)


def test_a_loss_that_is_a_mean_takes_its_share_of_microbatches(tmp_path: Path):
    """`loss_scale` of one through their number, and the gradients are those of the batch."""
    text = """graph @g {
      in %x: f32[BATCH, 6]
      param %w: f32[6, 6]
      param %v: f32[6, 5]
      %a: f32[BATCH, 6] = t.matmul(%x, %w) at "m:a"
      %h: f32[BATCH, 6] = t.map("relu", [%a]) at "m:h"
      %y: f32[BATCH, 5] = t.matmul(%h, %v) at "m:y"
      %loss: f32[] = t.reduce("mean", %y, [0, 1]) at "m:loss"
      out %loss
    }"""
    whole = gpuir.pipeline("autodiff").run(gpuir.parse(text.replace("BATCH", "8")))
    part = gpuir.pipeline("autodiff{loss_scale=0.25}").run(gpuir.parse(text.replace("BATCH", "2")))
    values = arrays(whole)
    wanted = run(whole, values)
    inputs = [{"x": values["x"][2 * i : 2 * i + 2]} for i in range(4)]
    made = in_parts(part, 2)
    _, done = run_parts(made, tasks("1f1b", 2, 4), inputs, values)
    for name in ("w.grad", "v.grad"):
        close(done[name], wanted[name], 1e-5, name)
