"""A summary as the last line of a notebook's cell."""

from __future__ import annotations

import re
from html import unescape

import gpuir


def test_a_notebook_shows_the_answers_and_the_slowest_kernels():
    g = gpuir.analyze("examples/encoder.onnx", "a100", dims={"batch": 8, "seq": 128}).graph
    s = gpuir.analyze(g)
    shown = s._repr_html_()
    cells = [unescape(c) for c in re.findall(r"<t[dh]>(.*?)</t[dh]>", shown)]
    assert cells[:2] == ["latency", f"{s.latency_s * 1e3:.4g} ms"]
    assert "80 % of cases" in cells and "bound" in cells
    assert s.slowest()[0].name in cells[cells.index("node") :]


def test_what_does_not_fit_says_so_first():
    g = gpuir.analyze("examples/encoder.onnx", "t4", dims={"batch": 1024, "seq": 512}).graph
    shown = gpuir.analyze(g)._repr_html_()
    cells = [unescape(c) for c in re.findall(r"<t[dh]>(.*?)</t[dh]>", shown)]
    assert cells[0] == "does not fit" and re.match(r"\S+ GB short; --target \S+ fits", cells[1])


def test_names_of_a_model_cannot_be_markup():
    g = gpuir.parse(
        'graph @"<script>alert(1)</script>" {\n  in %x: f32[4]\n'
        '  %y: f32[4] = t.map("relu", [%x]) at "a"\n  out %y\n}\n'
    )
    shown = gpuir.analyze(g, "a100")._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown
