"""Graphs cut over ranks: together, the ranks compute what the whole graph does."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import LLAMA
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import cells, is_the_same, sharded
from strategies import arrays, graphs

import gpuir
from gpuir.interp import run
from gpuir.interp.ranks import run_ranks, scattered
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.verify import verify
from gpuir.ops import tensor as t
from gpuir.passes.shard import words as vocabulary
from gpuir.passes.shard.shard import ShardPass

ENCODER = Path(__file__).parents[1] / "small_encoder.onnx"  # of four layers
SMALL = LLAMA | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
PIPELINES = (
    "shard{ranks=2}",
    "shard{ranks=2,by=data}",
    "shard{ranks=3,by=data}",
    "shard{ranks=2},shard{ranks=2,by=data}",
    "shard{ranks=2,sequence=true},shard{ranks=2,by=data}",
    "shard{ranks=2,by=context}",
    "shard{ranks=2,by=context},shard{ranks=2,by=data}",
)
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


def collectives(g: Graph) -> Counter[str]:
    return Counter(n.op.fn for n in g.walk() if n.op.name == "t.collective")  # pyright: ignore


def flops(g: Graph) -> int:
    return sum(n.op.flops() for n in g.walk())


def attention_flops(g: Graph) -> int:
    return sum(n.op.flops() for n in g.nodes if "attention" in n.op.name)


def decoder(config: dict[str, Any] = SMALL, **options: Any) -> Graph:
    """A small decoder of Hugging Face, as its configuration says."""
    pytest.importorskip("transformers", reason="pip install 'gpuir[hf]'")
    return _decoder(json.dumps(config), json.dumps(options))


@cache
def _decoder(config: str, options: str) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config)
        g = gpuir.load(f"hf:{path}", dtype="f32", **json.loads(options))
    return gpuir.pipeline("canonicalize,recognize").run(g)


@given(graphs(), st.sampled_from(PIPELINES))
def test_any_graph_on_ranks_gives_the_same(g: Graph, pipeline: str):
    try:
        made = sharded(g, pipeline)
    except UsageError as error:
        assert any(words in str(error) for words in ("split", "no input has"))
        return
    is_the_same(g, made, 2e-2 if any(v.type.dtype.bits == 16 for v in g.outputs) else 2e-3)


KINDS = (
    {"by": "tensor"},
    {"by": "tensor", "sequence": True},
    {"by": "data"},
    {"by": "data", "zero": 3},
    {"by": "context", "attention": "heads"},
    {"by": "context", "attention": "keys"},
    {"by": "expert"},
)


def main_node(made: Graph, v: Value, op: Op) -> Node | None:
    """The node of a rank that does an op's work: an op of its kind that gives the value, or a term,
    or a part of it; None where ranks exchange what they have inside of it."""
    names = (v.name, *(f"{v.name}.{kind}" for kind in ("sum", "part", "whole")))
    makers = {r.name: n for n in made.nodes for r in n.results}
    for node in (makers[name] for name in names if name in makers):
        inner = made.producers().get(node.op.operands[0]) if node.op.operands else None
        for found in (node, inner):  # behind a mean is its rank's share of it
            if found is not None and type(found.op) is type(op):
                return found
    return None


def is_conserved(g: Graph, how: dict[str, Any], ranks: int) -> None:
    """All ranks together do each op once, but for those that the plan lists as repeated, and what
    is added moves cells and masks them; they have each cell of each weight once, or it is whole."""
    shard = ShardPass(ranks, **how)
    try:
        repeated = shard.plan(g).repeated()
    except UsageError:
        return
    made = shard.run(g)
    mains: list[Node] = []
    for node in g.nodes:
        main = main_node(made, node.results[0], node.op) if node.results else None
        if main is None or node.op.control:
            continue
        mains.append(main)
        times = 1 if node in repeated else ranks
        done = times * main.op.flops()
        if isinstance(main.op, t.Experts) and main.op.inter < node.op.inter:
            # each rank of parts of experts adds up what they give, in its full width
            done -= (times - 1) * 2 * main.op.which.type.size * main.op.down.type.shape[1]
        whole = isinstance(node.op, t.Attention | t.AttentionGradient | t.Experts)
        loose = 0.1 if whole and times > 1 else 0.0  # a rank's share is rounded
        assert done == pytest.approx(node.op.flops(), rel=loose), node
    added = [n.op for n in made.nodes if n not in mains]
    assert not any(isinstance(op, t.Contraction) for op in added)
    for v in made.params:
        whole = next(x for x in g.params if x.name == v.name)
        assert v.type.size * (ranks if made.cuts_of(v) else 1) == whole.type.size


@given(graphs(), st.sampled_from(KINDS), st.integers(2, 4))
def test_work_and_weights_are_conserved_over_ranks(g: Graph, how: dict[str, Any], ranks: int):
    is_conserved(g, how, ranks)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_work_of_experts_and_attention_is_conserved(how: dict[str, Any], ranks: int):
    is_conserved(mixture(), how, ranks)
    is_conserved(meeting(groups=4), how, ranks)


def test_an_encoder_has_two_sums_a_layer():
    """Megatron-LM's pairs of products (Shoeybi et al., 2019, section 3), found by themselves; and
    each rank does its share of the arithmetic."""
    g = gpuir.pipeline("canonicalize").run(gpuir.load(ENCODER, dims={"batch": 4, "seq": 8}))
    for pipeline in ("canonicalize", "recognize"):
        g = gpuir.pipeline(pipeline).run(g)
        made = sharded(g, "shard{ranks=2}")
        assert collectives(made) == {"all_reduce": 9}  # and one for the words
        assert flops(g) <= 2 * flops(made) < 1.02 * flops(g)
        is_the_same(g, made)


def test_sequences_in_parts_send_as_much():
    """A sum of two layers' products comes in parts, and is gathered before the next: as many bytes
    as an all-reduce (Korthikanti et al., 2022, section 4.2.2)."""
    g = gpuir.load(ENCODER, dims={"batch": 4, "seq": 8})
    g = gpuir.pipeline("canonicalize,recognize").run(g)
    made = sharded(g, "shard{ranks=2,sequence=true}")
    assert collectives(made) == {"reduce_scatter": 8, "all_gather": 8, "all_reduce": 1}
    is_the_same(g, made)


def test_a_batch_in_parts_needs_nothing_of_other_ranks():
    g = gpuir.load(ENCODER, dims={"batch": 4, "seq": 8})
    made = sharded(g, "shard{ranks=4,by=data}")
    assert not collectives(made) and 4 * flops(made) == flops(g) and cells(made) == cells(g)
    is_the_same(g, made)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_decoder_and_its_cache(phase: str):
    past: dict[str, Any] = {"past": 16} if phase == "decode" else {}
    dims = {"batch": 4} if past else {"batch": 4, "seq": 8}
    g = decoder(dims=dims, phase=phase, **past)
    made = sharded(g, "shard{ranks=2}")
    assert collectives(made) == {"all_reduce": 5}
    caches = [v for v in made.inputs if made.role_of(v) == "cache"]
    assert caches and all(made.cuts_of(v)[0].axis == 1 for v in caches)
    is_the_same(g, made)
    is_the_same(g, sharded(g, "shard{ranks=2},shard{ranks=2,by=data}"))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_training_step(zero: int):
    """Gradients are added up once; states, gradients and weights are in parts as ZeRO says."""
    g = decoder(dims={"batch": 4, "seq": 8}, train=True, optimizer="adamw")
    data = f"shard{{ranks=4,by=data,zero={zero}}}"
    made = sharded(g, data)
    weights = sum(1 for name, role in g.roles if role == "gradient")
    counts = collectives(made)
    assert counts["reduce_scatter"] == (weights if zero >= 2 else 0)
    assert counts["all_reduce"] == (2 if zero >= 2 else weights + 2)  # the loss's sum and count
    parts = cells(made) / cells(g)
    assert parts == pytest.approx((1, 1 / 2, 1 / 2, 1 / 4)[zero], abs=0.01)
    is_the_same(g, made)
    both = sharded(g, f"shard{{ranks=2}},shard{{ranks=2,by=data,zero={zero}}}")
    is_the_same(g, both)


CLIPPED = """graph @clipped {
  in %x: f32[4, 6]
  param %w: f32[6, 8]
  param %c: f32[8]
  param %v: f32[8, 6]
  param %n: f32[6]
  %a: f32[4, 8] = t.matmul(%x, %w) at "m:a"
  %d: f32[4, 8] = t.map("add", [%a, %c]) at "m:d"
  %h: f32[4, 8] = t.map("tanh", [%d]) at "m:h"
  %b: f32[4, 6] = t.matmul(%h, %v) at "m:b"
  %y: f32[4, 6] = t.map("mul", [%b, %n]) at "m:y"
  out %y
}"""


@pytest.mark.parametrize("clip", [0.25, 1e4])
@pytest.mark.parametrize(
    ("how", "groups"),
    [
        ("shard{ranks=2}", ["tp"]),
        ("shard{ranks=2,by=data}", []),
        ("shard{ranks=2,by=data,zero=1}", []),
        ("shard{ranks=2,by=data,zero=2}", ["dp"]),
        ("shard{ranks=2,by=data,zero=3}", ["dp"]),
        ("shard{ranks=2},shard{ranks=2,by=data,zero=3}", ["tp+dp"]),
        ("shard{ranks=2},shard{ranks=2,by=data}", ["tp"]),
    ],
)
def test_ranks_add_up_what_they_have_of_a_norm(how: str, groups: list[str], clip: float):
    """One number, over the ranks that have parts; what all of them have whole counts once."""
    step = f"autodiff,optimizer{{kind=adamw,lr=0.5,clip={clip}}}"
    g = gpuir.pipeline(step).run(gpuir.parse(CLIPPED))
    values = {n: np.abs(x) for n, x in arrays(g).items()}
    plain = run(gpuir.parse(gpuir.show(g).replace(f"imm=[{clip}]", "imm=[1e9]")), values)
    changed = np.abs(plain["w.exp_avg.new"] - run(g, values)["w.exp_avg.new"]).max()
    assert (changed > 1e-3) == (clip < 1)
    made = sharded(g, how)
    sums = [n.op for n in made.nodes if n.op.name == "t.collective" and phase_of(n) == "optimizer"]
    numbers = [op for op in sums if isinstance(op, t.Collective) and op.fn == "all_reduce"]
    assert [(op.group, op.x.type.size) for op in numbers] == [(name, 1) for name in groups]
    is_the_same(g, made, 1e-4, values)


def test_experts_of_all_ranks_count_in_a_norm():
    text = gpuir.show(mixture("plain", False)).replace("%dup", "%up.grad")
    text = text.replace("%ddown", "%down.grad").replace(
        "  out ", "  role gradient %up.grad, %down.grad\n  out "
    )
    g = gpuir.pipeline("optimizer{kind=sgd,lr=0.5,clip=0.1}").run(gpuir.parse(text))
    made = sharded(g, "shard{ranks=2,by=expert}")
    (total,) = [n.op for n in made.nodes if n.op.operands and n.op.name == "t.collective"
                and phase_of(n) == "optimizer"]  # fmt: skip
    assert isinstance(total, t.Collective) and (total.group, total.x.type.size) == ("ep", 1)
    values = arrays(g) | {"which": np.arange(16).reshape(8, 2) % 4}
    is_the_same(g, made, values=values)


def words(rows: int = 8) -> Graph:
    """A lookup, a product with all words and the loss of those that were meant."""
    return gpuir.parse(f"""graph @g {{
      in %words: i64[4]
      in %labels: i64[4, 1]
      param %table: f32[{rows}, 6]
      %x: f32[4, 6] = t.gather(%table, %words) at "m:x"
      %t: f32[6, {rows}] = t.transpose(%table, [1, 0]) at "m:t"
      %scores: f32[4, {rows}] = t.matmul(%x, %t) at "m:scores"
      %log: f32[4, {rows}] = t.softmax(%scores, 1, log=true) at "m:log"
      %of: f32[4, 1] = t.gather_elements(%log, %labels, 1) at "m:of"
      %loss: f32[] = t.reduce("mean", %of, [0, 1]) at "m:loss"
      out %loss
    }}""")


def test_a_vocabulary_is_cut():
    """Words below 0 count from the last one, as on one device."""
    g = words()
    made = sharded(g, "shard{ranks=4}")
    assert cells(made) == cells(g) / 4
    assert collectives(made) == {"all_reduce": 4}  # a word's row, the largest, the sum, the label's
    values = arrays(g) | {
        "words": np.array([0, 7, -1, 3]),
        "labels": np.array([[5], [-8], [2], [7]]),
    }
    wanted = run(g, values)["loss"]
    for found in run_ranks(lambda own: run(made, own), scattered(made, values)):
        np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)
    assert cells(sharded(words(6), "shard{ranks=2}")) == cells(words(6)) / 2


def test_a_vocabulary_that_does_not_divide_is_padded():
    """To a multiple of `pad` words a rank; the model with as many words gives the same numbers, and
    the scores of the words that there were are those of the model as it is."""
    g = gpuir.pipeline("autodiff,optimizer{kind=adamw}").run(words(22))
    larger = vocabulary.padded(g, 22, 24)
    assert larger is not None
    verify(larger)
    made = sharded(g, "shard{ranks=4,pad=3}")
    assert (
        made.assumed[-1]
        == "a vocabulary of 22 words is padded to 24, so that it can be split over tp"
    )
    table = next(v for v in made.params if v.name == "table")
    assert table.type.shape == (6, 6) and made.cuts_of(table)
    indices = {"words": np.array([0, 21, 7, 3]), "labels": np.array([[5], [21], [2], [7]])}
    is_the_same(larger, made, values=arrays(larger) | indices)
    assert sharded(g, "shard{ranks=2,pad=3}").assumed == g.assumed  # 22 divides by 2

    whole, more = words(22), vocabulary.padded(words(22), 22, 24)
    assert more is not None
    scores = [replace(x, outputs=(x.nodes[2].results[0],)) for x in (whole, more)]
    values = arrays(whole) | indices
    table = np.concatenate([values["table"], np.zeros((2, 6), np.float32)])
    first, second = (run(x, y) for x, y in zip(scores, (values, values | {"table": table})))
    np.testing.assert_allclose(first["scores"], second["scores"][:, :22], rtol=1e-6)


def test_a_vocabulary_is_left_alone_where_another_axis_is_as_long():
    assert vocabulary.padded(words(4), 4, 6) is None  # there are four words in the batch
    made = sharded(gpuir.parse(packed()), "shard{ranks=2,pad=2}")
    assert not any("padded" in x for x in made.assumed)


def batch_norm(images: int = 4) -> Graph:
    """A product of images, a norm over all of them with its running mean, and gradients."""
    g = gpuir.parse(f"""graph @g {{
      in %x: f32[{images}, 3, 8]
      in %y: f32[{images}, 3, 6]
      param %w: f32[8, 6]
      param %scale: f32[3, 1]
      param %bias: f32[3, 1]
      param %running: f32[1, 3, 1]
      %h: f32[{images}, 3, 6] = t.matmul(%x, %w) at "m:h"
      %n: f32[{images}, 3, 6] = t.normalize(%h, [0, 2], scale=%scale, bias=%bias) at "m:norm"
      %mean: f32[1, 3, 1] = t.reduce("mean", %h, [0, 2], keepdims=true) at "m:norm"
      %old: f32[1, 3, 1] = t.map("mul", [%running], imm=[0.9]) at "m:norm"
      %part: f32[1, 3, 1] = t.map("mul", [%mean], imm=[0.1]) at "m:norm"
      %new: f32[1, 3, 1] = t.map("add", [%old, %part]) at "m:norm"
      %d: f32[{images}, 3, 6] = t.map("sub", [%n, %y]) at "m:d"
      %s: f32[{images}, 3, 6] = t.map("mul", [%d, %d]) at "m:s"
      %loss: f32[] = t.reduce("mean", %s, [0, 1, 2]) at "m:loss"
      role buffer %running
      out %loss, %new over %running
    }}""")
    return gpuir.pipeline("autodiff{loss=loss}").run(g)


def test_batch_norm_takes_statistics_of_the_batch_or_of_a_rank():
    """Of ranks by themselves: each runs the model of its images; gradients are the mean."""
    g = batch_norm()
    is_the_same(g, sharded(g, "shard{ranks=2,by=data}"))
    made = sharded(g, "shard{ranks=2,by=data,statistics=rank}")
    gradients = sum(role == "gradient" for _, role in g.roles)
    assert collectives(made) == {"all_reduce": gradients + 1}  # and the loss
    assert (
        made.assumed[-1]
        == "batch norm computes its statistics for each part of the batch separately"
    )
    assert made.ranks * flops(made) == pytest.approx(flops(g), rel=0.05)
    values = arrays(g)
    given = scattered(made, values)
    found = run_ranks(lambda own: run(made, own), given)
    alone = [run(batch_norm(2), own) for own in given]
    for name in (v.name for v in g.outputs):
        mean = np.mean([x[name] for x in alone], axis=0)
        for rank in range(2):
            wanted = alone[rank][name] if name == "new" else mean
            np.testing.assert_allclose(found[rank][name], wanted, atol=1e-5)


@pytest.mark.parametrize("statistics", ["batch", "rank"])
def test_sums_over_ranks_are_no_part_of_a_batch_norm(statistics: str):
    made = sharded(batch_norm(), f"shard{{ranks=2,by=data,statistics={statistics}}}")
    kernels = [n.op for n in gpuir.lower(made, profile="eager").nodes]
    assert sum(op.name == "k.collective" for op in kernels) >= 4


def packed() -> str:
    return """graph @g {
      in %x: f32[4, 8]
      param %w: f32[8, 24]
      param %b: f32[24]
      param %o: f32[8, 8]
      %m: f32[4, 24] = t.matmul(%x, %w) at "m:m"
      %s: f32[4, 24] = t.map("add", [%m, %b]) at "m:s"
      %q: f32[4, 8] = t.slice(%s, [0, 0], [4, 8], [1, 1]) at "m:q"
      %k: f32[4, 8] = t.slice(%s, [0, 8], [4, 8], [1, 1]) at "m:k"
      %v: f32[4, 8] = t.slice(%s, [0, 16], [4, 8], [1, 1]) at "m:v"
      %qk: f32[4, 8] = t.map("mul", [%q, %k]) at "m:qk"
      %h: f32[4, 8] = t.map("add", [%qk, %v]) at "m:h"
      %y: f32[4, 8] = t.matmul(%h, %o) at "m:y"
      out %y
    }"""


def test_what_lies_packed_is_cut_part_by_part():
    g = gpuir.parse(packed())
    made = sharded(g, "shard{ranks=2}")
    assert collectives(made) == {"all_reduce": 1}
    (w, b, _) = g.params
    assert made.cuts_of(w)[0].parts == (8, 8, 8) and made.cuts_of(b)[0].parts == (8, 8, 8)
    is_the_same(g, made)


def meeting(causal: str = "causal=true", mask: str = "", heads: int = 4, groups: int = 2) -> Graph:
    """Attention over sequences of 8, and its gradients."""
    q, k, mask = f"f32[2, 8, {4 * heads}]", f"f32[2, 8, {4 * groups}]", mask and f", {mask}"
    qh, kh = f"f32[2, {heads}, 8, 4]", f"f32[2, {groups}, 8, 4]"
    return gpuir.parse(f"""graph @g {{
      in %q: {q}
      in %k: {k}
      in %v: {k}
      in %dy: {q}
      param %mask: f32[1, {heads}, 8, 8]
      %q4: f32[2, 8, {heads}, 4] = t.reshape(%q, [2, 8, {heads}, 4]) at "m:q"
      %k4: f32[2, 8, {groups}, 4] = t.reshape(%k, [2, 8, {groups}, 4]) at "m:k"
      %v4: f32[2, 8, {groups}, 4] = t.reshape(%v, [2, 8, {groups}, 4]) at "m:v"
      %qh: {qh} = t.transpose(%q4, [0, 2, 1, 3]) at "m:q"
      %kh: {kh} = t.transpose(%k4, [0, 2, 1, 3]) at "m:k"
      %vh: {kh} = t.transpose(%v4, [0, 2, 1, 3]) at "m:v"
      %y: {qh}, %s: f32[2, {heads}, 8] =
        t.attention(%qh, %kh, %vh{mask}, {causal}, stats=true) at "m:y"
      %yt: f32[2, 8, {heads}, 4] = t.transpose(%y, [0, 2, 1, 3]) at "m:y"
      %out: f32[16, {4 * heads}] = t.reshape(%yt, [16, {4 * heads}]) at "m:out"
      %dy4: f32[2, 8, {heads}, 4] = t.reshape(%dy, [2, 8, {heads}, 4]) at "m:dy/backward"
      %dyh: {qh} = t.transpose(%dy4, [0, 2, 1, 3]) at "m:dy/backward"
      %dq: {qh}, %dk: {kh}, %dv: {kh} =
        t.attention_gradient(%qh, %kh, %vh, %y, %s, %dyh{mask}, {causal}) at "m:y/backward"
      out %out, %dq, %dk, %dv
    }}""")


@pytest.mark.parametrize("how", ["causal=true", "causal=true, window=3", "scale=0.5"])
@pytest.mark.parametrize("mask", ["", "mask=%mask"])
def test_queries_meet_the_keys_of_all_ranks(how: str, mask: str):
    """By all_to_all of four tensors and of three gradients, and dy; or with keys gathered, once
    for each pass, and their gradients scattered."""
    g = meeting(how, mask)
    heads = sharded(g, "shard{ranks=2,by=context,attention=heads}")
    assert collectives(heads) == {"all_to_all": 8}
    assert flops(g) == 2 * flops(heads)
    is_the_same(g, heads)
    keys = sharded(g, "shard{ranks=4,by=context,attention=keys}")
    assert collectives(keys) == {"all_gather": 4, "reduce_scatter": 2}
    own = 4 * attention_flops(keys)  # of whole scores: 26 of a window are 6 a rank
    assert own == pytest.approx(attention_flops(g), rel=0.08)
    assert ("keys on average" in str(keys.assumed)) == ("causal" in how)
    is_the_same(g, keys)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["causal=true", "causal=true, window=3", "scale=0.5"])
@pytest.mark.parametrize("mask", ["", "mask=%mask"])
def test_keys_go_round_a_ring(ranks: int, how: str, mask: str):
    """Keys and values to all others in both passes, and their gradients all the way round; before
    each attention, so that they travel meanwhile. Blocks together are the work of the whole."""
    g = meeting(how, mask)
    made = sharded(g, f"shard{{ranks={ranks},by=context,attention=ring}}")
    assert collectives(made) == {"shift": 4 * (ranks - 1) + 2 * ranks}
    kinds = [n.op.name for n in made.nodes if "attention" in n.op.name or "coll" in n.op.name]
    forward = ["t.collective", "t.collective", "t.attention"] * (ranks - 1) + ["t.attention"]
    assert kinds[: 3 * ranks - 2] == forward
    if "window" not in how:
        assert ranks * attention_flops(made) == attention_flops(g)
    assert ("keys on average" in str(made.assumed)) == ("causal" in how)
    is_the_same(g, made)


def test_a_ring_of_which_a_query_sees_no_key():
    """Rows that a mask hides whole are zeros, whichever blocks they meet; and numbers that would
    overflow, if each block's sums were taken as they are, do not."""
    text = gpuir.show(meeting("scale=1.0", "mask=%mask"))
    text = text.replace("mask: f32[1, 4, 8, 8]", "mask: bool[1, 4, 8, 8]")
    g = gpuir.parse(text)
    made = sharded(g, "shard{ranks=4,by=context,attention=ring}")
    mask = np.random.default_rng(0).random((1, 4, 8, 8)) < 0.3
    mask[..., 2, :] = False
    values = arrays(g) | {"mask": mask}
    with np.errstate(divide="ignore"):
        assert not run(g, values)["out"].reshape(2, 8, -1)[:, 2].any()
        is_the_same(g, made, values=values)
        is_the_same(g, made, values=values | {"q": 300 * values["q"]})


