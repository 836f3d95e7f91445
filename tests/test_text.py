"""Text: what it reads as, what it refuses and how, and that nothing else can happen."""

from __future__ import annotations

import dataclasses
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from gpuir import load_text
from gpuir.ir.errors import GpuirError, TextError, UsageError
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.types import TensorType, f32
from gpuir.passes.manager import make_pass
from gpuir.stacks.table import PASSES, pipeline
from gpuir.text import parse, parse_passes, parse_schedule, show

MLP = """costed @mlp of onnx for a100 under ort {
  in %x: f16[8, 1024]
  param %w: f16[1024, 4096]
  param %bias: f16[4096]
  %y: f16[8, 4096] = k.gemm([%x, %w, %bias], {
    in %x: f16[8, 1024]
    in %w: f16[1024, 4096]
    in %bias: f16[4096]
    %acc: f32[8, 4096] = t.matmul(%x, %w, dtype=f32) at "mlp.onnx:MatMul_3"
    %c: f16[8, 4096] = t.cast(%acc, f16) at "mlp.onnx:MatMul_3"
    %s: f16[8, 4096] = t.map("add", [%c, %bias]) at "mlp.onnx:Add_4"
    out %s
  }) tile(m=16, n=128, k=32; stages=3, warps=4) cost(time_s=9.45e-06, bound=memory, \
by="roofline@1", compute=2.15e-07, memory=5.45e-06, latency=4e-06; waves=0.3) \
at "mlp.onnx:MatMul_3", "mlp.onnx:Add_4"
  folded at "mlp.onnx:Identity_5"
  assumed "3 trips, from the model"
  out %y
}
"""
SCHEDULE = """schedule @mlp for "a100+sms=120" {
  %y: tile(m=16, n=128, k=32; stages=3, warps=4, split=2)
  %loop/%"a b": tile(i=1024; stages=1, warps=8)
}
"""


def test_every_note_round_trips():
    assert show(parse(MLP)) == MLP
    by = 'by="roofline@1", '
    text = MLP.replace(by, by + 'low_s=8e-06, high_s=1.2e-05, unseen="gpu dtype", ')
    cost = parse(text).nodes[0].cost
    assert cost is not None and cost.interval == (8e-06, 1.2e-05)
    assert cost.unseen == ("gpu", "dtype") and show(parse(text)) == text


def test_roles_and_what_outputs_take_over():
    text = """graph @step {
  in %g: f32[2]
  param %w: f32[2]
  param %m: f32[2]
  %m.new: f32[2] = t.map("add", [%m, %g]) at "m:a"
  %w.new: f32[2] = t.map("sub", [%w, %m.new]) at "m:b"
  role gradient %g
  role optimizer %m
  out %w.new over %w, %m.new over %m, %m.new
}
"""
    g = parse(text)
    w, m = g.params
    assert show(g) == text and g.over == (w, m, None)
    assert g.role_of(m) == "optimizer" and g.role_of(w) == "weight"
    assert g.role_of(g.inputs[0]) == "gradient" and g.role_of(g.outputs[0]) == "activation"


def test_what_a_graph_says_of_itself():
    text = 'costed @g of pytorch for "a100+sms=9" under "eager+tf32=none" {\n  out\n}\n'
    g = parse(text)
    assert (g.framework, g.target, g.profile) == ("pytorch", "a100+sms=9", "eager+tf32=none")
    assert show(g) == text
    assert show(parse("graph @of of onnx { out }")) == "graph @of of onnx {\n  out\n}\n"


def test_schedule_round_trips():
    assert show(parse_schedule(SCHEDULE)) == SCHEDULE


def test_comments_and_white_space_do_not_matter():
    text = MLP.replace("\n", "  # a comment\n\n")
    assert parse(text) == parse(MLP)


