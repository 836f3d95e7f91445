"""The walk over an fx graph of ATen calls: each one converted under its name and module."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gpuir.frontends.emit import Emitter, settings
from gpuir.frontends.torch.decompose import decomposed, is_composite
from gpuir.frontends.torch.dims import Dims
from gpuir.frontends.torch.flex import FLEX
from gpuir.frontends.torch.higher import HIGHER, arithmetic
from gpuir.frontends.torch.node import Arguments, TorchNode, dtype_of
from gpuir.frontends.torch.packed import launched
from gpuir.frontends.torch.sparse import Sparse, answered, held_in, is_sparse, result, sized
from gpuir.frontends.torch.subclasses import QuantisedCall
from gpuir.frontends.torch.table import CONVERTERS
from gpuir.ir.errors import GpuirError, ModelError, nearest
from gpuir.ir.graph import Loc, Value
from gpuir.ir.phases import WITHIN, beside
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

DYNAMO = re.compile(r"^L\['\w+'\]\.?")  # what torch.compile calls the module it is given
# checks; nothing runs
SKIPPED = ("sym_constrain_range", "sym_constrain_range_for_size", "_linalg_check_errors")
NUMBERS = ("item", "_local_scalar_dense")
REDUCTIONS = ("amax", "amin", "linalg_vector_norm", "mean", "norm", "prod", "sum")
DEEPEST = 8  # decompositions within decompositions


def item(several: Any, index: Any) -> Any:
    """One of several results."""
    try:
        return several[index]
    except (IndexError, TypeError) as error:
        count = len(several) if isinstance(several, Sized) else "one alone"
        raise ModelError(
            "the operator has no such result", expected=f"an index into {count}", found=str(index)
        ) from error


@dataclass
class TorchWalk:
    """One pass over a graph's nodes, and over those of the graphs inside it."""

    source: str
    emit: Emitter
    dims: Dims
    strict: bool
    warnings: list[str] = field(default_factory=list[str])
    opaque: dict[str, None] = field(default_factory=dict[str, None])
    trip_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    loops: set[str] = field(default_factory=set[str])
    layers: Mapping[fx.Node, QuantisedCall] = field(default_factory=dict[fx.Node, QuantisedCall])
    parts: Collection[fx.Node] = frozenset()
    params: dict[str, Value] = field(default_factory=dict[str, Value])
    depth: int = 0
    caller: tuple[Loc, ...] = ()  # where the call is that is decomposed
    composite: bool = False  # and whether it calls other operators in ATen, too

    def inside(self, emit: Emitter) -> TorchWalk:
        """The walk over a graph inside this one."""
        at = self.caller or (self.dims.at,)
        return replace(self, emit=emit, depth=self.depth + 1, caller=at)

    def run(self, module: fx.GraphModule, given: Sequence[Any]) -> tuple[Any, ...]:
        """What the graph gives for these placeholders: values, numbers, None."""
        known: dict[fx.Node, Any] = {}
        places = iter(given)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(places)
            elif node.op == "get_attr":
                known[node] = self.attribute(module, node)
            elif node in self.layers:
                known[node] = self.layer(self.layers[node], known)
            elif node in self.parts:
                known[node] = None
            elif node.op == "call_function":
                known[node] = self.call(module, node, known)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda n: known[n])
                return tuple(results) if isinstance(results, list | tuple) else (results,)
            else:
                raise ModelError(
                    "the graph has a node that is not a call of an operator",
                    where=self.loc(node),
                    expected="calls of torch operators only",
                    found=f"{node.op} {node.target}",
                    fix="export it: torch.export.export(module, args)",
                )
        return ()

    def layer(self, call: QuantisedCall, known: Mapping[fx.Node, Any]) -> Any:
        """What a quantised layer gives, whose calls in the program are not walked."""
        x = known[call.x]
        for name, tensor in call.params.items():
            if name not in self.params:
                type = self.dims.type(tensor)
                self.params[name] = self.emit.param(name, type, partial(numbers, tensor))
                self.emit.builder.roles.setdefault(self.params[name].name, "buffer")
        (y,) = self.run(call.graph(x.type.shape), (*map(self.params.get, call.params), x))
        return y

    def loc(self, node: fx.Node) -> Loc:
        """`source:path.of.module/node`; a backward node bears its forward module."""
        meta = node.meta
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
        path = [entry[0] for entry in stack.values()][-1] if stack else ""
        path = DYNAMO.sub("", path)
        name = f"{path}/{node.name}" if path else node.name
        phase = "/backward" if is_backward(node) else ""
        return f"{self.source}:{name}{phase}"

    def attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        """A module inside, or a tensor known now."""
        found: Any = module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.Tensor):
            return found
        return self.emit.weight(self.dims.type(found), lambda: numbers(found), str(node.target))

    def call(self, module: fx.GraphModule, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        """What a node gives: a value, a tuple of them, or a number."""
        args: Any = fx.map_arg(node.args, lambda n: known[n])
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: known[n])
        target = node.target
        if self.depth == 0:
            self.dims.at = self.loc(launched(node))
        self.emit.builder.locs = self.apart(node, target)
        try:
            if target is operator.getitem:
                return item(*args)
            if isinstance(target, torch._ops.HigherOrderOperator):
                return self.higher_order(node, args, kwargs)
            if not isinstance(target, torch._ops.OpOverload):
                return self.number(node, args, kwargs)
            return self.operator(node, target, args, kwargs)
        except GpuirError as error:
            error.where = error.where or self.loc(node)
            raise

    def apart(self, node: fx.Node, target: Any) -> tuple[Loc, ...]:
        """Where a call is. Within what is decomposed some are launches of their own: each call of
        an operator that is a function of others in ATen itself; a reduction of any other, for which
        ATen has no kernel, and which reduces what another launch wrote."""
        if self.depth == 0:
            return (self.dims.at,)
        if not isinstance(target, torch._ops.OpOverload):
            return self.caller
        if self.composite:
            return beside(self.caller, node.name, WITHIN)
        packet = target._schema.name.removeprefix("aten::")
        return beside(self.caller, packet) if packet in REDUCTIONS else self.caller

    def number(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Arithmetic on sizes."""
        value = node.meta.get("val")
        if isinstance(value, int | float | bool):
            return value
        if any(isinstance(a, Value) for a in args):  # an integer that a loop carries
            if (found := arithmetic(self.emit, node.target, args)) is not None:
                return found
        elif isinstance(value, torch.SymInt) and not (args and self.is_counting(value)):
            return self.dims(value)
        target: Any = node.target
        name = getattr(target, "__name__", str(target))
        plain = getattr(operator, name, None) or {"sym_max": max, "sym_min": min}.get(name)
        numbers = not any(isinstance(a, Value) for a in args)
        if numbers and (name.startswith("sym_") or plain is not None):
            return (plain or target)(*args, **kwargs)
        raise ModelError(
            "this function is not an operator of the torch library",
            found=f"{getattr(target, '__module__', '')}.{name}",
            fix="export the module: torch.export.export(module, args)",
        )

    def is_counting(self, size: torch.SymInt) -> bool:
        """Whether it is an integer that a loop carries, which is known in each trip."""
        return any(s.name.startswith("u") for s in size.node.expr.free_symbols)

    def higher_order(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """An operator on graphs: those that only set a mode run in place."""
        name = str(node.target)
        inner = [a for a in args if isinstance(a, fx.GraphModule)]
        if name in INLINED and len(inner) == 1:
            after = args[args.index(inner[0]) + 1 :]
            if after and isinstance(after[0], str):  # invoke_subgraph's name for it
                after = after[1:]
            return self.run(inner[0], tuple(after))
        if name in WRITING:
            return self.writing(node, *args, **kwargs)
        if convert := HIGHER.get(name) or FLEX.get(name):
            return convert(self, node, *args, **kwargs)
        raise ModelError(f"{name} is not supported", fix="export the program without it")

    def writing(self, node: fx.Node, target: torch._ops.OpOverload, **given: Any) -> Any:
        """A custom operator that writes over operands: opaque, and they are among its results."""
        packet = target._schema.name
        args = Arguments({name: plain(value, self.dims) for name, value in given.items()})
        value = node.meta.get("val")
        name = f"{packet}.{target._overloadname or 'default'}"
        call = TorchNode(name, node.name, args, metas(node.kwargs), self.types(value))
        return self.opaque_call(node, packet, call, value)

    def check_trip_counts(self) -> None:
        """ModelError for a number of trips of what is no loop that takes one."""
        for name in self.trip_counts.keys() - self.loops:
            raise ModelError(
                f"no loop has the name {name!r}",
                expected=", ".join(sorted(self.loops)) or "none: the program has no while_loop",
                fix=nearest(name, self.loops) if self.loops else "remove the option",
            )

    def operator(self, node: fx.Node, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """The results of an ATen call, by its converter, or by what torch decomposes it to."""
        packet = target._schema.name.removeprefix("aten::").removeprefix("prims::")
        overload = target._overloadname
        if packet in SKIPPED or packet.startswith("_assert_"):
            return None
        value = node.meta.get("val")
        if isinstance(value, int | float | bool | torch.SymInt):
            return self.dims(value) if isinstance(value, torch.SymInt) else value
        if packet in NUMBERS and isinstance(value, torch.SymFloat):
            return args[0]  # which no shape can depend on: the tensor does as well
        name = f"{packet}.{overload or 'default'}"
        call = TorchNode(
            op=name,
            name=node.name,
            args=bound(target, args, kwargs, self.dims),
            fakes=bound(target, metas(node.args), metas(node.kwargs), self.dims),
            types=self.types(value),
            saved=not is_backward(node) and bool(node.users) and all(map(is_backward, node.users)),
        )
        convert = (
            CONVERTERS.get(name) or CONVERTERS.get(packet) or self.emit.scope.converter(packet)
        )
        if any(held_in(call.args)) or any(map(is_sparse, tree_leaves(value))):
            found = answered(packet, call, value, self.dims)
            return self.opaque_call(node, packet, call, value) if found is None else found
        single = isinstance(value, torch.Tensor)
        if convert is None:
            return self.unconverted(node, packet, target, call, value)
        start, prefix = len(self.emit.builder.nodes), self.emit.prefix
        results = convert(call, self.emit)
        self.emit.prefix = prefix
        found: Any = results if isinstance(results, tuple | list) else (results,)
        checked(call, found)
        return self.named(node, start, found, single)

    def types(self, value: Any) -> tuple[TensorType | None, ...]:
        values = value if isinstance(value, tuple | list) else (value,)
        return tuple(self.dims.type(v) if isinstance(v, torch.Tensor) else None for v in values)

    def named(
        self, node: fx.Node, start: int, found: Sequence[Value | None], single: bool
    ) -> Value | tuple[Value | None, ...] | None:
        """The results under the node's own name; `.1` and so on behind where there are several."""
        if self.depth == 0:
            wishes = [node.name if i == 0 else f"{node.name}.{i}" for i in range(len(found))]
            found = self.emit.name_results(start, found, wishes)
        return found[0] if single else tuple(found)

    def unconverted(
        self, node: fx.Node, packet: str, target: torch._ops.OpOverload, call: TorchNode, value: Any
    ) -> Any:
        """What torch decomposes the call to; where it does not, an opaque op."""
        simpler = decomposed(target, call.args, call.fakes) if self.depth < DEEPEST else None
        start = len(self.emit.builder.nodes)
        if simpler is not None:
            outside = self.depth, self.caller, self.composite
            self.depth, self.caller = self.depth + 1, self.emit.builder.locs
            self.composite = is_composite(target)
            try:
                found = self.run(simpler, tensors(call.args.values()))
            finally:
                self.depth, self.caller, self.composite = outside
            return self.named(node, start, found, isinstance(value, torch.Tensor))
        return self.opaque_call(node, packet, call, value)

    def opaque_call(self, node: fx.Node, packet: str, call: TorchNode, value: Any) -> Any:
        """A call of which nothing is known but what it reads, all tensors among its arguments, and
        what it gives: tensors, sparse ones too, in lists within lists or alone."""
        what = f"{call.op}, of sparse tensors" if any(held_in(call.args)) else call.op
        if self.strict:
            raise ModelError(
                f"gpuir has no converter for {what}",
                fix="without --strict, gpuir counts the bytes of the operator. Or "
                "decompose it before you export, or load a module with a "
                "converter: --load mine.py",
            )
        if what not in self.opaque:
            self.opaque[what] = None
            self.warnings.append(
                f"{self.loc(node)}: gpuir has no converter for {what}, so it "
                "counts the bytes of the operator, but no arithmetic"
            )
        leaves, tree = tree_flatten(value)
        gives: list[tuple[TensorType, ...]] = []
        for leaf in leaves:
            if is_sparse(leaf):
                types, note = result(packet, call, leaf, self.dims)
                gives.append(types)
                if note:
                    self.emit.assume(f"{node.name}: {note}")
            else:
                gives.append((self.dims.type(leaf),) if isinstance(leaf, torch.Tensor) else ())
        start = len(self.emit.builder.nodes)
        attrs = settings(call.args.items())
        flat = tuple(type for types in gives for type in types)
        read = (self.emit.place(v, stored=True) for v in tensors(call.args.values()))
        op = t.Opaque(call.op, tuple(read), flat, attrs)
        made = self.named(node, start, self.emit.add(op, fold=False), single=False)
        parts = iter([v for v in made if v is not None] if isinstance(made, tuple) else [])
        found = [
            sized([next(parts) for _ in types], leaf, self.dims)
            if is_sparse(leaf)
            else next(parts)
            if types
            else leaf
            for leaf, types in zip(leaves, gives, strict=True)
        ]
        return tree_unflatten(found, tree)


INLINED = (
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
    "wrap",
    "wrap_activation_checkpoint",
    "tag_activation_checkpoint",
    "invoke_subgraph",
)


WRITING = ("auto_functionalized", "auto_functionalized_v2")  # torch makes of custom operators


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint trace is of its backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def numbers(tensor: torch.Tensor) -> Any:
    """A tensor's numbers in numpy; ModelError for one that has none."""
    from gpuir.frontends.emit import NumbersMissing
    from gpuir.interp import to_numpy_dtype

    if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
        raise NumbersMissing(
            "the numbers of the tensor are not known", found=f"on device {tensor.device.type}"
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dtype = to_numpy_dtype(dtype_of(tensor.dtype))
    if tensor.dtype in NATIVE:
        return tensor.numpy()
    width = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
    return tensor.view(width).numpy().view(dtype)


NATIVE = (
    *(torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float64, torch.float32, torch.float16, torch.complex64, torch.complex128),
)


def metas(args: Any) -> Any:
    """The arguments as torch has them: fake tensors in place of nodes."""
    return fx.map_arg(args, lambda n: n.meta.get("val"))


def bound(
    target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any], dims: Dims
) -> Arguments:
    """The arguments by name, defaults filled in, sizes as numbers."""
    found = Arguments()
    for i, argument in enumerate(target._schema.arguments):
        if i < len(args):
            value = args[i]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        found[argument.name] = plain(value, dims)
    return found


def plain(value: Any, dims: Dims) -> Any:
    if isinstance(value, torch.SymInt):
        return dims(value)
    if isinstance(value, list | tuple):
        return tuple(plain(v, dims) for v in value)
    if isinstance(value, Mapping):
        return {key: plain(v, dims) for key, v in value.items()}
    return value


def tensors(values: Iterable[Any]) -> tuple[Value, ...]:
    """The tensors among arguments, in order."""
    found: list[Value] = []
    for value in values:
        if isinstance(value, Value):
            found.append(value)
        elif isinstance(value, Sparse):
            found += value.parts
        elif isinstance(value, Mapping):
            found += tensors(value.values())
        elif isinstance(value, tuple):
            found += tensors(value)
    return tuple(found)


def checked(call: TorchNode, found: Sequence[Value | None]) -> None:
    """ModelError when a converter gives other types than torch does: a bug of ours."""
    for i, (value, type) in enumerate(zip(found, call.types, strict=False)):
        if value is None or type is None:
            continue
        if (value.type.shape, value.type.dtype) != (type.shape, type.dtype):
            raise ModelError(
                f"gpuir reads {call.op} wrongly: the type of result {i} is not the one in torch",
                expected=str(type),
                found=str(value.type),
                fix="report this",
            )