def test_a_ring_puts_narrow_numbers_together_in_f32():
    text = gpuir.show(meeting()).replace("f32", "bf16")
    g = gpuir.parse(text.replace("%s: bf16", "%s: f32"))
    made = sharded(g, "shard{ranks=4,by=context,attention=ring}")
    terms = [n for n in made.nodes if n.op.name == "t.map" and n.results[0].type.rank == 4]
    assert {str(n.results[0].type.dtype) for n in terms if phase_of(n) is None} == {"f32"}
    is_the_same(g, made, 3e-2)


def test_a_ring_needs_attention_as_one_op():
    g = gpuir.parse("graph @g { in %x: f32[2, 8, 4] param %w: f32[4, 4]\n"
                    "%y: f32[2, 8, 4] = t.matmul(%x, %w) at \"m:y\" out %y }")  # fmt: skip
    with pytest.raises(UsageError, match="the graph has no attention op, so keys"):
        gpuir.pipeline("shard{ranks=2,by=context,attention=ring}").run(g)


def test_heads_that_are_too_few_leave_keys_to_gather():
    g = meeting(heads=3, groups=3)
    made = sharded(g, "shard{ranks=2,by=context}")
    assert collectives(made) == {"all_gather": 4, "reduce_scatter": 2}
    is_the_same(g, made)
    with pytest.raises(
        UsageError, match=r"3 heads of queries and 3 of keys(.|\n)*divides both: 1, 3\n"
    ):
        gpuir.pipeline("shard{ranks=2,by=context,attention=heads}").run(g)