def test_pipeline_text():
    assert parse_passes('fuse{max_ops=8},tile{target="my gpu.toml",x=1.5,y=true}') == (
        ("fuse", {"max_ops": 8}),
        ("tile", {"target": "my gpu.toml", "x": 1.5, "y": True}),
    )


def graph(*lines: str) -> str:
    return "\n".join(("graph @g {", "  in %x: f32[2]", *("  " + line for line in lines), "}"))


COST = 'cost(time_s=1, bound=memory, by="a@1"'
REFUSED = {
    "": "unexpected the end of the text",
    "graph @g {": "unexpected the end of the text",
    "graf @g { out }": "unexpected 'graf'",
    "graph @g of jax { out }": "no framework 'jax'",
    graph("out %x", "out %x"): "there is text after",
    graph('%y: f32[2] = t.map("relu", [%x])'): "there is no `out` line",
    graph("in %x: f32[3]", "out %x"): "%x is defined twice",
    graph("out %y"): "%y is used before it is defined",
    graph("out %x over %y"): "%y is used before it is defined",
    graph("role gradient %y", "out %x"): "%y is used before it is defined",
    graph("role grad %x", "out %x"): "no role 'grad'",
    graph("role input %x", "role cache %x", "out %x"): "%x has two roles",
    graph("param %p: f33[2]", "out %x"): "no dtype 'f33'",
    graph("param %p: f32[2, 3]{0, 0}", "out %x"): "not a permutation",
    graph('%y: f32[2] = t.mop("relu", [%x])', "out %y"): "no op t.mop",
    graph('%y: f32[2] = t.map("rely", [%x])', "out %y"): "the scalar function 'rely' is unknown",
    graph('%y: f32[2] = t.map("relu", %x)', "out %y"): "t.map: args has the wrong type",
    graph('%y: f32[2] = t.map("add", [%x], imm=["1"])', "out %y"): "imm has the wrong type",
    graph("%y: f32[2] = t.reshape(%x, [2.0])", "out %y"): "shape has the wrong type",
    graph("%y: f32[] = t.softmax(%x, true)", "out %y"): "axis has the wrong type",
    graph('%y: f32[] = t.reduce("summ", %x, [0])', "out %y"): "fn has the wrong type",
    graph('%y: f32[] = t.reduce("sum", %x, [0, 0])', "out %y"): "an axis is listed twice",
    graph("%y: f32[2] = t.slice(%x, [0], [2], [0])", "out %y"): "a step of zero",
    graph("%y: f32[2] = t.slice(%x, [], [2], [1])", "out %y"): "the arguments do not fit t.slice",
    graph(
        "%y: f32[2] = t.loop({ in %i: i64[] in %a: f32[2] out %a }, -1, [%x])"
    ): "must be 0 or more",
    graph(
        "param %w: f32[1, 1, 3]",
        "in %i: f32[1, 1, 9]",
        "%y: f32[1, 1, 7] = t.conv(%i, %w, [0], [0], [0], [1])",
    ): "at least 1",
    graph(
        "param %w: f32[1, 1, 3]",
        "in %i: f32[1, 1, 9]",
        "%y: f32[1, 1, 7] = t.conv(%i, %w, [1], [0], [0], [1], groups=0)",
    ): "at least 1",
    graph(
        "in %i: f32[1, 1, 9]", '%y: f32[1, 1, 7] = t.pool("max", %i, [3], [0], [0], [0], [1])'
    ): "at least 1",
    graph('%y: f32[2] = t.map("not", [%x])', "out %y"): "not a bool",
    graph('%y: f32[2] = t.map("where", [%x, %x, %x])', "out %y"): "not a bool",
    graph("%y: f32[2] = t.gather(%x, %x)", "out %y"): "the indices must be integers",
    graph("in %a: f32[2, 2]", "in %b: i8[2, 2]", "%y: f32[2, 2] = t.matmul(%a, %b)", "out %y"): (
        "t.matmul: dtypes differ"
    ),
    graph('%y: f32[2] = t.map("relu")', "out %y"): "t.map lacks args",
    graph('%y: f32[2] = t.map("relu", [%x], [], 3)', "out %y"): "too many arguments",
    graph('%y: f32[2] = t.map("relu", [%x], immediate=[1])', "out %y"): "not a field of t.map",
    graph('%y: f32[2] = t.map("relu", [%x], imm=[], imm=[])', "out %y"): "given twice",
    graph('%y: f32[3] = t.map("relu", [%x])', "out %y"): "not the ones that the op computes",
    graph(
        '%y: f32[2] = t.map("relu", [%x]) tile(m=0)', "out %y"
    ): "'m=0' has another form than m=64",
    graph('%y: f32[2] = t.map("relu", [%x]) tile(stages=2)', "out %y"): "goes after the semicolon",
    graph('%y: f32[2] = t.map("relu", [%x]) tile(m=1; depth=2)', "out %y"): "is not a tile option",
    graph('%y: f32[2] = t.map("relu", [%x]) cost(time_s=1)', "out %y"): "bound, by missing",
    graph(
        f'%y: f32[2] = t.map("relu", [%x]) {COST}, low_s=1)', "out %y"
    ): "low_s and high_s must be given together",
    graph(f'%y: f32[2] = t.map("relu", [%x]) {COST}, by="b@1")', "out %y"): "by is given twice",
    graph(
        f'%y: f32[2] = t.map("relu", [%x]) {COST}, low_s=x, high_s=1)', "out %y"
    ): "low_s is not a number",
    graph('%y: f32[2] = t.map("relu", [%x]) at "\\q"', "out %y"): "or an escape that JSON",
}


