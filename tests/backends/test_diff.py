"""Reports compared: which kernels belong together, what is said of them, and budgets."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs

import gpuir
from gpuir.backends.diff import diff_report, junit
from gpuir.backends.table import BACKENDS, FORMATS
from gpuir.backends.terminal import Terminal, cell_width
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.report.answer import Answer
from gpuir.report.diff import BudgetCheck, Diff, changes, checks, compare, groups, read_budget
from gpuir.report.saved import SavedKernel, SavedRun, read_report

LAYERS = """graph @layers {
  in %x: f16[256, 512]
  param %w: f16[512, 512]
  param %v: f16[512, 512]
  %a: f16[256, 512] = t.matmul(%x, %w) at "m.onnx:/layer.0/MatMul"
  %b: f16[256, 512] = t.map("relu", [%a]) at "m.onnx:/layer.0/Relu"
  %c: f16[256, 512] = t.matmul(%b, %v) at "m.onnx:/layer.1/MatMul"
  %d: f16[256, 512] = t.map("relu", [%c]) at "m.onnx:/layer.1/Relu"
  %e: f16[256, 512] = t.softmax(%d, 1) at "m.onnx:/Softmax"
  out %e
}
"""


def summary(profile: str = "eager", target: str = "a100", text: str = LAYERS) -> Answer:
    return gpuir.analyze(gpuir.load_text(text), target, profile=profile, batch=256)


def saved(*summaries: Answer) -> tuple[SavedRun, ...]:
    return read_report(BACKENDS["json"](summaries, Terminal()), "report.json")


def diff(old: Answer, new: Answer) -> Diff:
    (found,) = compare(saved(old), saved(new))
    return found


def entry(
    name: str = "", time_s: float = 1e-6, op: str = "k.map", shape: str = "f32 i=8"
) -> SavedKernel:
    nodes = tuple(name.split("+")) if name else ()
    return SavedKernel(op, shape, "8", "memory", nodes, name or "v", 1, time_s)


def whats(old: Sequence[SavedKernel], new: Sequence[SavedKernel]) -> dict[str, str]:
    return {(c.new or c.old)[0].name: c.what for c in changes(old, new)}


# ---------------------------------------------------------------------------- kernels


def test_kernels_of_the_same_model_nodes_belong_together():
    old = [entry("a"), entry("b"), entry("b"), entry("c", shape="f32 i=8")]
    new = [entry("c", shape="f32 i=16"), entry("b"), entry("b"), entry("a")]
    assert whats(old, new) == {"a": "", "b": "", "c": "shape"}


def test_what_was_fused_or_split_is_one_change():
    assert whats([entry("a"), entry("b"), entry("c")], [entry("a+b"), entry("c")]) == {
        "b": "2 fused to 1",
        "c": "",
    }
    assert whats([entry("a+b")], [entry("a"), entry("b")]) == {"a": "1 split to 2"}


def test_numbers_of_nodes_move_on_where_one_is_added():
    """As torch numbers them: a product of another shape comes first, and mm_1 is another one."""
    big = "f32 i=64"
    old = [entry("fc/mm"), entry("fc/mm_1/backward", shape=big), entry("fc/mm_2/backward")]
    new = [
        *(entry("fc/mm"), entry("fc/mm_1/backward", shape="f32 i=9")),
        *(entry("fc/mm_2/backward", shape=big), entry("fc/mm_3/backward")),
    ]
    found = {c.new[0].name: (c.old[0].name if c.old else "", c.what) for c in changes(old, new)}
    assert found == {
        "fc/mm": ("fc/mm", ""),
        "fc/mm_1/backward": ("", "new"),
        "fc/mm_2/backward": ("fc/mm_1/backward", ""),
        "fc/mm_3/backward": ("fc/mm_2/backward", ""),
    }


def test_numbers_of_nodes_are_trusted_where_all_are_there():
    old = [entry("MatMul_3", shape="f32 i=8"), entry("MatMul_5", shape="f32 i=4")]
    new = [entry("MatMul_3", shape="f32 i=16"), entry("MatMul_5", shape="f32 i=8")]
    assert whats(old, new) == {"MatMul_3": "shape", "MatMul_5": "shape"}


def test_without_names_in_common_op_and_shape_decide():
    old, new = [entry("x1"), entry("x2", op="k.gemm")], [entry("y1"), entry("y2", shape="f32 i=9")]
    assert whats(old, new) == {"y1": "", "y2": "new", "x2": "gone"}


def test_layers_that_repeat_are_one_line():
    old = [entry(f"layer.{i}/fc", 2e-6) for i in range(12)] + [entry("head", 5e-6)]
    new = [entry(f"layer.{i}/fc", 3e-6) for i in range(12)] + [entry("head", 5e-6)]
    layers, head = groups(old, new)
    assert len(layers.changes) == 12 and layers.status == "changed"
    assert layers.new_s - layers.old_s == pytest.approx(12e-6)
    assert head.status == "same"


ENTRIES = st.lists(
    st.builds(
        entry,
        st.lists(st.sampled_from("abcdef"), max_size=3, unique=True).map("+".join),
        st.floats(1e-9, 1.0),
        st.sampled_from(["k.map", "k.gemm"]),
        st.sampled_from(["f32 i=8", "f32 i=9"]),
    ),
    max_size=8,
)


@given(ENTRIES, ENTRIES)
def test_every_kernel_is_in_one_change_and_no_time_is_lost(
    old: list[SavedKernel], new: list[SavedKernel]
):
    found = list(changes(old, new))
    for side, given_ in (("old", old), ("new", new)):
        got = [x for c in found for x in getattr(c, side)]
        assert sorted(map(id, got)) == sorted(map(id, given_))
    difference = sum(g.new_s - g.old_s for g in groups(old, new))
    expected = sum(x.time_s for x in new) - sum(x.time_s for x in old)
    assert difference == pytest.approx(expected, abs=1e-9)
    assert all(g.status == "same" for g in groups(old, old))


# ---------------------------------------------------------------------------- runs


def test_a_model_beside_itself_differs_in_nothing():
    d = diff(summary(), summary())
    assert not d.differs and "nothing differs" in written("text", [d], [], 120)


def test_fusion_is_seen_in_launches_and_kernels():
    d = diff(summary("eager"), summary("compiled"))
    assert d.name == "a100-sxm-40gb eager → compiled"
    assert d.old.values["launches"] == 5 > d.new.values["launches"]
    assert any("fused" in g.one.what for g in d.changed)
    text = written("text", [d], [], 100)
    assert "fused to 1" in text and max(map(cell_width, text.splitlines())) <= 100


def test_the_error_of_the_predictions_is_beside_the_change():
    old, new = summary(), summary()
    assert diff(old, summary(target="l4")).slower is not None
    (a,), (b,) = saved(old), saved(new)
    far = replace(b, interval_s=(1.0, 2.0), values={**b.values, "latency": 1.5})
    (d,) = compare([a], [far])
    assert (d.slower or 0) > 0.99 and "is slower in 100 % of cases: " in written(
        "text", [d], [], 120
    )
    near = replace(
        b, interval_s=a.interval_s, values={**b.values, "latency": 1.001 * a.values["latency"]}
    )
    (d,) = compare([a], [near])
    others = tuple(replace(x, tile="of another tile") for x in near.kernels)
    (unlike,) = compare([a], [replace(near, kernels=others)])
    assert 0.5 < (unlike.slower or 0) < (d.slower or 0), "kernels that are as they were cancel"
    assert "is slower in 5" in written("markdown", [d])


def test_runs_are_matched_by_name():
    old = saved(summary("eager"), summary("compiled"), summary(target="l4"))
    found = compare(old, old[::-1])
    assert [d.old.name for d in found] == [d.new.name for d in found] == [run.name for run in old]
    with pytest.raises(UsageError, match="the two reports have different targets or") as error:
        compare(old, old[:2])
    assert "l4 eager, only in the old report" in str(error.value)


def test_other_models_are_refused_and_other_names_are_not():
    other = LAYERS.replace("@layers", "@other")
    assert diff(summary(), summary(text=other)).model == "layers → other"
    for layer in ("MatMul", "Relu", "Softmax"):
        other = other.replace(f'/{layer}"', f'/{layer}_9"')
    assert not diff(summary(), summary(text=other)).changed
    other = other.replace("512", "640")
    with pytest.raises(UsageError, match="two different models"):
        diff(summary(), summary(text=other))


def test_what_else_changed_is_told():
    d = diff(summary(), gpuir.analyze(summary().graph, warnings=["odd"], batch=8))
    assert d.notes == ("batch: 256 → 8", "warnings, new: odd")
    (a,) = saved(summary())
    faster = replace(a, numbers={**a.numbers, "sms": 200}, predictors=("tile@9",))
    faster = replace(faster, nodes={**a.nodes, "opaque": 2})
    (d,) = compare([a], [faster])
    assert "predictor: tile@2 → tile@9" in d.notes and "target: sms 108 → 200" in d.notes
    assert "opaque model nodes: 0 → 2" in d.notes


# ---------------------------------------------------------------------------- reports


def report(**changed: Any) -> dict[str, Any]:
    found = json.loads(BACKENDS["json"]([summary()], Terminal()))
    found["reports"][0] |= changed
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a report"),
        ('{"a": 1}', "not a report"),
        ('{"schema": "gpuir.largest/1"}', "not a report"),
        ('{"schema": "gpuir.report/1"}', "another schema version"),
        ('{"schema": "gpuir.report/2"}', "has no reports"),
        ('{"schema": "gpuir.report/2", "reports": []}', "contains no runs"),
        ('{"schema": "gpuir.report/2", "reports": [3]}', r"has no reports\[0\].latency_s"),
        (json.dumps(report(latency_s="fast")), "latency_s has the wrong type"),
        (json.dumps(report(latency_s=-1)), "latency_s has the wrong type"),
        (json.dumps(report(latency_s=float("nan"))), "NaN is not a valid JSON number"),
        (json.dumps(report(interval_s=[1])), "interval_s has the wrong type"),
        (json.dumps(report(kernels=[{}])), r"has no reports\[0\].kernels\[0\].op"),
        (json.dumps(report(totals=None)), "totals has the wrong type"),
    ],
)
def test_what_is_no_report_is_said_to_be_none(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        read_report(text, "report.json")


def test_a_field_more_does_not_matter():
    assert read_report(json.dumps(report(extra=1)), "r.json") == saved(summary())


# ---------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("text", "old", "limit"),
    [
        ("latency=+3%", 1.0, 1.03),
        ("latency=-10%", 1.0, 0.9),
        ("latency=+50us", 1.0, 1.00005),
        ("latency = 12ms", 1.0, 0.012),
        ("memory=+100MB", 1e9, 1.1e9),
        ("memory=2GiB", 1e9, 2**31),
        ("launches=+0", 7, 7),
        ("launches=400", 7, 400),
        ("opaque=+1", 0, 1),
        ("flops=+1e-1%", 1e9, 1.001e9),
        ("bytes=+0.5kB", 0, 500),
    ],
)
def test_budgets(text: str, old: float, limit: float):
    assert read_budget(text).limit(old) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latncy=+3%", "did you mean latency"),
        ("latency", "not a budget"),
        ("latency=", "not a budget"),
        ("latency=+3", "which unit"),
        ("latency=3%", "needs a sign"),
        ("latency=+3MB", "the unit 'MB' does not belong"),
        ("memory=+3", "which unit"),
        ("launches=+3us", "the unit 'us' does not belong"),
        ("latency=+x%", "not a budget"),
        ("latency=+3%%", "not a budget"),
    ],
)
def test_what_is_no_budget_is_said_to_be_none(text: str, message: str):
    with pytest.raises(UsageError) as error:
        read_budget(text)
    assert message in str(error.value)


def test_a_budget_is_kept_up_to_its_limit():
    (a,) = saved(summary())
    for share, kept in ((1.03, True), (1.031, False), (0.5, True)):
        b = replace(a, values={**a.values, "latency": share * a.values["latency"]})
        (check,) = checks(compare([a], [b]), [read_budget("latency=+3%")])
        assert check.is_kept is kept


# ---------------------------------------------------------------------------- formats


def written(
    form: str,
    diffs: Sequence[Diff],
    checks: Sequence[BudgetCheck] = (),
    width: int = 120,
    top: int = 15,
) -> Any:
    return FORMATS[form](diff_report(diffs, checks, top), Terminal(width))


BUDGETS = [read_budget("latency=+3%"), read_budget("memory=1kB")]


def test_json_has_the_numbers():
    diffs = compare(saved(summary()), saved(summary("compiled")))
    found = json.loads(written("json", diffs, checks(diffs, BUDGETS)))
    (run,) = found["runs"]
    assert found["kept"] is False and [b["kept"] for b in run["budgets"]] == [True, False]
    assert run["metrics"]["launches"] == {"old": 5, "new": diffs[0].new.values["launches"]}
    for side in ("old", "new"):
        listed = [x for g in run["kernels"] for group in g[side] for x in group]
        device = run["metrics"]["device"][side]
        assert sum(x["time_s"] for x in listed) == pytest.approx(device, rel=1e-6)


def test_junit_has_a_case_a_budget_and_run():
    both = saved(summary(), summary(target="l4"))
    diffs = compare(both, both)
    suites = ElementTree.fromstring(junit(checks(diffs, BUDGETS)))
    assert (suites.get("tests"), suites.get("failures")) == ("4", "2")
    cases = {
        (c.get("classname"), c.get("name")): c.find("failure") for c in suites.iter("testcase")
    }
    assert cases["l4 eager", "latency=+3%"] is None
    failure = cases["l4 eager", "memory=1kB"]
    assert failure is not None and "OVER" in str(failure.text)


def test_markdown_keeps_its_tables_whatever_names_hold():
    evil = LAYERS.replace("/Softmax", "a|b`c\\n<details>*_x_*")
    diffs = compare(saved(summary()), saved(summary("compiled", text=evil)))
    text = written("markdown", diffs, checks(diffs, BUDGETS))
    assert text.startswith("## 1 of 2 budgets exceeded\n") and text.count("</details>") == 1
    cells: int | None = None
    for line in text.splitlines():
        count = line.replace("\\|", "").count("|") if line.startswith("|") else None
        assert count is None or cells is None or count == cells, line
        cells = count
    assert "a\\|b'c?" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_tables_fit_their_width(width: int):
    both = saved(summary(), summary(target="l4"))
    other = saved(summary("compiled"), summary("compiled", target="l4"))
    renamed = [replace(b, profile=a.profile) for a, b in zip(both, other, strict=True)]
    diffs = compare(both, renamed)
    text = written("text", diffs, checks(diffs, BUDGETS), width)
    assert max(map(cell_width, text.splitlines())) <= width
    assert "layers: 2 runs compared" in text


def test_the_rest_of_the_kernels_is_counted():
    d = diff(summary("eager"), summary("compiled"))
    for form in ("text", "markdown"):
        text = written(form, [d], top=0)
        assert re.search(r"1 more, -[\d.]+ us: see --top\n+3 unchanged kernels", text)


@settings(max_examples=15)
@given(g=graphs())
def test_any_graph_beside_itself_and_another_profile(g: Graph):
    eager, ort = (gpuir.analyze(g, "a100", profile=p) for p in ("eager", "ort"))
    (same,) = compare(saved(eager), saved(eager))
    assert not same.differs
    diffs = compare(saved(eager), saved(ort))
    for format in FORMATS:
        assert written(format, diffs, checks(diffs, BUDGETS))
    ElementTree.fromstring(junit(checks(diffs, BUDGETS)))