@pytest.mark.slow
def test_a_training_step_with_sequences_in_parts():
    g = decoder(dims={"batch": 4, "seq": 8}, train=True, optimizer="adamw")
    weights = sum(1 for _, role in g.roles if role == "gradient")
    made = sharded(g, "shard{ranks=2,by=context,attention=heads}")
    assert collectives(made) == {"all_to_all": 16, "all_gather": 1, "all_reduce": weights + 2}
    is_the_same(g, made)
    both = "shard{ranks=2},shard{ranks=2,by=context},shard{ranks=2,by=data,zero=2}"
    is_the_same(g, sharded(g, both))


def test_a_gradient_is_added_up_once_over_two_axes():
    g = gpuir.parse("""graph @g {
      in %x: f32[4, 8, 6]
      in %dy: f32[4, 8, 10]
      param %w: f32[6, 10]
      %y: f32[4, 8, 10] = t.matmul(%x, %w) at "m:y"
      %xr: f32[32, 6] = t.reshape(%x, [32, 6]) at "m:x/backward"
      %xt: f32[6, 32] = t.transpose(%xr, [1, 0]) at "m:x/backward"
      %dr: f32[32, 10] = t.reshape(%dy, [32, 10]) at "m:d/backward"
      %dw: f32[6, 10] = t.matmul(%xt, %dr) at "m:dw/backward"
      out %y, %dw
    }""")
    made = sharded(g, "shard{ranks=2,by=context},shard{ranks=4,by=data}")
    (op,) = (n.op for n in made.nodes if isinstance(n.op, t.Collective))
    assert (op.fn, op.group, op.sizes, op.strides) == ("all_reduce", "cp+dp", (2, 4), (1, 2))
    is_the_same(g, made)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["heads", "keys", "ring"])
