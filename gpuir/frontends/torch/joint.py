"""Training graphs as torch itself derives them: forward and backward of a program in one."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from gpuir.frontends.emit import Emitter
from gpuir.frontends.model import Model, Weights
from gpuir.frontends.torch.contraction import NO_DROPOUT
from gpuir.frontends.torch.dims import Dims
from gpuir.frontends.torch.masks import on_any_device
from gpuir.frontends.torch.precision import unreached
from gpuir.frontends.torch.program import TorchProgram, graphs_alone, traced_inputs, unheard
from gpuir.frontends.torch.sampling import RESAMPLING
from gpuir.frontends.torch.sparse import Sparse, check_trained, examples, is_sparse, placed, unknown
from gpuir.frontends.torch.walk import TorchWalk, numbers
from gpuir.ir.errors import ModelError, reason
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def load_joint(source: TorchProgram | ExportedProgram, name: str, walk: TorchWalk) -> Model:
    """The program's first float output, its loss, and the gradient of each parameter that it
    depends on: `w.grad`, of role gradient, as AOTAutograd traces them on fake tensors. A loss of
    several cells stands for their sum. Locations of the backward pass end in `/backward`."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    check_trained(given_to(source))
    fakes = Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    where = torch.device("cpu")  # that fakes are on; the caller may build on another by default
    with where, fakes.mode, ExitStack() as stack, unheard(), graphs_alone(), on_any_device():
        if isinstance(source, TorchProgram):
            held = tensors_of(source.module)
            given = {"args": fakes(source.args), "kwargs": fakes(dict(source.kwargs))}
            stack.enter_context(fakes.inside(source.module))
            exported = replace(source, **given).export()
        else:
            exported, held = source, {**source.state_dict}
        held = {**exported.constants, **held}  # buffers among the constants are fakes
        module, assumed = loss_alone(exported)
        args, kwargs = fakes(_sized(exported, walk.dims))
        stack.enter_context(fakes.inside(module))
        try:
            stack.enter_context(whole_resampling())
            traced = aot_export_joint_with_descriptors(stack, module, args, kwargs)
        except Exception as error:  # whatever an operator's derivative stumbles over
            raise ModelError(
                "AOTAutograd cannot differentiate the program",
                where=name,
                found=reason(error),
                fix="use gpuir's own derivatives: --autodiff gpuir",
            ) from error
    walk.emit.scope.assumed += (*assumed, *unreached(exported))
    names = exported.graph_signature.user_inputs
    return _graph(traced.graph_module, names, held, examples(exported, source), walk)


def given_to(source: TorchProgram | ExportedProgram) -> dict[str, Any]:
    """The tensors that a program holds or is run on, by name; those of its arguments by place."""
    if isinstance(source, TorchProgram):
        held, given = tensors_of(source.module), (source.args, dict(source.kwargs))
    else:
        held, given = {**source.state_dict, **source.constants}, source.example_inputs
    return {**held, **{f"argument {i}": x for i, x in enumerate(tree_leaves(given))}}


