"""What a report says of a graph beyond its kernels."""

from __future__ import annotations

import pytest

import gpuir

IMAGES = "in %x: f32[16, 3, 8, 8]"
WORDS = "in %x: i64[16, 8]"


def batch_of(inputs: str, body: str, batch: int | None = None) -> int | None:
    graph = gpuir.load_text(f"graph @g {{\n  {inputs}\n  {body}\n}}\n")
    return gpuir.analyze(graph, "a100", profile="ideal", batch=batch).batch


@pytest.mark.parametrize(
    ("inputs", "op", "type", "batch"),
    [
        (IMAGES, 't.map("relu", [%x])', "f32[16, 3, 8, 8]", 16),
        (IMAGES, 't.reduce("sum", %x, [0, 1, 2, 3])', "f32[]", 16),  # a loss
        (IMAGES, 't.reduce("sum", %x, [0])', "f32[3, 8, 8]", None),
        (WORDS, 't.map("add", [%x], [1])', "i64[16, 8]", 16),
        ("in %x: f32[16, 8]", 't.map("relu", [%x])', "f32[16, 8]", None),  # tokens, or a batch
        ("in %x: f32[1, 3, 8, 8]", 't.map("relu", [%x])', "f32[1, 3, 8, 8]", None),
    ],
)
def test_the_batch_that_a_graph_was_built_for(inputs: str, op: str, type: str, batch: int | None):
    body = f'%y: {type} = {op} at "g:y"\n  out %y'
    assert batch_of(inputs, body) == batch
    assert batch_of(inputs, body, batch=3) == 3


def test_inputs_of_several_batches_have_none():
    body = '%y: f32[16, 3, 8, 8] = t.map("relu", [%x]) at "g:y"\n  out %y'
    assert batch_of(f"{IMAGES}\n  in %z: i64[4]", body) is None
