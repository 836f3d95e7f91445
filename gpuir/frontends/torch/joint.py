"""Training graphs as torch itself derives them: forward and backward of a program in one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_map

from gpuir.frontends.emit import Emitter
from gpuir.frontends.model import Model, Weights
from gpuir.frontends.torch.program import Program, reason
from gpuir.frontends.torch.walk import Dims, Walk, numbers
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
NO_DROPOUT = "dropout inside attention takes no time"


def load_joint(program: Program, name: str, dims: Dims, strict: bool) -> Model:
    """The program's first output, its loss, and the gradient of each parameter that it depends on:
    `w.grad`, of role gradient, as AOTAutograd traces them on fake tensors. A loss of several cells
    stands for their sum. Locations of the backward pass end in `/backward`."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faked = as_fakes(program)
        exported = faked.export()
        module, assumed = loss_alone(exported)
        given = (faked.args, dict(faked.kwargs))
        try:
            joint = aot_export_joint_with_descriptors(stack, module, *given).graph_module
        except Exception as error:  # whatever an operator's derivative stumbles over
            raise ModelError(
                "AOTAutograd cannot differentiate the program",
                where=name,
                found=reason(error),
                fix="let gpuir differentiate it: --autodiff gpuir",
            ) from error
    return _graph(joint, exported, program, name, dims, strict, assumed)


def as_fakes(program: Program) -> Program:
    """The program on fake tensors of the CPU: what is one tensor under two names stays one."""
    known: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in known:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, tensor.requires_grad)
            known[id(tensor)] = made
        return known[id(tensor)]

    from copy import deepcopy

    memo = {id(x): fake(x) for x in (*program.module.parameters(), *program.module.buffers())}
    module = deepcopy(program.module, memo)
    args, kwargs = tree_map(fake, program.args), tree_map(fake, dict(program.kwargs))
    return Program(module, args, kwargs, program.name)


def loss_alone(program: ExportedProgram) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The program's module with its first output alone, summed; and what is assumed of it. Inside
    attention nothing is dropped: with dropout there is no fused attention for the CPU to trace."""
    module: Any = program.module()
    graph, assumed = module.graph, ()
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        if len(node.args) > 4 and node.args[4]:
            node.args = (*node.args[:4], 0.0, *node.args[5:])
            assumed = (NO_DROPOUT,)
    (output,) = graph.find_nodes(op="output")
    floats = [
        node
        for node in tree_flatten(output.args)[0]
        if isinstance(node, fx.Node) and node.meta["val"].dtype.is_floating_point
    ]
    if not floats:
        raise ModelError("the program has no float output to differentiate")
    loss = floats[0]
    if loss.meta["val"].numel() != 1:
        with graph.inserting_before(output):
            total = graph.call_function(torch.ops.aten.sum.default, (loss,))
        total.meta["val"] = loss.meta["val"].sum()
        loss, assumed = total, (*assumed, f"the gradient is that of the sum of %{loss.name}")
    output.args = ((loss,),)
    info = graph._codegen.pytree_info
    graph._codegen.pytree_info = info._replace(out_spec=tree_flatten((0,))[1])
    graph.eliminate_dead_code()
    module.recompile()
    return module, assumed


def _graph(
    joint: fx.GraphModule,
    exported: ExportedProgram,
    program: Program,
    name: str,
    dims: Dims,
    strict: bool,
    assumed: tuple[str, ...],
) -> Model:
    emit = Emitter(name)
    walk = Walk(name, emit, dims, strict)
    held: dict[str, Any] = dict(exported.constants)
    held |= dict(program.module.named_parameters(remove_duplicate=False))
    held |= dict(program.module.named_buffers(remove_duplicate=False))
    inputs = exported.graph_signature.user_inputs
    places: dict[str, Value] = {}
    given: list[Any] = []
    for node in joint.graph.find_nodes(op="placeholder"):
        value: Any = node.meta["val"]
        place: Any = node.meta["desc"]
        kind = type(place).__name__
        if not isinstance(value, torch.Tensor):
            given.append(value)
            continue
        type_ = dims.type(value)
        if kind == "TangentAOTInput":
            given.append(emit.fill(1, type_, "seed"))
        elif kind in ("ParamAOTInput", "BufferAOTInput"):
            tensor = held[place.target]
            made = emit.param(place.target, type_, lambda tensor=tensor: numbers(tensor))
            places[place.target] = made
            given.append(made)
        else:
            given.append(emit.input(str(inputs[place.idx]), type_))
    found = walk.run(joint, given)
    outputs: list[Value] = []
    over: list[Value | None] = []
    gradients: dict[Value, Value] = {}  # by their names in the trace
    descriptions = [*joint.graph.nodes][-1].meta["desc"]
    pairs = [(d, emit.place(v, True)) for d, v in zip(descriptions, found) if isinstance(v, Value)]
    for place, value in sorted(pairs, key=lambda pair: ORDER[type(pair[0]).__name__]):
        kind = type(place).__name__
        mutates = kind == "InputMutationAOTOutput"
        over.append(places[place.mutated_input.target] if mutates else None)
        if kind == "GradAOTOutput" and value not in gradients:
            wanted = emit.names.claim(f"{place.grad_of.target}.grad")
            gradients[value] = Value(wanted, value.type)
            emit.builder.roles[wanted] = "gradient"
        outputs.append(gradients.get(value, value))
    emit.builder.rename(0, gradients)
    emit.builder.assumed += [*emit.scope.assumed, *assumed]
    graph = emit.builder.finish(outputs, over)
    return Model(graph, Weights(emit.scope.weights), tuple(walk.warnings))


ORDER: Mapping[str, int] = {
    "PlainAOTOutput": 0,
    "InputMutationAOTOutput": 1,
    "GradAOTOutput": 2,
    "IntermediateBaseAOTOutput": 3,
}