@pytest.mark.parametrize(
    ("tile", "line", "under"),
    [
        ("tile(m=16, n=0; stages=3)", 2, "n=0"),
        ("tile(m=16, n=64; q=3)", 2, "q=3"),
        ("tile(m=16, m=16)", 2, "m=16)"),
        ("tile(m=16,\n   n=x)", 3, "n=x"),
        ("tile(m=16,\x0c\u2028 stages=2)", 2, "stages"),
    ],
)
def test_the_caret_is_under_what_is_wrong_in_a_tile(tile: str, line: int, under: str):
    with pytest.raises(TextError) as error:
        parse_schedule(f"schedule @m for a100 {{\n  %y: {tile}\n}}\n", "s")
    shown, caret = error.value.found.split("\n")
    assert error.value.where.startswith(f"s:{line}:")
    assert shown[caret.index("^") :].startswith(under)


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_refusal_points_at_the_place(text: str):
    with pytest.raises(TextError) as error:
        parse(text, "g.gir")
    assert REFUSED[text] in str(error.value)
    assert error.value.where.startswith("g.gir:")
    assert error.value.found.splitlines()[-1].strip() == "^"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("schedule @g for a100 { %y: tile(m=1) %y: tile(m=2) }", "has two tiles"),
        ("schedule @g for a100 { %y: tile(m) }", "has another form than m"),
        ("schedule @g { }", "unexpected '{'"),
    ],
)
def test_schedule_refusals(text: str, what: str):
    with pytest.raises(TextError, match=what):
        parse_schedule(text)


@pytest.mark.parametrize("text", ["", "fuse{", "fuse{max_ops}", "fuse,,tile", "fuse max"])
def test_pipeline_refusals(text: str):
    with pytest.raises(TextError):
        parse_passes(text)


def test_deep_nesting_is_refused_or_read():
    text = "graph @g { out }"
    for _ in range(3000):
        text = text.replace("out }", '%y: f32[] = t.loop({ out }, 1, []) at "a" out }', 1)
    with pytest.raises(GpuirError):
        parse(text)


