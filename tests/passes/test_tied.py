"""Weights that are cut over tensor ranks whatever lies between them and their readers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import cells, is_the_same, sharded
from strategies import arrays

import gpuir
from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.types import TensorType, bf16, f16, f32, i64, u8
from gpuir.ops import tensor as t

ROWS, WIDTH, TOKENS = 32, 6, 4
LINKS = ("f16", "bf16", "f32", "turned", "split", "joined", "scaled", "flat", "squeezed")
links = st.lists(st.sampled_from(LINKS), max_size=4)


def linked(b: Builder, v: Value, links: list[str]) -> Value:
    """A table of words behind casts and views that keep its shape in the end."""
    for link in links:
        b.locs = (f"m:{link}",)
        match link:
            case "f16" | "bf16" | "f32":
                v = b(t.Cast(v, {"f16": f16, "bf16": bf16, "f32": f32}[link]))
            case "turned":
                v = b(t.Transpose(b(t.Transpose(v, (1, 0))), (1, 0)))
            case "split":  # groups of a row
                v = b(t.Reshape(b(t.Reshape(v, (ROWS, 2, WIDTH // 2))), (ROWS, WIDTH)))
            case "joined":
                v = b(t.Reshape(b(t.Reshape(v, (ROWS * WIDTH,))), (ROWS, WIDTH)))
            case "flat":
                v = b(t.Reshape(b(t.Reshape(v, (1, ROWS, WIDTH))), (ROWS, WIDTH)))
            case "squeezed":
                v = b(t.Slice(v, (0, 0), (ROWS, WIDTH), (1, 1)))
            case _:
                v = b(t.Map("mul", (v,), (0.5,)))
    return v


def tied(table: list[str], head: list[str], packed: bool, first: str, loss: bool) -> Graph:
    """A lookup and scores of all words, of one table, each behind links of its own."""
    b = Builder(Level.graph, "g")
    b.locs = ("m:x",)
    words = b.input("words", TensorType((TOKENS,), i64))
    labels = b.input("labels", TensorType((TOKENS, 1), i64))
    w = b.param("w", TensorType((ROWS, WIDTH), u8 if packed else f32))
    if packed:  # unpacked by scales and zeros of its rows
        scale = b.param("scale", TensorType((ROWS, 1), f32))
        zero = b.param("zero", TensorType((ROWS, 1), f32))
        w = b(t.Map("mul", (b(t.Map("sub", (b(t.Cast(w, f32)), zero))), scale)))
    made: dict[str, Value] = {}
    for which in (first, *({"table", "head"} - {first})):
        made[which] = linked(b, w, table if which == "table" else head)
    b.locs = ("m:scores",)
    rows = b(t.Cast(b(t.Gather(made["table"], words, 0)), f32))
    columns = b(t.Transpose(b(t.Cast(made["head"], f32)), (1, 0)))
    scores = b(t.Matmul(rows, columns))
    if not loss:
        return b.finish((scores,))
    log = b(t.Softmax(scores, 1, log=True))
    of = b(t.GatherElements(log, labels, 1))
    return b.finish((b(t.Reduce("mean", of, (0, 1))),))


def values_of(g: Graph) -> dict[str, Any]:
    values = arrays(g)
    values["words"] = np.array([0, 7, -1, 3])
    values["labels"] = np.array([[5], [-8], [2], [7]])
    if "scale" in values:
        values["w"] = np.arange(ROWS * WIDTH, dtype=np.uint8).reshape(ROWS, WIDTH)
    return {v.name: values[v.name] for v in (*g.inputs, *g.params)}


@given(links, links, st.booleans(), st.sampled_from(("table", "head")), st.booleans())
def test_a_table_is_cut_behind_any_casts_and_views(
    table: list[str], head: list[str], packed: bool, first: str, trains: bool
):
    """A lookup and a product share one table; the ranks together give what it gives whole."""
    g = tied(table, head, packed, first, loss=trains)
    if trains and not packed:
        g = gpuir.pipeline("autodiff,optimizer{kind=adamw}").run(g)
    made = sharded(g, "shard{ranks=2}")
    assert cells(made) == cells(g) / 2
    is_the_same(g, made, 2e-2, values_of(g))


@pytest.mark.parametrize("link", ["f16", "turned", "scaled"])
def test_each_term_of_a_gradient_is_cut_as_its_weight(link: str):
    """Two readers have a term each, which are added up; no rank has one whole."""
    g = gpuir.pipeline("autodiff,optimizer{kind=adamw}").run(
        tied([link], [link], packed=False, first="table", loss=False)
    )
    made = sharded(g, "shard{ranks=2}")
    shapes = [v.type.shape for n in made.nodes for v in n.results if not is_zeros(n.op)]
    assert (ROWS, WIDTH) not in shapes and (WIDTH, ROWS) not in shapes
    assert (ROWS // 2, WIDTH) in shapes
    is_the_same(g, made, 2e-2, values_of(g))


def is_zeros(op: Any) -> bool:
    return isinstance(op, t.Constant | t.Broadcast | t.Shard)


def test_a_weight_with_the_product_of_two_narrow_ones_added_is_cut():
    """As an adapter of low rank that is merged in each step: the product is cut with it."""
    g = gpuir.parse("""graph @g {
      in %x: f32[4, 128]
      param %w: f32[16000, 128]
      param %b: f32[16000, 8]
      param %a: f32[8, 128]
      %ba: f32[16000, 128] = t.matmul(%b, %a) at "m:ba"
      %s: f32[16000, 128] = t.map("add", [%w, %ba]) at "m:s"
      %t: f32[128, 16000] = t.transpose(%s, [1, 0]) at "m:t"
      %y: f32[4, 16000] = t.matmul(%x, %t) at "m:y"
      out %y
    }""")
    made = sharded(g, "shard{ranks=2}")
    assert {v.name: v.type.shape for v in made.params} == {
        "w": (8000, 128),
        "b": (8000, 8),
        "a": (8, 128),
    }
    is_the_same(g, made)


def test_a_table_is_whole_where_a_reader_needs_all_of_it():
    """One that looks along the axis that is not cut, and one that turns the axes into one."""
    for reader in (
        '%y: f32[8, 6] = t.cumulative("sum", %w, 0)',
        "%y: f32[6, 8] = t.reshape(%w, [6, 8])",
    ):
        g = gpuir.parse(f"""graph @g {{
          in %words: i64[4]
          param %w: f32[8, 6]
          %x: f32[4, 6] = t.gather(%w, %words) at "m:x"
          {reader} at "m:y"
          out %x, %y
        }}""")
        with pytest.raises(UsageError, match="no weight can be split"):
            gpuir.pipeline("shard{ranks=4}").run(g)


SHARED = """graph @g {{
  in %x: f32[{tokens}, 512]
  param %up: f32[512, 2048]
  param %down: f32[2048, 512]
  {layers}
  out %x{last}
}}"""


def layers(count: int, tokens: int = 4) -> Graph:
    """Layers that share their weights, as those of ALBERT."""
    text = "\n".join(
        f'%h{i}: f32[{tokens}, 2048] = t.matmul(%x{i - 1 if i else ""}, %up) at "m:up"\n'
        f'%r{i}: f32[{tokens}, 2048] = t.map("relu", [%h{i}]) at "m:r"\n'
        f'%x{i}: f32[{tokens}, 512] = t.matmul(%r{i}, %down) at "m:down"'
        for i in range(count)
    )
    return gpuir.parse(SHARED.format(tokens=tokens, layers=text, last=count - 1))


@pytest.mark.parametrize("count", [1, 3])
def test_layers_that_share_weights_are_cut_like_one(count: int):
    g = layers(count)
    made = sharded(g, "shard{ranks=4}")
    assert cells(made) == cells(g) / 4
    sums = [n for n in made.nodes if isinstance(n.op, t.Collective)]
    assert [n.op.fn for n in sums] == ["all_reduce"] * count  # pyright: ignore
    is_the_same(g, made)


def test_a_code_that_is_decoded_by_its_own_weight_is_cut():
    """An autoencoder with tied weights: columns, and rows of the same turned."""
    g = gpuir.parse("""graph @g {
      in %x: f32[4, 512]
      param %w: f32[512, 2048]
      %h: f32[4, 2048] = t.matmul(%x, %w) at "m:h"
      %t: f32[2048, 512] = t.transpose(%w, [1, 0]) at "m:t"
      %y: f32[4, 512] = t.matmul(%h, %t) at "m:y"
      out %y
    }""")
    made = sharded(g, "shard{ranks=4}")
    assert cells(made) == cells(g) / 4
    is_the_same(g, made)


PACKED = """graph @g {
  in %x: f16[4, 512]
  param %w: u4[1024, 512]
  param %s: f16[1024, 8]
  param %z: u4[1024, 8]
  param %down: f16[1024, 512]
  %r: u4[1024, 8, 64] = t.reshape(%w, [1024, 8, 64]) at "m:up"
  %b: BITS[1024, 8, 64] = t.bitcast(%r, BITS) at "m:up"
  %c: f16[1024, 8, 64] = t.cast(%b, f16) at "m:up"
  %rz: u4[1024, 8, 1] = t.reshape(%z, [1024, 8, 1]) at "m:up"
  %cz: f16[1024, 8, 1] = t.cast(%rz, f16) at "m:up"
  %d: f16[1024, 8, 64] = t.map("sub", [%c, %cz]) at "m:up"
  %rs: f16[1024, 8, 1] = t.reshape(%s, [1024, 8, 1]) at "m:up"
  %m: f16[1024, 8, 64] = t.map("mul", [%d, %rs]) at "m:up"
  %u: f16[1024, 512] = t.reshape(%m, [1024, 512]) at "m:up"
  %t: f16[512, 1024] = t.transpose(%u, [1, 0]) at "m:up"
  %h: f16[4, 1024] = t.matmul(%x, %t) at "m:up"
  %y: f16[4, 512] = t.matmul(%h, %down) at "m:down"
  out %y
}"""


@pytest.mark.parametrize("bits", ["i4", "f4e2m1"])
def test_quantised_weights_are_cut(bits: str):
    """By their blocks, with scales and zeros."""
    g = gpuir.parse(PACKED.replace("BITS", bits))
    made = sharded(g, "shard{ranks=4}")
    assert cells(made) == cells(g) / 4
    is_the_same(g, made, 2e-2)


def test_a_vocabulary_behind_a_cast_is_padded():
    g = gpuir.parse("""graph @g {
      in %words: i64[4]
      param %w: f32[22, 6]
      %c: bf16[22, 6] = t.cast(%w, bf16) at "m:c"
      %x: bf16[4, 6] = t.gather(%c, %words) at "m:x"
      %t: bf16[6, 22] = t.transpose(%c, [1, 0]) at "m:t"
      %y: bf16[4, 22] = t.matmul(%x, %t) at "m:y"
      out %y
    }""")
    made = sharded(g, "shard{ranks=4,pad=3}")
    assert [v.type.shape for v in made.params] == [(6, 6)]
    assert "padded to 24" in made.assumed[-1]


def test_scores_of_a_training_step_stay_in_parts():
    """A result is gathered in inference; of a training step the loss alone leaves."""
    g = tied([], [], packed=False, first="table", loss=True)
    scores = next(n.results[0] for n in g.nodes if isinstance(n.op, t.Matmul))
    both = replace(g, outputs=(*g.outputs, scores))
    step = gpuir.pipeline("autodiff,optimizer{kind=adamw}").run(both)
    for graph, shape in ((both, (TOKENS, ROWS)), (step, (TOKENS, ROWS // 2))):
        made = sharded(graph, "shard{ranks=2}")
        (found,) = (v for v in made.outputs if v.name == scores.name)
        assert found.type.shape == shape
        is_the_same(graph, made, 2e-2, values_of(graph))


MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 16000,
    },
    "gpt2": {"n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 16001, "n_positions": 256},
    "albert": {
        "embedding_size": 128,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 16000,
    },
}
CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "albert": "AlbertForMaskedLM"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "autocast", "train"),
    [
        ("llama", "", False),
        ("albert", "bf16", False),
        ("llama", "bf16", True),
        ("gpt2", "", True),
        ("albert", "", True),
    ],
)
def test_a_tied_model_is_no_slower_on_ranks(tmp_path: Path, name: str, autocast: str, train: bool):
    """It has fewer weights. A step adds the two gradients of its table up, which is allowed for."""
    pytest.importorskip("transformers", reason="pip install 'gpuir[hf]'")
    options: dict[str, Any] = {"train": True, "optimizer": "adamw"} if train else {}
    if autocast:
        options["autocast"] = autocast
    steps: dict[bool, gpuir.Step] = {}
    for tied in (True, False):
        config = MODELS[name] | {
            "model_type": name,
            "architectures": [CLASSES[name]],
            "tie_word_embeddings": tied,
        }
        path = tmp_path / str(tied) / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        g = gpuir.load(f"hf:{path}", dims={"batch": 4, "seq": 256}, **options)
        steps[tied] = gpuir.simulate_ranks(g, "dgx-h100", gpuir.Parallel(tp=8)).step
    table = 16000 * (128 if name == "albert" else 512) * 4
    added = 3 * table / 8 / 2e12 if train else 0.0  # two terms and their sum, at 2 TB/s
    assert steps[True].time_s <= 1.002 * steps[False].time_s + added
    assert steps[True].parts[0].held_bytes <= steps[False].parts[0].held_bytes
