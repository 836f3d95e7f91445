"""Reports of a costed graph with a bit of everything: text for a reader, sums that agree."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import gpuir
from gpuir.backends import texts
from gpuir.backends.table import BACKENDS, find_backend
from gpuir.backends.terminal import LONGEST_WORD, Page, Terminal, cell_width, cut, elided
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.notes import Cost
from gpuir.report.answer import Answer, Device, answer_of
from gpuir.report.equal import pattern
from gpuir.report.find import find_kernel
from gpuir.report.kernels import Unseen
from gpuir.report.names import DEEPEST, module_of
from gpuir.report.units import percent, quantity
from gpuir.simulate.memory import memory
from gpuir.targets.load import load_target

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEVICE = Device("a100", "NVIDIA A100", ("launch_s: assumed: until somebody measures it",))
A100 = load_target("a100")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpuir.load(HERE / "mixed.gir")


@pytest.fixture(scope="module")
def s(graph: Graph) -> Answer:
    held = memory(graph, A100)
    return answer_of(graph, DEVICE, warnings=("mixed.onnx: one thing is odd",), batch=8, held=held)


# ---------------------------------------------------------------------------- records


def test_latency_is_the_sum_of_the_graphs_own_costs(graph: Graph, s: Answer):
    assert s.latency_s == pytest.approx(sum(n.cost.time_s for n in graph.nodes if n.cost))


def test_the_interval_is_nearer_than_the_sum_of_all_runs(s: Answer):
    """-10 % and +15 % of everything but Sparkle, which counts as it is: kinds are independent."""
    sparkle = next(x for x in s.kernels if x.name == "z")
    assert sparkle.interval is None and s.certain_s == sparkle.time_s
    rest = s.latency_s - sparkle.time_s
    low, high = s.interval or (0.0, 0.0)
    assert 0.9 * rest + sparkle.time_s < low < 0.99 * s.latency_s
    assert 1.01 * s.latency_s < high < 1.15 * rest + sparkle.time_s


def test_what_caches_hold_has_no_rate_of_device_memory():
    text = """graph @g { in %x: f32[256, 256]
    %y: f32[256, 256] = t.map("relu", [%x]) at "m:R" out %y }"""
    told = BACKENDS["text"]([gpuir.analyze(gpuir.load_text(text), "a100")], Terminal(120))
    assert "all of it within the caches" in told and "device memory" not in told


def test_what_was_not_fitted_is_told(graph: Graph, s: Answer):
    softmax = next(x for x in s.kernels if x.kind == "reduce")
    assert s.unseen == (Unseen("gpu", ("reduce",), softmax.time_s),)
    assert "no measurements of this GPU for reduce (4.6 % of the kernels' time)" in BACKENDS[
        "text"
    ]([s], Terminal(120))
    known = [replace(n, cost=n.cost and replace(n.cost, unseen=())) for n in graph.nodes]
    text = BACKENDS["text"]([answer_of(replace(graph, nodes=tuple(known)), DEVICE)], Terminal(120))
    assert "fitted on  measurements of this GPU, in these dtypes" in text


def test_time_of_what_nothing_was_measured_of_is_shown_apart(graph: Graph):
    suspect = ("k.routine", "k.opaque", "k.reduce")
    nodes = tuple(
        replace(n, cost=replace(n.cost, unseen=("kind",))) if n.op.name in suspect else n
        for n in graph.nodes
    )
    s = answer_of(replace(graph, nodes=nodes), DEVICE)
    own = {x.kind: x.time_s for x in s.kernels if x.cost.unseen}
    assert set(own) == {"reduce", "routine", "opaque"}
    assert s.unfitted_s == pytest.approx(sum(own.values()))
    text = BACKENDS["text"]([s], Terminal(120))
    said = " ".join(text.split())
    assert "of the kernels' time, reduce, routine, opaque: no measurements of such kernels" in said
    assert "4.5 % by library routines, 4.5 % by unknown operators" in said
    (record,) = json.loads(BACKENDS["json"]([s], Terminal()))["reports"]
    assert record["unfitted_s"] == s.unfitted_s
    assert record["coverage"]["opaque"]["time_s"] == own["opaque"]
    assert {x["op"] for x in record["kernels"] if x["status"] == "opaque"} == {"k.opaque"}
    assert {x["op"] for x in record["kernels"] if x["status"] == "approximated"} == {"k.routine"}


def test_without_intervals_the_report_does_without(graph: Graph):
    nodes = graph.nodes
    plain = [n for n in nodes if n.op.name in ("k.view", "k.opaque") and "Sparkle" in str(n.locs)]
    alone = replace(graph, nodes=tuple(plain), outputs=())
    s = answer_of(alone, DEVICE, held=memory(graph))
    assert s.interval is None
    text = BACKENDS["text"]([s], Terminal(120)) + BACKENDS["text"]([s, s], Terminal(120))
    assert "80 %" not in text and "fitted" not in text


def test_totals_and_bounds_add_up(s: Answer):
    assert sum(t.time_s for t in s.totals) == pytest.approx(s.latency_s)
    assert sum(time for _, time in s.bounds) == pytest.approx(s.latency_s)
    assert sum(t.flops for t in s.totals) == s.flops == sum(x.flops for x in s.coverage)
    assert sum(t.launches for t in s.totals) == s.launches


def test_loops_multiply_and_the_cheaper_branch_does_not_run(s: Answer):
    runs = {x.name: x.runs for x in s.kernels}
    assert runs["l/m"] == 16
    assert runs["k/q"] == 1 and runs["k/e"] == 0
    assert s.launches == 5 + 16 and s.views == 1 and s.idle == 1


def test_flops_by_hand(s: Answer):
    product = 2 * 512 * 256 * 256
    assert {x.name: x.flops for x in s.kernels}["l/m"] == product
    bias, softmax, unique = 512 * 256, 5 * 512 * 256, 1000
    assert s.flops == 18 * product + bias + softmax + unique


def test_coverage_counts_every_model_node_once(s: Answer):
    shares = {x.status: x for x in s.coverage}
    assert shares["modelled"].nodes == 9
    assert shares["approximated"].what == (("unique", 1),)
    assert shares["opaque"].what == (("com.acme::Sparkle", 1),)
    assert s.folded == 1 and s.nodes == 12


def test_what_a_loop_costs_beyond_its_kernels_is_not_lost(graph: Graph):
    loop = next(n for n in graph.nodes if n.op.name == "k.loop")
    assert loop.cost is not None
    dearer = replace(loop, cost=Cost(loop.cost.time_s + 1e-5, "latency", "tile@2", ()))
    nodes = tuple(dearer if n is loop else n for n in graph.nodes)
    s = answer_of(replace(graph, nodes=nodes), DEVICE)
    (rest,) = (x for x in s.kernels if x.rest)
    assert rest.time_s == pytest.approx(1e-5) and rest.launches == 0
    assert s.latency_s == pytest.approx(sum(n.cost.time_s for n in nodes if n.cost))


def test_a_graph_without_costs_is_refused(graph: Graph):
    with pytest.raises(UsageError, match="a report needs a graph with costs"):
        answer_of(gpuir.strip(graph), DEVICE)


# ---------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["y", "%y", "mixed.onnx:/encoder/layer.0/Add", "layer.0/Add"])
def test_a_kernel_is_found_by_result_or_model_node(graph: Graph, name: str):
    assert find_kernel(graph, name).path == ("y",)


def test_a_kernel_inside_a_loop_is_found_by_path_and_by_its_own_name(graph: Graph):
    assert find_kernel(graph, "l/m").path == find_kernel(graph, "m").path == ("l", "m")


def test_a_name_that_nothing_has_gets_the_nearest(graph: Graph):
    with pytest.raises(UsageError) as error:
        find_kernel(graph, "Sofmax_2")
    assert "did you mean Softmax_2?" in str(error.value)


def test_a_name_that_several_have_gets_them_all(graph: Graph):
    with pytest.raises(UsageError) as error:
        find_kernel(graph, "MatMul")
    assert "%y  k.gemm" in str(error.value) and "%k/q  k.gemm" in str(error.value)


def test_a_view_beside_a_kernel_is_not_meant():
    g = gpuir.parse("""
    costed @g for a100-sxm-40gb {
      in %x: f32[4, 8]
      %v: f32[8, 4]{1, 0} = k.view([%x], {
        in %x: f32[4, 8]
        %v: f32[8, 4] = t.transpose(%x, [1, 0])
        out %v
      }, order=[1, 0]) cost(time_s=0.0, bound=latency, by="tile@2") at "g:Softmax"
      %y: f32[8, 4]{1, 0} = k.map([%v], {
        in %v: f32[8, 4]
        %y: f32[8, 4] = t.map("exp", [%v])
        out %y
      }) cost(time_s=1e-06, bound=latency, latency=1e-06, by="tile@2") at "g:Softmax"
      out %y
    }
    """)
    assert find_kernel(g, "Softmax").path == ("y",)


def test_a_folded_node_is_said_to_be_folded(graph: Graph):
    with pytest.raises(UsageError, match="no kernel computes") as error:
        find_kernel(graph, "Identity_7")
    assert "the node was removed" in str(error.value)


# ---------------------------------------------------------------------------- the table


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(s: Answer, width: int, golden):
    text = BACKENDS["text"]([s], Terminal(width))
    assert max(map(cell_width, text.splitlines())) <= width
    golden(HERE / f"mixed.{width}.txt", text)


@pytest.mark.parametrize("width", [80, 120])
def test_the_comparison(s: Answer, width: int, golden):
    changed = "l4+dram.bytes_per_s=2e12+sms=120+clock_hz=1e9"
    other = s.with_details(device=replace(s.device, name=changed, title="L4"))
    text = BACKENDS["text"]([s, other], Terminal(width))
    assert max(map(cell_width, text.splitlines())) <= width
    golden(HERE / f"mixed.comparison.{width}.txt", text)


@pytest.mark.parametrize("width", range(40, 130, 7))
def test_no_width_cuts_a_number(s: Answer, width: int):
    text = BACKENDS["text"]([s], Terminal(width))
    assert "81.1 us" in text and "4.77 us" in text and "85.9 us" in text
    both = BACKENDS["text"]([s, s], Terminal(width))
    assert "99.44 us" in both and not re.search(r"\d…", both)


NAMED = """graph @named {
  in %x: f16[8, 64]
  param %q: i8[64, 64]
  param %b: f16[64]
  %w: f16[64, 64] = t.cast(%q, f16) at "m:Dequantize"
  %h: f16[8, 64] = t.matmul(%x, %w) at "m:Gemm"
  %y: f16[8, 64] = t.map("add", [%h, %b]) at "m:Gemm"
  %r: f16[8, 64] = t.map("relu", [%y]) at "m:Relu"
  %s: f16[8, 64] = t.map("sub", [%r, %x]) at "m:Sub"
  %p: f16[8, 64] = t.softmax(%s, 1) at "m:Softmax"
  out %p
}
"""


def test_a_kernel_is_named_after_its_product_or_its_last_node():
    s = gpuir.analyze(gpuir.load_text(NAMED), "a100", profile="ideal")
    assert [(x.kind, x.anchor) for x in s.kernels] == [("gemm", "m:Gemm"), ("reduce", "m:Softmax")]


def test_many_targets_are_rows(s: Answer):
    many = [
        s.with_details(device=Device(f"target-number-{i}", "", (f"l2: guessed {i % 2}",)))
        for i in range(20)
    ]
    text = BACKENDS["text"](many, Terminal(100))
    assert max(map(cell_width, text.splitlines())) <= 100
    (row,) = re.findall(r"^target-number-7 .*us .*us .*us$", text, re.MULTILINE)
    assert "85.9 us" in row and "4.55 us" in row
    assert (
        "target-number-1, target-number-3, target-number-5 and 7 more: l2: guessed 1"
        in " ".join(text.split())
    )


def test_memory_says_whether_it_fits_and_who_holds_it(graph: Graph, s: Answer):
    eager = replace(graph, profile="eager")
    large, small = (
        memory(eager, load_target(f"a100{change}")) for change in ("", "+dram.bytes=545000000")
    )
    for held, word in (
        (large, "reserved of 41.8 GB (allocator caching)"),
        (s.memory, "reserved of 41.8 GB (allocator planned)"),
        (small, "fits       no, "),
    ):
        text = BACKENDS["text"]([answer_of(graph, DEVICE, held=held)], Terminal(400))
        assert word in text
    text = BACKENDS["text"]([answer_of(graph, DEVICE, held=large)], Terminal(100, memory=True))
    assert re.search(r"^workspace +8\.52 MB +\d+ % +#+$", text, re.MULTILINE)
    assert re.search(r"^8\.52 MB +\d+ % +workspace$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_tables_drop_columns(s: Answer, width: int):
    for text in (BACKENDS["text"]([s], Terminal(width)), BACKENDS["text"]([s, s], Terminal(width))):
        assert max(map(cell_width, text.splitlines())) <= width


def test_colour_is_only_added(s: Answer):
    plain, colored = (
        BACKENDS["text"]([s], Terminal(100)),
        BACKENDS["text"]([s], Terminal(100, color=True)),
    )
    assert "\x1b[" not in plain and "\x1b[1m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain


def test_top_kernels_and_the_rest(s: Answer):
    text = BACKENDS["text"]([s], Terminal(100, top=1))
    assert "4 more take" in text


def test_a_graph_where_nothing_runs():
    g = gpuir.parse("costed @empty for a100 {\n  in %x: f32[2]\n  out %x\n}\n")
    text = BACKENDS["text"]([answer_of(g, DEVICE)], Terminal(80))
    assert "nothing runs" in text
    assert json.loads(BACKENDS["json"]([answer_of(g, DEVICE)], Terminal()))["reports"][0]


def test_a_host_that_launches_nothing():
    g = gpuir.parse(
        'graph @v { in %x: f32[2] %y: f32[2, 1] = t.reshape(%x, [2, 1]) at "m:R" out %y }'
    )
    text = BACKENDS["text"]([gpuir.analyze(g, "a100-pcie", profile="eager")], Terminal(80))
    assert "latency    8.000 us" in text
    assert "bound" not in text


def test_names_in_wide_characters_keep_columns_straight():
    assert cell_width("层/卷积") == 7
    assert cell_width(elided("层/卷积/" * 9, 20)) <= 20
    assert cut("层层层", 4) == "层…"
    assert elided("/model/encoder/MatMul", 12) == "/mo…r/MatMul"


def test_long_names_are_cut_by_what_is_shown():
    """Not by one character less and less: a name of megabytes took minutes."""
    assert cut("x" * 4_000_000, 5) == "xxxx…"
    assert cut("a, " * 1_000_000, 8) == "a, a, …"


def test_a_name_of_megabytes_is_few_lines():
    """A paragraph took time as the square of its longest word."""
    page = Page(100)
    page.heading("x" * 4_000_000)
    page.wrapped("memory", "1 GB in " + "y" * 4_000_000 + ": weights")
    assert len(page.text()) < 2 * LONGEST_WORD + 1000
    assert "memory" in page.text() and ": weights" in page.text().replace("y", "")


@pytest.mark.parametrize("form", ["text", "json", "html", "trace"])
def test_modules_within_modules_have_a_bound(graph: Graph, form: str):
    """Each is listed with all above it: 3 MB of slashes took more than 6 GB."""
    paths = ("m.onnx:" + "a/" * 2000 + end for end in ("b/MatMul", "Add"))
    nodes = (replace(n, locs=(loc,)) for n, loc in zip(graph.nodes, paths, strict=False))
    deep = replace(graph, nodes=(*nodes, *graph.nodes[2:]))
    assert len(module_of(deep.nodes[0].locs[0])) == DEEPEST
    text = BACKENDS[form]([answer_of(deep, DEVICE)], Terminal(100, group="module"))
    assert len(text) < 3_000_000  # a page holds the chart library


def test_names_cannot_move_the_cursor(graph: Graph):
    (first, *rest) = graph.nodes
    evil = replace(first, locs=("m.onnx:a\x1b[2J\nb\tc",))
    s = answer_of(replace(graph, nodes=(evil, *rest)), DEVICE, warnings=("w\x1b[31m",))
    text = BACKENDS["text"]([s], Terminal(100))
    assert "\x1b" not in text and "a?[2J?b?c" in text


def test_names_that_repeat():
    assert pattern(["a/layer.0/fc", "a/layer.11/fc", "a/layer.3/fc"]) == "a/layer.*/fc"
    assert pattern(["same", "same"]) == "same"
    assert pattern(["MatMul_3", "Softmax_9"]) == "MatMul_3 ..."


# ---------------------------------------------------------------------------- for programs


def test_json_fits_its_schema_and_itself(s: Answer):
    text = BACKENDS["json"]([s, s], Terminal())
    schema = json.loads((ROOT / "docs/reference/report.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(json.loads(text))
    assert text == BACKENDS["json"]([s, s], Terminal(40, True, 1))
    (first, _) = json.loads(text)["reports"]
    assert sum(x["time_s"] for x in first["kernels"]) == pytest.approx(first["latency_s"])
    assert first["interval_s"] == list(s.interval or ())
    assert first["kernels"][0]["cost"]["interval_s"][0] < first["kernels"][0]["time_s"]


def test_every_json_field_is_documented(s: Answer):
    page = (ROOT / "docs/reference/json-schema.md").read_text()
    (found,) = json.loads(BACKENDS["json"]([s], Terminal()))["reports"]
    fields = {*found, *found["kernels"][1], *found["totals"][0], *found["memory"]}
    assert not [name for name in fields if f"`{name}" not in page]


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ('"c",d', '"c",d'),
        ("a\rb\nc\x1b[31m\u202e", "a?b?c?[31m?"),
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+a", "'+a"),
        ("-a", "'-a"),
        ("\t=1", "?=1"),
        ("\r=1", "?=1"),
    ],
)
def test_csv_holds_names_of_any_kind_and_no_formula(s: Answer, name: str, cell: str):
    text = BACKENDS["csv"]([replace(s, model=name)], Terminal())
    rows = list(csv.reader(StringIO(text, newline="")))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert rows[1][0] == cell and text.endswith("\n") and "\r" not in text


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "csv", "html", "roofline"])
def test_what_cannot_be_seen_in_a_name_is_not_written(s: Answer, form: str):
    pytest.importorskip({"html": "plotly", "roofline": "matplotlib"}.get(form, "csv"))
    hostile = "a\x1b]0;b\x07\x00\u202e\x9b"
    text = BACKENDS[form]([replace(s, model=hostile)], Terminal(file="x.svg"))
    shown = text.decode() if isinstance(text, bytes) else text
    assert not set(hostile[1:]) & set(shown) - set("]0;b") and "a?]0;b?" in shown


def test_csv_has_the_same_numbers(s: Answer):
    rows = list(csv.DictReader(StringIO(BACKENDS["csv"]([s], Terminal()))))
    assert sum(float(row["time_s"]) for row in rows) == pytest.approx(s.latency_s)
    assert {row["kernel"] for row in rows} >= {"y", "l/m", "k/q"}
    assert rows[0]["fact_waves"]
    highs = [float(row["high_s"]) if row["high_s"] else float(row["time_s"]) for row in rows]
    assert sum(highs) > (s.interval or (0, 0))[1] > s.latency_s
    assert {row["unseen"] for row in rows} == {"", "gpu"}


def test_ir_and_schedule_read_back(graph: Graph, s: Answer):
    assert gpuir.parse(texts.ir([s], Terminal())) == graph
    assert gpuir.parse_schedule(texts.schedule([s], Terminal())) == gpuir.extract(graph)
    with pytest.raises(UsageError, match="one target"):
        texts.ir([s, s], Terminal())


def test_backends_by_name():
    assert all(find_backend(name) is backend for name, backend in BACKENDS.items())
    mine = {"mine": lambda summaries, layout: "mine"}
    assert find_backend("mine", mine)([], Terminal()) == "mine"
    with pytest.raises(UsageError, match="jsn"):
        find_backend("jsn")


# ---------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.039e12, "bytes/s", "2.04 TB/s"),
        (9.45e-06, "s", "9.45 us"),
        (0.9996e-3, "s", "1.00 ms"),
        (12.5, "s", "12.5 s"),
        (0, "s", "0 s"),
        (512, "bytes", "512 B"),
        (5.891e-9, "bytes", "5.89e-09 B"),
        (0.25, "bytes/s", "0.250 B/s"),
        (3e-16, "s", "3e-16 s"),
        (2048, "bytes", "2.05 kB"),
        (179341152256, "flop", "179 Gflop"),
        (108, "", "108"),
        (65536, "", "65,536"),
    ],
)
def test_quantities(value: float, unit: str, text: str):
    assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.5, "50 %"), (0.0321, "3.2 %"), (0.0001, "<0.1 %"), (0, "0 %"), (0.0996, "10 %")],
)
def test_percentages(part: float, text: str):
    assert percent(part) == text
    assert percent(1, 0) == "-"