@given(graphs(max_ops=5), st.data())
def test_mutated_text_parses_or_is_refused(g, data):
    """One character gone, doubled or changed: a graph, or an error of ours."""
    text = show(pipeline("fuse,legalize,tile{target=t4},annotate").run(g))
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(
        st.sampled_from(["", text[at] * 2, "%", "{", "}", '"', "(", "0", "-", "\0", "é"])
    )
    try:
        parse(text[:at] + new + text[at + 1 :])
    except GpuirError as error:
        assert str(error)


@given(st.text(max_size=200))
def test_any_text_parses_or_is_refused(text):
    for read in (parse, parse_schedule, parse_passes):
        try:
            read(text)
        except GpuirError as error:
            assert str(error)


def test_what_cannot_be_seen_is_escaped():
    name = "\ud800\x9b2J\u202e\u65e5\u672c"
    g = Graph(Level.graph, name, (Value(name, TensorType((2,), f32)),))
    assert show(g).isascii() and parse(show(g)) == g
    assert "\u65e5\u672c" in show(Graph(Level.graph, "\u65e5\u672c"))


def test_a_long_string_takes_its_own_size():
    """The lexer's expressions keep no place to go back to for each character."""
    for piece in ("a", "\\n"):
        text = 'graph @g { assumed "' + piece * 2_000_000 + '" out }'
        tracemalloc.start()
        (assumed,) = parse(text).assumed
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(assumed) == 2_000_000 and peak < 20 * len(text)


def test_a_text_too_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpuir.text.place.LARGEST", 100)
    with pytest.raises(TextError, match="too long"):
        parse("graph @g { out }" + " " * 100)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("split_sums{warp=0}", "option 'warp' is out of range"),
        ("split_sums{sms=-1}", "option 'sms' is out of range"),
        ("fuse{max_ops=99999999999}", "option 'max_ops' is out of range"),
        ("autodiff{every=-1}", "option 'every' is out of range"),
        ("optimizer{lr=nan}", "option 'lr' is out of range"),
        ('fuse{rules="a\tb"}', "a character or an escape that JSON does not know"),
    ],
)
def test_options_out_of_range(text: str, says: str):
    with pytest.raises(GpuirError, match=says):
        pipeline(text)


def test_every_number_of_every_pass_has_a_range():
    for kind in PASSES.values():
        for option in dataclasses.fields(kind):
            if option.type == "int":
                for value in (-1, 1 << 31):
                    with pytest.raises(UsageError, match="out of range"):
                        make_pass(kind, {option.name: value})
            elif option.type == "float":
                with pytest.raises(UsageError, match="out of range"):
                    make_pass(kind, {option.name: float("inf")})


@pytest.mark.parametrize(
    "note",
    [
        "time_s=-1e-6, bound=memory, by=x, memory=-1e-6",
        "time_s=nan, bound=memory, by=x, memory=1e-6",
        "time_s=1e-6, bound=memory, by=x, memory=1e-6; dram_bytes=-5",
        "time_s=1e-6, bound=memory, by=x, memory=1e-6; dram_bytes=nan",
        "time_s=1e-6, bound=memory, by=x, memory=1e-6; flops=1" + "0" * 400,
    ],
)
def test_costs_that_nothing_has(note: str):
    text = (
        "costed @g for a100 {\n  in %x: f32[64]\n  %y: f32[64] = k.map([%x], {\n"
        '    in %a: f32[64]\n    %b: f32[64] = t.map("exp", [%a]) at "m:a"\n    out %b\n'
        f'  }}) tile(i=64) cost({note}) at "m:a"\n  out %y\n}}\n'
    )
    assert load_text(text.replace(note, "time_s=1e-6, bound=memory, by=x, memory=1e-6"))
    with pytest.raises(TextError):
        load_text(text)


def test_integers_of_more_than_64_bits_are_refused():
    for number in (1 << 64, 10**400):
        with pytest.raises(TextError, match="the integer is too large"):
            parse(
                f'graph @g {{ in %x: f32[2] %y: f32[2] = t.map("mul", [%x], [{number}, 1.0]) out }}'
            )
