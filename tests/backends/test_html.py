"""The HTML report: its text, and what a real browser makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import strategies
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gpuir
from gpuir.backends.html import page
from gpuir.backends.html.data import data
from gpuir.backends.terminal import Terminal
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.report.answer import Answer
from gpuir.report.equal import alike
from gpuir.targets.profile import profile_names
from gpuir.targets.support import refusal

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENCODER = HERE.parent.parent / "tests" / "encoder.onnx"
NASTY = "</script><img src=x onerror=alert(1)>\"'&amp; Ä層\u2028${x}\\"

pytest.importorskip("itables", reason="pip install 'gpuir[html]'")
pytest.importorskip("plotly", reason="pip install 'gpuir[html]'")


@cache
def encoder(*targets: str) -> tuple[Answer, ...]:
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32})
    return tuple(gpuir.analyze(g, target, batch=2) for target in targets)


def mixed() -> Answer:
    g = gpuir.load(HERE / "mixed.gir")
    return gpuir.analyze(g, warnings=["one thing is odd"])


def nasty() -> Answer:
    """A model whose names try everything."""
    g = gpuir.parse(gpuir.show(encoder("a100")[0].graph).replace("layer.0/", "LAYER/"))
    nodes = tuple(
        replace(n, locs=tuple(loc.replace("LAYER", NASTY) for loc in n.locs)) for n in g.nodes
    )
    return gpuir.analyze(replace(g, name=NASTY, nodes=nodes), warnings=[NASTY])


def nothing() -> Answer:
    g = gpuir.parse("graph @nothing {\n  in %x: f32[8]\n  out %x\n}")
    return gpuir.analyze(g, "a100")


def html(summaries: Sequence[Answer]) -> str:
    return page.html(summaries, Terminal())


def blob(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    return json.loads(found[1])


def without_libraries(text: str) -> str:
    return re.sub(r'(<script type="text/plain"[^>]*>).*?(</script>)', r"\1\2", text, flags=re.S)


# ---------------------------------------------------------------------------- the text


def test_the_same_runs_give_the_same_page():
    assert html(encoder("a100", "l4")) == html(encoder("a100", "l4"))


def test_the_page_names_nothing_outside_itself():
    text = without_libraries(html([mixed()]))
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "@import" not in text and "url(" not in text


def test_names_cannot_break_out_of_the_page():
    text = html([nasty()])
    assert text.count("</script") == text.count("<script") == 4
    assert "<img" not in text
    run = blob(text)["runs"][0]
    assert run["model"] == NASTY
    assert any(NASTY in word for word in blob(text)["words"])


def test_a_name_that_is_no_unicode_is_still_json():
    g = encoder("a100")[0].graph
    text = html([gpuir.analyze(replace(g, name="half \ud800 a pair"))])
    assert blob(text)["runs"][0]["model"] == "half \ud800 a pair"


def test_each_kernel_has_the_lines_that_explain_it():
    (s,) = encoder("a100")
    found = data([s])
    words, (run,) = found["words"], found["runs"]
    assert len(run["kernels"]) == len(s.slowest())
    for group, of_run in zip(alike(s), run["groups"], strict=True):
        lines = [(words[name], value) for name, value, *_ in of_run["lines"]]
        assert lines == [(line.name, line.value) for line in s.explain(group.one)]
        assert ("time", group.one.cost.time_s) in [(n, pytest.approx(v)) for n, v in lines]


def test_parts_add_up():
    for s in (mixed(), *encoder("a100")):
        for parts in data([s])["runs"][0]["trees"].values():
            inside = [0.0] * len(parts)
            for parent, _, time_s, *_ in parts:
                if parent >= 0:
                    inside[parent] += time_s
            for (_, label, time_s, *_), parts_s in zip(parts, inside, strict=True):
                assert parts_s <= time_s * (1 + 1e-9), label
            assert parts[0][2] == pytest.approx(s.device_s)


@given(
    strategies.graphs(), st.sampled_from(profile_names()), st.sampled_from(["a100", "t4", "mi300x"])
)
@settings(max_examples=25)
def test_any_graph_is_data_that_a_page_can_hold(g: Graph, profile: str, target: str):
    kernels = gpuir.lower(g, profile=profile)
    assume(not refusal(kernels, gpuir.load_target(target)))  # TensorRT on AMD
    s = gpuir.analyze(kernels, target)
    (run,) = json.loads(json.dumps(data([s]), allow_nan=False))["runs"]
    assert run["latency"] == s.latency_s
    assert sum(len(lane[1]) for lane in run["lanes"]) == len(s.timeline.spans)
    times = sum(g["runs"] * g["time"] for g in run["groups"])
    assert times == pytest.approx(s.device_s)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "LIBRARIES", {"plotly": ("no_such_package", "x.js")})
    with pytest.raises(UsageError, match="needs no_such_package") as error:
        html([mixed()])
    assert error.value.fix == "pip install 'gpuir[html]'"


# ---------------------------------------------------------------------------- in a browser

FLAGS = (
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: that of the system, else playwright's own."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install 'gpuir[test]'")
    with api.sync_playwright() as p:
        known = ("chromium", "chromium-browser", "google-chrome", "chrome")
        path = next(filter(None, map(shutil.which, known)), p.chromium.executable_path)
        if not os.path.exists(path):
            pytest.skip("no browser: `apt-get install chromium` or `playwright install chromium`")
        found = p.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


class Opened:
    """A page in the browser, and what it complained of or asked for."""

    def __init__(self, tab: Any, path: Path):
        self.tab, self.complaints, self.requests = tab, list[str](), list[str]()
        tab.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        tab.on("pageerror", lambda e: self.complaints.append(str(e)))
        tab.on("request", lambda r: self.requests.append(r.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", timeout=60_000)


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    tabs: list[Any] = []

    def opens(summaries: Sequence[Answer], **options: Any) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(html(summaries), encoding="utf-8", errors="replace")
        tabs.append(browser.new_page(**options))
        return Opened(tabs[-1], path)

    yield opens
    for tab in tabs:
        tab.close()


def shared(browser: Any, folder: Path, *targets: str) -> Iterator[Any]:
    """A page of the encoder that several tests look at, as opening one takes seconds."""
    path = folder / "encoder.html"
    path.write_text(html(encoder(*targets)), encoding="utf-8")
    with browser.new_page() as tab:
        yield Opened(tab, path)


@pytest.fixture(scope="module")
def one(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from shared(browser, tmp_path_factory.mktemp("one"), "a100")


@pytest.fixture(scope="module")
def two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from shared(browser, tmp_path_factory.mktemp("two"), "a100", "l4")


@pytest.fixture
def tab(one: Any) -> Any:
    """The encoder's page as it opens."""
    one.tab.keyboard.press("Escape")
    for label in ("by module", "by kind of kernel", "every kernel", "equal kernels"):
        one.tab.get_by_label(label).check()  # a new table each time
    return one.tab