def test_sequences_in_parts_of_two_axes(attention: str):
    """Between products each rank of `tp` has a part of the rows that its rank of `cp` has, which
    are some of each such part: nothing but keys or heads goes over `cp` in the forward pass."""
    config = SMALL | {"num_key_value_heads": 4}
    g = decoder(config, dims={"batch": 2, "seq": 16}, train=True, optimizer="adamw")
    one = sharded(g, "shard{ranks=2,sequence=true}")
    assert collectives(one)["reduce_scatter"] == 9
    made = gpuir.pipeline(f"shard{{ranks=2,by=context,attention={attention}}}").run(one)
    ids = next(v for v in made.inputs if v.name == "input_ids")
    assert [cut.parts for cut in made.cuts_of(ids) if cut.group == "cp"] == [(8, 8)]
    over = Counter(
        n.op.fn
        for n in made.nodes
        if isinstance(n.op, t.Collective) and n.op.group == "cp" and phase_of(n) is None
    )
    moves = {"heads": {"all_to_all": 8}, "keys": {"all_gather": 4}, "ring": {"shift": 4}}[attention]
    assert over - Counter({"all_reduce": 2, "all_gather": 1}) == moves  # of the loss, and labels
    is_the_same(g, made)


def mixture(gate: str = "packed", biases: bool = True, hidden: int = 4, inter: int = 6) -> Graph:
    """Four experts of two for each of 8 tokens, and their gradients."""
    into = f"f32[4, {2 * inter if gate == 'packed' else inter}, {hidden}]"
    wide, back = into.replace(f", {hidden}]", "]"), f"f32[4, {hidden}, {inter}]"
    x = f"f32[8, {hidden}]"
    more = {"up": into, "down": back}
    if gate == "gate":
        more["gate"] = into
    if biases:
        more |= {"up_bias": wide, "down_bias": f"f32[4, {hidden}]"}
        more |= {"gate_bias": wide} if gate == "gate" else {}
    params = "\n".join(f"param %{name}: {type}" for name, type in more.items())
    given = "%up, %down" + "".join(f", {n}=%{n}" for n in more if n not in ("up", "down"))
    made = ", ".join(f"%d{name}: {type}" for name, type in more.items())
    return gpuir.parse(f"""graph @g {{
      in %x: {x}
      in %which: i64[8, 2]
      in %shares: f32[8, 2]
      in %dy: {x}
      {params}
      %y: {x} = t.experts(%x, %which, %shares, {given}) at "m:y"
      %dx: {x}, %ds: f32[8, 2], {made} =
        t.experts_gradient(%dy, %x, %which, %shares, {given}) at "m:y/backward"
      out %y, %dx, %ds, {", ".join(f"%d{name}" for name in more)}
    }}""")


