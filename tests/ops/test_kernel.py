"""The loop nest of each kernel: its extents, and which of them index each operand."""

from __future__ import annotations

import pytest

from gpuir.ir.errors import TextError
from gpuir.ops import kernel as k
from gpuir.text import parse


def kernel(*lines: str) -> k.KernelOp:
    """The one kernel of a graph whose body lines are these, inputs first."""
    text = "\n".join(("kernel @g {", *lines, "out %y", "}")).replace("'", '"')
    (node,) = parse(text).nodes
    assert isinstance(node.op, k.KernelOp)
    return node.op


def reads(op: k.KernelOp) -> list[str]:
    return ["".join(a.dims) for a in op.space().reads]


def test_rows_of_a_square_softmax_are_told_from_its_columns():
    op = kernel(
        "in %x: f32[4, 4]",
        "in %row: f32[4, 1]",
        "in %column: f32[4]",
        "in %one: f32[]",
        "%y: f32[4, 4] = k.reduce([%x, %row, %column, %one], {",
        "in %x: f32[4, 4]",
        "in %row: f32[4, 1]",
        "in %column: f32[4]",
        "in %one: f32[]",
        "%a: f32[4, 4] = t.map('add', [%x, %row]) at 'm:a'",
        "%b: f32[4, 4] = t.map('add', [%a, %column]) at 'm:b'",
        "%c: f32[4, 4] = t.map('add', [%b, %one]) at 'm:c'",
        "%y: f32[4, 4] = t.softmax(%c, 1) at 'm:y'",
        "out %y",
        "}) at 'm:y'",
    )
    assert op.space().dims == {"o": 4, "r": 4}
    assert reads(op) == ["or", "o", "r", ""]
    assert [a.dims for a in op.space().writes] == [("o", "r")]


def test_a_group_norms_channels_are_in_both():
    op = kernel(
        "in %x: f32[2, 6, 5]",
        "param %scale: f32[6, 1]",
        "%y: f32[2, 6, 5] = k.reduce([%x, %scale], {",
        "in %x: f32[2, 6, 5]",
        "in %scale: f32[6, 1]",
        "%y: f32[2, 6, 5] = t.normalize(%x, [1, 2], scale=%scale, groups=3) at 'm:y'",
        "out %y",
        "}) at 'm:y'",
    )
    assert op.space().dims == {"o": 2 * 3, "r": 2 * 5}
    assert reads(op) == ["or", "or"]


@pytest.mark.parametrize(
    "shape, dims", {"8, 1, 1": "n", "4, 1, 1, 1": "m", "4, 8, 1, 1": "mn"}.items()
)
def test_what_a_convolution_adds_is_per_channel_or_per_cell(shape: str, dims: str):
    """Four images of one pixel and eight channels: the sizes alone do not tell."""
    op = kernel(
        "in %x: f32[4, 3, 1, 1]",
        "param %w: f32[8, 3, 1, 1]",
        f"in %v: f32[{shape}]",
        "%y: f32[4, 8, 1, 1] = k.conv([%x, %w, %v], {",
        "in %x: f32[4, 3, 1, 1]",
        "in %w: f32[8, 3, 1, 1]",
        f"in %v: f32[{shape}]",
        "%acc: f32[4, 8, 1, 1] = t.conv(%x, %w, [1, 1], [0, 0], [0, 0], [1, 1]) at 'm:y'",
        "%y: f32[4, 8, 1, 1] = t.map('add', [%acc, %v]) at 'm:y'",
        "out %y",
        "}) at 'm:y'",
    )
    assert op.space().dims == {"b": 1, "m": 4, "n": 8, "k": 3}
    assert reads(op) == ["mk", "nk", dims]


@pytest.mark.parametrize(
    "name, holds",
    [
        ("k.gemm", "t.matmul"),
        ("k.reduce", "reducing ops"),
        ("k.pool", "t.pool or t.pool_gradient"),
        ("k.experts", "t.experts"),
        ("k.attention_gradient", "t.attention_gradient"),
        ("k.experts_gradient", "t.experts_gradient"),
    ],
)
def test_a_body_without_its_op_is_refused(name: str, holds: str):
    body = "in %x: f32[2]\n%y: f32[2] = t.map('relu', [%x]) at 'm:y'\nout %y"
    with pytest.raises(TextError, match=rf"does not contain .*; found t.map\n  expected: {holds}"):
        kernel("in %x: f32[2]", f"%y: f32[2] = {name}([%x], {{\n{body}\n}}) at 'm:y'")


@pytest.mark.parametrize(
    "name, op, type",
    [
        ("k.map", "t.softmax(%x, 0)", "f32[2]"),
        ("k.map", "t.reduce('sum', %x, [0])", "f32[]"),
        ("k.map", "t.cumulative('sum', %x, 0)", "f32[2]"),
        ("k.copy", "t.map('relu', [%x])", "f32[2]"),
        ("k.view", "t.softmax(%x, 0)", "f32[2]"),
    ],
)
def test_a_body_with_what_its_kernel_does_not_do_is_refused(name: str, op: str, type: str):
    body = f"in %x: f32[2]\n%y: {type} = {op} at 'm:y'\nout %y"
    with pytest.raises(TextError, match=rf"{name}: the body holds t\.\w+, which"):
        kernel("in %x: f32[2]", f"%y: {type} = {name}([%x], {{\n{body}\n}}) at 'm:y'")


def test_an_epilogue_with_a_reduction_is_refused():
    with pytest.raises(TextError, match=r"k\.gemm: the body holds t\.reduce"):
        kernel(
            "in %x: f32[2, 3]",
            "param %w: f32[3, 4]",
            "%y: f32[2] = k.gemm([%x, %w], {",
            "in %x: f32[2, 3]",
            "in %w: f32[3, 4]",
            "%acc: f32[2, 4] = t.matmul(%x, %w) at 'm:y'",
            "%y: f32[2] = t.reduce('sum', %acc, [1]) at 'm:y'",
            "out %y",
            "}) at 'm:y'",
        )
