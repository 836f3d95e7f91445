"""What ranks of a pipeline hold, by the order of their microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpuir
from gpuir.passes.partition.partition import PartGraphs, partition
from gpuir.simulate.held import PartBytes, held_bytes, part_bytes
from gpuir.simulate.memory import memory
from gpuir.simulate.microbatches import Task, task_orders

ENCODER = Path(__file__).parents[2] / "tests" / "encoder.onnx"
CHAIN = """graph @g {
  in %x: f32[1024, 1024]
  param %w: f32[1024, 1024]
  param %v: f32[1024, 1024]
  %a: f32[1024, 1024] = t.matmul(%x, %w) at "m:a"
  %h: f32[1024, 1024] = t.map("gelu", [%a]) at "m:h"
  %y: f32[1024, 1024] = t.matmul(%h, %v) at "m:y"
  out %y
}"""
MB = 4 << 20  # of each tensor


def bytes_of(part: PartGraphs) -> PartBytes:
    named = {
        "forward": part.forward,
        "backward": part.backward,
        "weights": part.weights,
        "update": part.update,
    }
    lowered = {k: gpuir.lower(g, profile="eager") for k, g in named.items() if g is not None}
    return part_bytes(lowered, [v.name for v in part.saved], [v.name for v in part.kept])  # pyright: ignore


def chain(parts: int, apart: bool = False) -> list[PartBytes]:
    g = gpuir.pipeline("autodiff,optimizer{kind=sgd,momentum=0.9,fused=true}").run(
        gpuir.parse(CHAIN)
    )
    return [bytes_of(p) for p in partition(g, parts, apart=apart).parts]


def test_of_two_products_each_part_saves_what_its_gradients_read():
    """x and a for the first and its gelu, h for the second: three tensors in all. Weight, momentum
    and gradient are there once."""
    first, second = chain(2)
    assert (first.saved + second.saved) in (3 * MB, 4 * MB)  # h is sent, so in both or in one
    for part in (first, second):
        assert sorted(kind for kind, _ in part.params.values()) == [
            "gradients",
            "optimizer",
            "weights",
        ]
        assert {n for _, n in part.params.values()} == {MB}
        assert part.later == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activations_grow_by_microbatches_in_flight(schedule: str):
    part = PartBytes({"w": ("weights", 5)}, 10, 0, {"forward": 12, "backward": 3, "update": 1})
    for rank, order in enumerate(task_orders(schedule, 4, 8)):  # pyright: ignore
        flying = 8 if schedule == "gpipe" else 4 - rank
        most = max(10 * (flying - 1) + 12, 10 * flying + 3)
        assert held_bytes(order, [part]) == {"weights": 5, "activations": most}


def test_gradients_of_weights_that_wait_hold_their_share():
    """ZB-H1: rank r has p - r microbatches before their backward pass, and r behind it (arXiv
    2401.10241, section 2.1): no more than 1F1B has on the first rank."""
    part = PartBytes({}, 10, 6, {"forward": 10, "backward": 0, "weights": 0})
    most = [held_bytes(order, [part])["activations"] for order in task_orders("zero-bubble", 4, 9)]
    first = held_bytes(task_orders("1f1b", 4, 9)[0], [part])["activations"]
    assert most[0] == first == 40 and max(most) == 40 and most[3] == 10 + 3 * 6
    assert held_bytes((Task("forward", 0),), [part])["activations"] == 10


def test_chunks_of_a_rank_hold_what_they_save():
    big, small = (PartBytes({}, n, 0, {"forward": n, "backward": 0}) for n in (100, 1))
    order = task_orders("interleaved", 2, 4, 2)[0]
    flying = most = 0
    for task in order:
        own = 100 if task.chunk == 0 else 1
        flying += own if task.kind == "forward" else -own
        most = max(most, flying)
    assert held_bytes(order, [big, small])["activations"] == most


def test_gradients_of_weights_apart_keep_what_they_read():
    for part in chain(2, apart=True):
        assert 0 < part.later <= 2 * MB + part.saved
        assert set(part.needs) == {"forward", "backward", "weights", "update"}


def test_one_part_and_one_microbatch_hold_what_the_whole_graph_does():
    """But for buffers of gradients, which are there from the start."""
    options = {"dims": {"batch": 8, "seq": 128}, "train": True, "optimizer": "adamw"}
    g = gpuir.load(ENCODER, **options, fused=True, profile="eager")
    (order,) = task_orders("1f1b", 1, 1)
    (part,) = partition(g, 1).parts
    found = held_bytes((*order, Task("update", 0)), [bytes_of(part)])
    whole = memory(gpuir.lower(g))
    assert found["weights"] == whole.parts["weights"]
    assert found["optimizer"] == whole.parts["optimizer"]
    assert found["gradients"] == pytest.approx(whole.parts["weights"], rel=0.01)
    most = int((whole.live[5] + whole.live[4] + whole.live[6]).max())
    assert found["activations"] == pytest.approx(most, rel=0.15)