ROUTINGS = st.lists(st.integers(-1, 4), min_size=16, max_size=16)


@given(
    ROUTINGS,
    st.sampled_from(["packed", "gate", "plain"]),
    st.booleans(),
    st.sampled_from(
        (
            "shard{ranks=2,by=expert}",
            "shard{ranks=4,by=expert,dispatch=all_to_all}",
            "shard{ranks=4,by=expert,dispatch=all_gather}",
            "shard{ranks=2,by=expert},shard{ranks=2,by=data}",
        )
    ),
)
def test_tokens_reach_their_experts_wherever_they_go(
    which: list[int], gate: str, biases: bool, pipeline: str
):
    """All to one, evenly, or to none there is: numbers are those of one device."""
    g = mixture(gate, biases)
    made = sharded(g, pipeline)
    assert flops(made) * made.ranks == pytest.approx(flops(g), rel=0.15)
    given = {"which": np.array(which).reshape(8, 2)}
    is_the_same(g, made, values=arrays(g) | given)


@pytest.mark.parametrize("gate", ["packed", "gate", "plain"])
@pytest.mark.parametrize("biases", [True, False])
def test_experts_are_cut_between_their_products(
    gate: str, biases: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of a bias behind the second product each rank adds its share."""
    monkeypatch.setattr("gpuir.passes.shard.plan.EACH", 0.0)  # else too small to be worth it
    g = mixture(gate, biases, inter=96)
    made = sharded(g, "shard{ranks=4}")
    own = cells(made) - (4 * 4 if biases else 0)
    assert 4 * own == cells(g) - (4 * 4 if biases else 0)
    given = {"which": np.arange(16).reshape(8, 2) % 4}
    is_the_same(g, made, values=arrays(g) | given)
    both = sharded(g, "shard{ranks=4},shard{ranks=2,by=expert}")
    is_the_same(g, both, values=arrays(g) | given)


def test_experts_are_shared_out():
    """Rows of 4 cells in f32, of two experts for each of a rank's 2 tokens, half as many again on
    the busiest rank; they go and come, and dy and dx do."""
    g = mixture()
    made = sharded(g, "shard{ranks=4,by=expert,dispatch=all_to_all,imbalance=1.5}")
    moves: list[Any] = [n.op for n in made.nodes if n.op.name == "t.collective"]
    assert [op.fn for op in moves if op.routed] == ["all_gather", "reduce_scatter"] * 2
    assert {op.routed for op in moves if op.routed} == {int(1.5 * 2 * 2) * 4 * 4}
    mixes: list[Any] = [n.op for n in made.nodes if n.op.name.startswith("t.experts")]
    assert {(op.ranks, op.imbalance, op.up.type.shape[0]) for op in mixes} == {(4, 1.5, 1)}
    assert all(op.routed for op in mixes)
    assert cells(made) * 4 == cells(g)
    gathered_all = sharded(g, "shard{ranks=4,by=expert,dispatch=all_gather}")
    assert not any(getattr(n.op, "routed", None) for n in gathered_all.nodes)
    # a token's rows for two experts are fewer than three other ranks
    routes = [getattr(n.op, "routed", None) for n in sharded(g, "shard{ranks=4,by=expert}").nodes]
    assert any(routes)


def test_experts_as_products_of_batches_are_shared_out():
    """Tokens as GShard lays them out, so many for each expert, travel by plain all_to_all."""
    g = gpuir.parse("""graph @g {
      in %x: f32[8, 4, 6]
      in %before: f32[8, 6]
      param %up: f32[4, 6, 10]
      param %down: f32[4, 10, 6]
      %t: f32[4, 8, 6] = t.transpose(%x, [1, 0, 2]) at "m:t"
      %h: f32[4, 8, 10] = t.matmul(%t, %up) at "m:h"
      %r: f32[4, 8, 10] = t.map("relu", [%h]) at "m:r"
      %y: f32[4, 8, 6] = t.matmul(%r, %down) at "m:y"
      %s: f32[8, 6] = t.reduce("sum", %y, [0]) at "m:s"
      %out: f32[8, 6] = t.map("add", [%s, %before]) at "m:out"
      out %out
    }""")
    made = sharded(g, "shard{ranks=2,by=expert}")
    assert collectives(made) == {"all_to_all": 1, "reduce_scatter": 1}
    assert 2 * cells(made) == cells(g) and flops(made) == flops(g) / 2
    is_the_same(g, made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    [
        "shard{ranks=4,by=expert}",
        "shard{ranks=2},shard{ranks=2,by=context},shard{ranks=2,by=expert}",
        "shard{ranks=2,by=expert},shard{ranks=2,by=data,zero=3}",
    ],
)
def test_a_training_step_of_experts(pipeline: str):
    g = decoder(MIXTRAL, dims={"batch": 4, "seq": 8}, train=True, optimizer="adamw")
    made = sharded(g, pipeline)
    assert any(n.op.name == "t.experts" and n.op.ranks > 1 for n in made.nodes)  # pyright: ignore
    is_the_same(g, made)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("shard{ranks=3}", "no weight can be split over 3 ranks"),
        ("shard{ranks=3,by=data}", "a batch of 4 cannot be split evenly over 3 ranks"),
        ("shard{ranks=2},shard{ranks=2}", "is already split over an axis tp"),
        ("shard{ranks=2,by=columns}", "by='columns' is unknown"),
        ("shard{ranks=0}", "ranks must be at least 1"),
        ("shard{ranks=2,zero=1}", "zero is out of range or does not go with this"),
        ("shard{ranks=2,by=data,sequence=true}", "sequence=true needs by=tensor"),
        (
            "shard{ranks=3,by=context}",
            r"a sequence of 8 tokens cannot be split evenly over 3 ranks(.|\n)*1, 2, 4, 8",
        ),
        ("shard{ranks=2,by=context,attention=rings}", "attention is unknown"),
        ("shard{ranks=2,attention=heads}", "attention is unknown"),
        ("shard{ranks=2,by=expert}", "the graph has no experts"),
        ("shard{ranks=2,by=expert,dispatch=send}", "dispatch is unknown"),
        ("shard{ranks=2,by=data,imbalance=1.2}", "rows of the busiest rank over the mean"),
    ],
)
def test_what_cannot_be_is_refused(pipeline: str, message: str):
    with pytest.raises(UsageError, match=message):
        gpuir.pipeline(pipeline).run(gpuir.parse(packed()))


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match=r"4 experts cannot be split evenly over 3(.|\n)*1, 2, 4"):
        gpuir.pipeline("shard{ranks=3,by=expert}").run(mixture())
    one = gpuir.parse('graph @g { in %x: f32[4] %y: f32[4] = t.map("neg", [%x]) at "m:y" out %y }')
    with pytest.raises(UsageError, match="no input has a sequence axis"):
        gpuir.pipeline("shard{ranks=2,by=context}").run(one)


def test_rows_that_a_rank_has_not_are_no_reason_to_add_up_early():
    """Of a table over tp the gradients of a rank's own rows are added up over dp, and not those of
    all lookups before others are masked: 16 rows a rank, 20 lookups."""
    text = """graph @g {
      in %x: f32[8, 20, 16]
      in %i: i64[1, 20]
      param %w: f32[32, 16]
      %e: f32[1, 20, 16] = t.gather(%w, %i, 0) at "m:e"
      %h: f32[8, 20, 16] = t.map("add", [%x, %e]) at "m:h"
      %s: f32[8, 20, 16] = t.map("mul", [%h, %h]) at "m:s"
      %l: f32[] = t.reduce("mean", %s, [0, 1, 2]) at "m:l"
      out %l
    }"""
    steps = "autodiff,optimizer{kind=sgd},shard{ranks=2},shard{ranks=2,by=data}"
    g = gpuir.pipeline(steps).run(gpuir.parse(text))
    summed = {n.results[0].name for n in g.nodes if getattr(n.op, "group", "") == "dp"}
    assert summed == {"l", "w.grad"}
