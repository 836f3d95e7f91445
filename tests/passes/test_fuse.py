"""Grouping into launches, where golden text would be too long."""

from __future__ import annotations

import pytest

from gpuir.ir.errors import UsageError
from gpuir.stacks.table import pipeline
from gpuir.text import parse


def test_sixty_ops_that_each_read_the_last_two_end_one_epilogue():
    """The number of ways through them grows like Fibonacci's numbers; the work must not."""
    ops = [f"%{i}: f32[8, 8] = t.map('add', [%{i - 1}, %{i - 2}]) at 'm:{i}'" for i in range(2, 60)]
    lines = [
        "graph @g {",
        "in %x: f32[8, 8]",
        "%c: f32[8, 8] = t.matmul(%x, %x) at 'm:c'",
        "%0: f32[8, 8] = t.map('relu', [%c]) at 'm:0'",
        "%1: f32[8, 8] = t.map('exp', [%0]) at 'm:1'",
        *ops,
        "%y: f32[8, 8] = t.map('mul', [%59, %c]) at 'm:y'",
        "out %y",
        "}",
    ]
    fused = pipeline("fuse").run(parse("\n".join(lines).replace("'", '"')))
    assert [len(node.op.regions[0].nodes) for node in fused.nodes] == [62]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("cnv>relu", "no op has the name 'cnv'"),
        ("conv*>mul+ad", "no op has the name 'ad'"),
        ("conv>relu*", "no op has the name 'relu\\*'"),
        ("relu>map", "no op has the name 'map'"),
        ("map>map>map", "a rule is not valid"),
        ("map", "a rule is not valid"),
    ],
)
def test_rules_that_nothing_can_follow_are_refused(rules: str, message: str):
    with pytest.raises(UsageError, match=message):
        pipeline(f'fuse{{rules="{rules}"}}')