@contextmanager
def whole_resampling() -> Generator[None]:
    """Operators that resample stay whole meanwhile, and their gradients. In a trace torch writes
    them out, bicubic resampling in 270 operators (torch/_decomp/decompositions.py), of which eager
    PyTorch runs none."""
    keys = (torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd)
    taken: list[tuple[Any, Any, Any]] = []
    for name in RESAMPLING:
        packet: Any = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            for key in (k for k in keys if k in op.py_kernels):
                taken.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    """Its parameters and buffers by name."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


class Fakes:
    """Tensors on fake memory of the CPU, of one mode, in place of others; one under two names stays
    one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.known: dict[int, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []  # so that no other takes their place in memory

    def __call__(self, tree: Any) -> Any:
        return tree_map(self.of, tree)

    def of(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if isinstance(x, FakeTensor) and x.fake_mode is self.mode:
            return x
        if id(x) not in self.known:
            self.kept.append(x)
            if is_sparse(x):
                made = self.mode.from_tensor(x.detach())
            else:
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            is_parameter = isinstance(x, torch.nn.Parameter)
            self.known[id(x)] = torch.nn.Parameter(made, x.requires_grad) if is_parameter else made
        return self.known[id(x)]

    @contextmanager
    def inside(self, module: torch.nn.Module) -> Generator[None]:
        """The module holds fakes meanwhile. (A copy of it would not do: a `forward` set on the
        module runs the module that it was made for.)"""
        before = [(held, dict(held)) for part in module.modules() for held in held_by(part)]
        try:
            for held, _ in before:
                held.update({name: self.of(x) for name, x in held.items()})
            yield
        finally:
            for held, was in before:
                held.update(was)


def held_by(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors that a module itself holds, by name, to be changed."""
    return module._parameters, module._buffers


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
    given = [n for n in tree_flatten(output.args)[0] if isinstance(n, fx.Node)]
    floats = [n for n in given if n.meta["val"].dtype.is_floating_point]
    wholes = [n for n in given if n.meta["val"].dtype.is_complex]
    if not floats and wholes:
        assumed = (*assumed, f"the loss is of both parts of %{wholes[0].name}")
        with graph.inserting_before(output):
            parts = graph.call_function(torch.ops.aten.view_as_real.default, (wholes[0],))
        parts.meta["val"] = torch.view_as_real(wholes[0].meta["val"])
        floats = [parts]
    if not floats:
        raise ModelError("the program has no floating-point output to differentiate")
    loss = floats[0]
    if loss.meta["val"].numel() != 1:
        with graph.inserting_before(output):
            total = graph.call_function(torch.ops.aten.sum.default, (loss,))
        total.meta["val"] = loss.meta["val"].sum()
        loss, assumed = total, (*assumed, f"the gradient is that of the sum of %{loss.name}")
    elif others := [n.name for n in floats[1:] if n.meta["val"].numel() == 1]:
        names = ", ".join(f"%{name}" for name in dict.fromkeys(others))
        note = f"the loss is %{loss.name}, the first output, not {names} (--loss selects another)"
        assumed = (*assumed, note)
    output.args = ((loss,),)
    info = graph._codegen.pytree_info
    graph._codegen.pytree_info = info._replace(out_spec=tree_flatten((0,))[1])
    graph.eliminate_dead_code()
    module.recompile()
    return module, assumed


def _sized(program: ExportedProgram, dims: Dims) -> Any:
    """Inputs as the program was traced on, where sizes are symbolic in those that `dims` gives."""
    sized = [
        torch.empty_strided([*map(dims, v.shape)], [*map(dims, v.stride())], dtype=v.dtype)
        if isinstance(v, torch.Tensor) and not is_sparse(v)
        else dims(v)
        if isinstance(v, torch.SymInt)
        else v
        for _, v in traced_inputs(program)
    ]
    spec: Any = program.call_spec.in_spec
    return tree_unflatten(sized, spec)


def _sparse(
    emit: Emitter, dims: Dims, place: Any, inputs: Any, stored: Mapping[str, Any]
) -> Sparse:
    """What stores a sparse placeholder: params, or inputs."""
    is_param = type(place).__name__ in ("ParamAOTInput", "BufferAOTInput")
    name = str(place.target if is_param else inputs[place.idx])
    if name not in stored:
        raise unknown(name)

    def made(part: str, type: TensorType, tensor: torch.Tensor) -> Value:
        if is_param:
            return emit.param(f"{name}.{part}", type, lambda: numbers(tensor))
        return emit.input(f"{name}.{part}", type)

    return placed(stored[name], dims, made)


def _graph(
    joint: fx.GraphModule,
    inputs: Any,
    held: Mapping[str, Any],
    sparse: Mapping[str, torch.Tensor],
    walk: TorchWalk,
) -> Model:
    """The traced graph, its placeholders and results under the names of what they are."""
    emit, dims = walk.emit, walk.dims
    places: dict[Any, Value] = {}
    tied: dict[int, Value] = {}  # one tensor under two names is one param
    given: list[Any] = []
    for node in joint.graph.find_nodes(op="placeholder"):
        value: Any = node.meta.get("val")  # an argument that is None has none
        place: Any = node.meta["desc"]
        kind = type(place).__name__
        if is_sparse(value):
            given.append(_sparse(emit, dims, place, inputs, {**held, **sparse}))
            continue
        if not isinstance(value, torch.Tensor):
            given.append(value)
            continue
        type_ = dims.lying(value)
        if kind == "TangentAOTInput":
            given.append(emit.fill(1, dims.type(value), "seed"))
        elif kind in ("ParamAOTInput", "BufferAOTInput"):
            tensor = held[place.target]
            made = tied.get(id(tensor))
            if made is None:
                made = emit.param(place.target, type_, lambda tensor=tensor: numbers(tensor))
            places[place] = tied[id(tensor)] = made
            given.append(made)
        else:
            places[place] = emit.input(str(inputs[place.idx]), type_)
            given.append(places[place])
    found = walk.run(joint, given)
    outputs: list[Value] = []
    over: list[Value | None] = []
    gradients: dict[Value, Value] = {}  # by their names in the trace
    descriptions = [*joint.graph.nodes][-1].meta["desc"]
    pairs = [
        (d, emit.place(v, stored=True))
        for d, v in zip(descriptions, found, strict=True)
        if isinstance(v, Value)
    ]
    for place, value in sorted(pairs, key=lambda pair: ORDER[type(pair[0]).__name__]):
        kind = type(place).__name__
        mutates = kind == "InputMutationAOTOutput"
        over.append(places[place.mutated_input] if mutates else None)
        if kind == "GradAOTOutput":
            # a known number, an input itself, or the gradient of another param, too
            if value in gradients or emit.builder.producer(value) is None:
                value = emit(t.Map("identity", (value,)), fold=False)
            wanted = emit.names.claim(f"{places[place.grad_of].name}.grad")
            gradients[value] = Value(wanted, value.type)
            emit.builder.roles[wanted] = "gradient"
        outputs.append(gradients.get(value) or value)
    emit.builder.rename(0, gradients)
    return Model(emit.finish(outputs, over), Weights(emit.scope.weights), tuple(walk.warnings))


ORDER: Mapping[str, int] = {
    "PlainAOTOutput": 0,
    "InputMutationAOTOutput": 1,
    "GradAOTOutput": 2,
    "IntermediateBaseAOTOutput": 3,
}
