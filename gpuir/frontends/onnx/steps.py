"""The nodes of a graph or function taken apart, each after those it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuir.frontends.onnx.proto import subgraphs, text
from gpuir.ir.errors import ModelError

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto


@dataclass(frozen=True)
class NodeStep:
    """A model node, taken apart once: its graph may be walked many times."""

    op: str
    domain: str
    overload: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeProto]
    free: tuple[str, ...]  # what its subgraphs read from outside
    proto: NodeProto


@dataclass(frozen=True)
class GraphSteps:
    """The nodes of a graph or function body, each after those it reads."""

    each: tuple[NodeStep, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def domain_of(name: str) -> str:
    """ai.onnx goes by two names; here it is the empty one."""
    return "" if name == "ai.onnx" else name


def key_of(op: str, domain: str) -> str:
    """The operator's key in the table of converters."""
    return f"{domain}::{op}" if domain else op


def step_of(node: NodeProto, index: int) -> NodeStep:
    """The node taken apart; without a name of its own it goes by operator and place."""
    attributes = {text(a.name): a for a in node.attribute}
    free: dict[str, None] = {}
    for graph in subgraphs(attributes):
        free.update(dict.fromkeys(free_names(graph)))
    outputs = list(map(text, node.output))
    while outputs and not outputs[-1]:
        outputs.pop()
    op = text(node.op_type)
    return NodeStep(
        op=op,
        domain=domain_of(text(node.domain)),
        overload=text(node.overload),
        name=text(node.name) or f"{op}#{index}",
        inputs=tuple(map(text, node.input)),
        outputs=tuple(outputs),
        attributes=attributes,
        free=tuple(free),
        proto=node,
    )


def free_names(graph: GraphProto) -> Iterator[str]:
    """The names a subgraph reads that it does not define."""
    defined = {v.name for v in graph.input} | {v.name for v in graph.initializer}
    defined |= {v.values.name for v in graph.sparse_initializer}
    defined |= {name for node in graph.node for name in node.output}
    for node in graph.node:
        yield from (name for name in node.input if name and name not in defined)
        for inner in subgraphs({a.name: a for a in node.attribute}):
            yield from (name for name in free_names(inner) if name not in defined)
    yield from (v.name for v in graph.output if v.name not in defined)


def in_order(steps: Sequence[NodeStep], given: set[str], where: str) -> tuple[NodeStep, ...]:
    """The steps, each after those it reads; as they stand when they already are. `given` are the
    names that the graph has without them."""
    producer: dict[str, int] = {}
    for i, step in enumerate(steps):
        for name in step.outputs:
            if name in given:
                raise ModelError(
                    f"{name!r} is defined twice",
                    where=where,
                    found=f"it is an input or initializer, and also the result of {step.name}",
                    fix="rename one of them: each name must have one producer",
                )
            if name and producer.setdefault(name, i) != i:
                raise ModelError(
                    f"{name!r} is computed twice",
                    where=where,
                    found=f"both {steps[producer[name]].name} and {step.name} compute it",
                    fix="rename one of them: each name must have one producer",
                )
    needs = [
        [producer[name] for name in (*step.inputs, *step.free) if name in producer]
        for step in steps
    ]
    if all(need < i for i, some in enumerate(needs) for need in some):
        return tuple(steps)
    order: list[int] = []
    state = [0] * len(steps)  # 0 not seen, 1 on the path, 2 done
    for first in range(len(steps)):
        path = [first] if not state[first] else []
        todo = {first: iter(needs[first])}
        while path:
            at = path[-1]
            state[at] = 1
            need = next((i for i in todo[at] if state[i] != 2), None)
            if need is None:
                state[at] = 2
                order.append(path.pop())
            elif state[need] == 1:
                cycle = [*path[path.index(need) :], need]
                shown = [steps[i].name for i in cycle]
                if len(shown) > 12:
                    shown[6:-6] = ["..."]
                raise ModelError(
                    "the model has a cycle",
                    where=where,
                    expected="nodes that read only results of earlier nodes",
                    found=" reads ".join(shown),
                )
            else:
                path.append(need)
                todo[need] = iter(needs[need])
    return tuple(steps[i] for i in order)
