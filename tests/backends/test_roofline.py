"""The roofline as records and as a picture."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import gpuir
from gpuir.backends.picture import matplotlib, picture
from gpuir.backends.roofline import _draw as draw_on
from gpuir.backends.roofline import roofline
from gpuir.backends.terminal import Terminal
from gpuir.ir.errors import UsageError
from gpuir.report.answer import Answer
from gpuir.report.equal import alike
from gpuir.report.roofline import ceilings, memories, points

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENCODER = HERE.parent.parent / "tests" / "encoder.onnx"


@cache
def encoder(target: str, predictor: str = "tile", tf32: bool | None = None) -> Answer:
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32})
    return gpuir.analyze(g, target, predictor=predictor, tf32=tf32)


def test_no_kernel_is_above_the_roofs_of_the_textbook_bound():
    """What the roofline predicts lies under the highest ceiling, and under its memory's line."""
    s = encoder("a100", "roofline")
    groups = alike(s)
    top = max(roof.rate for roof in ceilings(s, groups))
    (dram,) = [m.rate for m in memories(s) if m.name == "memory"]
    assert points(groups)
    for p in points(groups):
        assert p.rate <= min(top, p.intensity * dram)


def test_ceilings_are_those_that_the_kernels_could_reach():
    s = encoder("a100", tf32=True)
    found = {roof.name: roof.rate for roof in ceilings(s, alike(s))}
    assert found["tensor tf32"] == 156e12 and found["vector f32"] == 19.5e12
    assert not any("f64" in name or "i8" in name for name in found)


def test_three_products_for_one_have_a_third_of_a_ceiling():
    x = "f32[2, 4, 64, 64]"
    text = f"""graph @g {{
      in %q: {x}
      in %k: {x}
      in %v: {x}
      %y: {x} = t.attention(%q, %k, %v, scale=0.125) at "m:attention"
      out %y
    }}"""
    s = gpuir.analyze(gpuir.load_text(text), "a100", profile="eager")
    assert [(r.name, r.rate) for r in ceilings(s, alike(s))] == [("tensor tf32 / 3", 52e12)]


def test_memories_are_in_order_of_speed():
    assert [m.name for m in memories(encoder("a100"))] == ["L2", "memory"]


@pytest.mark.parametrize(
    ("name", "magic"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("X.PDF", b"%PDF")]
)
def test_the_files_name_says_the_form_and_the_same_runs_are_the_same_bytes(name: str, magic: bytes):
    pytest.importorskip("matplotlib", reason="pip install 'gpuir[plot]'")
    runs = [encoder("a100"), encoder("l4")]
    picture = roofline(runs, Terminal(file=name))
    assert picture.startswith(magic)
    assert roofline(runs, Terminal(file=name)) == picture
    assert b"Matplotlib v" not in picture[:2000] if name.endswith("png") else True


def test_one_run_shows_its_kinds_and_any_name():
    pytest.importorskip("matplotlib", reason="pip install 'gpuir[plot]'")
    s = replace(encoder("a100"), model="$x_{1}$ <&> \\frac{")
    assert len(roofline([s], Terminal(file="one.svg"))) > 10_000


@pytest.mark.parametrize("vector", [19.5e12, 150e12])
def test_no_label_lies_on_another(vector: float):
    """Nor where roofs are nearly the same, of memories and of arithmetic."""
    pytest.importorskip("matplotlib")
    path = matplotlib("matplotlib.path").Path
    target = f"a100+flops_per_s.vector.f32={vector}+l2.bytes_per_s=1.6e12"
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32})
    s = gpuir.analyze(g, target, tf32=True)
    areas: list[Any] = []

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        draw_on(axes, [s])
        turned = matplotlib("matplotlib.transforms").Affine2D
        for text in axes.texts:
            degrees, (x, y) = text.get_rotation(), axes.transData.transform(text.get_position())
            text.set_rotation(0)
            box = text.get_window_extent()
            text.set_rotation(degrees)
            corners = [(0, 0), (box.width, 0), (box.width, box.height), (0, box.height)]
            areas.append(path(turned().rotate_deg(degrees).translate(x, y).transform(corners)))

    picture("png", (7.5, 5.0), draw)
    assert len(areas) == 4
    assert not any(a.intersects_path(b) for a, b in combinations(areas, 2))


def test_a_graph_without_arithmetic_is_drawn_too():
    pytest.importorskip("matplotlib", reason="pip install 'gpuir[plot]'")
    moves = '%y: f32[64, 8] = t.transpose(%x, [1, 0]) at "m:T"'
    text = f"graph @moves {{\n  in %x: f32[8, 64]\n  {moves}\n  out %y\n}}"
    s = gpuir.analyze(gpuir.parse(text), "a100")
    assert not points(alike(s))
    assert roofline([s], Terminal(file="none.png")).startswith(b"\x89PNG")


def test_more_runs_than_colours_have_other_shapes():
    pytest.importorskip("matplotlib", reason="pip install 'gpuir[plot]'")
    looks: list[tuple[bytes, bytes]] = []

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        draw_on(axes, [encoder("a100")] * 21)
        looks.extend(
            (x.get_facecolor().tobytes(), x.get_paths()[0].vertices.tobytes())
            for x in axes.get_legend().legend_handles
        )

    picture("png", (7.5, 5.0), draw)
    assert len(set(looks)) == 21


def test_more_runs_than_colours_and_shapes_are_refused():
    with pytest.raises(UsageError, match="shows at most 21 runs"):
        roofline([encoder("a100")] * 22, Terminal(file="x.png"))


@pytest.mark.parametrize("name", ["", "roofline", "roofline.txt"])
def test_without_such_a_name_the_fix_is_said(name: str):
    with pytest.raises(UsageError, match="is a picture") as error:
        roofline([encoder("a100")], Terminal(file=name))
    assert error.value.fix == "-o roofline.png"