def table_rows(tab: Any) -> list[str]:
    return tab.locator("#table tbody tr").all_inner_texts()


@pytest.mark.parametrize("which", ["encoder", "mixed", "nasty", "nothing"])
def test_it_opens_without_complaint_or_request(opened: Any, one: Any, which: str):
    if which == "encoder":
        (s,), found = encoder("a100"), one
    else:
        s = {"mixed": mixed, "nasty": nasty, "nothing": nothing}[which]()
        found = opened([s])
    assert found.complaints == []
    assert not [url for url in found.requests if not url.startswith(("file:", "blob:"))]
    charts = found.tab.locator(".chart")
    assert charts.count() == 4
    for i in range(4):
        assert charts.nth(i).locator("svg.main-svg").count()
    assert found.tab.locator("img").count() == 0
    assert found.tab.locator("h1").inner_text().startswith(s.model.split("\u2028")[0])


def test_search_narrows_the_table(tab: Any):
    every = len(table_rows(tab))
    tab.get_by_label("Search").fill("gemm")
    some = table_rows(tab)
    assert 0 < len(some) < every and all("gemm" in row for row in some)
    tab.get_by_label("Search").fill("no kernel has the name")
    assert "No matching" in table_rows(tab)[0]


def test_kernels_of_one_kind_are_chosen(tab: Any):
    every = len(table_rows(tab))
    choice = tab.get_by_role("combobox", name="kernel")
    choice.select_option("map")
    assert 0 < len(table_rows(tab)) < every
    assert all("map" in row for row in table_rows(tab))
    choice.select_option("any")
    assert len(table_rows(tab)) == every


def test_columns_sort_by_number_and_say_so(tab: Any):
    (s,) = encoder("a100")
    times = [x.time_s for x in alike(s)]
    assert times == sorted(times, reverse=True)
    first = table_rows(tab)[0]
    tab.wait_for_selector('th[aria-sort="descending"]:has-text("time")')
    tab.get_by_role("columnheader", name="time time").click()  # coverage has such a column too
    tab.wait_for_selector('th[aria-sort="ascending"]:has-text("time")')
    assert table_rows(tab)[-1] == first
    tab.get_by_role("button", name="each").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector('th[aria-sort="descending"]:has-text("each")')
    assert tab.locator("th[aria-sort]").count() == 1


def test_enter_explains_a_kernel_and_escape_goes_back(tab: Any):
    (s,) = encoder("a100")
    slowest = alike(s)[0]
    button = tab.locator("#table button.row").first
    button.focus()
    tab.keyboard.press("Enter")
    dialog = tab.get_by_role("dialog")
    assert dialog.is_visible()
    text = dialog.inner_text()
    for line in s.explain(slowest.one):
        assert line.name in text and line.formula in text and line.source in text
    tab.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert button.evaluate("button => button === document.activeElement")


def test_a_click_on_a_row_or_a_point_explains_it(tab: Any):
    tab.locator("#table tbody tr").nth(1).locator("td").nth(3).click()
    assert tab.get_by_role("dialog").is_visible()
    tab.get_by_role("button", name="Close").click()
    assert not tab.get_by_role("dialog").is_visible()
    tab.locator("#chart-roofline .points path").first.hover(force=True)
    tab.mouse.down()
    tab.mouse.up()
    assert tab.get_by_role("dialog").is_visible()


def test_names_of_roofs_that_are_nearly_as_high_are_beside_each_other(opened: Any):
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32})
    costed = gpuir.analyze(g, "a100+flops_per_s.vector.f32=1.5e14", tf32=True).graph
    names = opened([gpuir.analyze(costed)]).tab.locator("#chart-roofline .annotation-text")
    a, b = (x.bounding_box() for x in names.filter(has_text="flop/s").all())
    left, right = sorted((a, b), key=lambda box: box["x"])
    assert left["x"] + left["width"] <= right["x"]


def test_every_kernel_has_a_row(tab: Any):
    (s,) = encoder("a100")
    tab.get_by_label("every kernel").check()
    assert f"of {len(s.slowest()):,} entries" in tab.locator(".dt-info").inner_text()
    tab.get_by_label("Search").fill("layer.7/intermediate")
    assert 0 < len(table_rows(tab)) < 20


def test_a_run_is_chosen(two: Any):
    runs, tab = encoder("a100", "l4"), two.tab
    assert tab.locator("#comparison tbody tr").count() == 2
    summary = tab.locator("#summary .run:visible")
    before = table_rows(tab)
    assert summary.locator("h3").inner_text() == runs[0].device.name
    tab.get_by_role("combobox", name="Run").select_option(label=runs[1].device.name)
    assert summary.locator("h3").inner_text() == runs[1].device.name
    assert table_rows(tab) != before


def test_parts_by_module(tab: Any):
    tab.get_by_label("by module").check()
    labels = tab.locator("#chart-time .slicetext").all_text_contents()
    assert any("intermediate" in label for label in labels)


def brightness(tab: Any) -> float:
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / (3 * 255)


def test_dark_as_the_system_is_or_as_chosen(opened: Any):
    tab = opened([mixed()], color_scheme="dark").tab
    assert brightness(tab) < 0.2
    tab.get_by_label("Theme").select_option("light")
    assert brightness(tab) > 0.8


def test_a_laptop_shows_the_tiles(tab: Any):
    before = tab.viewport_size
    tab.set_viewport_size({"width": 1366, "height": 768})
    title = tab.locator("#table thead th").filter(has_text="tile").bounding_box()
    around = tab.locator("#table").locator("xpath=ancestor::*[contains(@class, 'scroll')]")
    room = around.first.bounding_box()
    tab.set_viewport_size(before)
    assert title["x"] + title["width"] <= room["x"] + room["width"] <= 1366


def test_it_fits_a_phone(opened: Any):
    tab = opened(encoder("a100", "l4"), viewport={"width": 390, "height": 844}).tab
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_print_leaves_out_what_paper_cannot_do(opened: Any):
    tab = opened([mixed()], color_scheme="dark").tab
    assert tab.pdf(format="A4").startswith(b"%PDF")
    tab.emulate_media(media="print")
    assert brightness(tab) == 1
    assert not tab.get_by_role("navigation", name="Sections").is_visible()
    assert not tab.get_by_label("Search").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(two: Any, scheme: str):
    """axe-core's rules, WCAG's contrast among them, on the page and on an explanation."""
    axe = pytest.importorskip("axe_playwright_python", reason="pip install 'gpuir[test]'")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    tab = two.tab
    tab.keyboard.press("Escape")
    tab.emulate_media(color_scheme=scheme)
    assert (brightness(tab) < 0.5) == (scheme == "dark")
    tab.evaluate(script)
    for explained in (False, True):
        if explained:
            tab.locator("#table button.row").first.click()
        found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []


def long_chain(nodes: int) -> Graph:
    lines = [
        f'  %v{i + 1}: f32[4096] = t.map("exp", [%v{i}]) at "chain:n{i}"' for i in range(nodes)
    ]
    return gpuir.parse(
        "\n".join(["graph @chain {", "  in %v0: f32[4096]", *lines, f"  out %v{nodes}", "}"])
    )


def test_thousands_of_kernels_stay_quick(opened: Any):
    """A bar is a pixel or more: of 5,000 launches few are drawn until one zooms in."""
    g = gpuir.analyze(long_chain(5000), "a100", profile="eager").graph
    s = gpuir.analyze(g)
    assert s.launches == 5000
    text = html([s])
    assert len(text) < 4e6
    found = opened([s])
    bars = found.tab.locator("#chart-timeline .point")
    assert bars.count() < 3000
    shades = (
        "document.querySelector('#chart-timeline').data.map(t => Math.min(...t.marker.opacity))"
    )
    assert max(found.tab.evaluate(shades)) < 0.5  # neither the host nor the device fills its lane
    zoom = """async ([from, to]) => {
        const start = performance.now();
        await Plotly.relayout("chart-timeline", {"xaxis.range": [from, to]});
        return performance.now() - start;
    }"""
    assert found.tab.evaluate(zoom, [0.5 * s.latency_s, 0.502 * s.latency_s]) < 5000
    assert 10 <= bars.count() <= 50
    assert found.complaints == []
