"""Linear layers whose weight is one of torchao's tensor subclasses: each is one quantised layer, as
a config's `quantization_config` makes it.

torch.export writes down what a subclass does on the device that it is traced on: on a CPU, int8
products by way of unsigned numbers; for int4, kernels that are there for one GPU alone. So what a
module holds is put in the place of its weights before it is exported, and in a program that was
exported elsewhere, the calls of such a layer are taken for one.

A subclass is read by torch's own protocol, `__tensor_flatten__`: the tensors that it holds, the
quantised numbers first, their scales second. A program unwrapped (torchao's unwrap_tensor_subclass)
holds the same as `layer.parametrizations.weight.original0` and so on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from gpuir.frontends.torch.packed import CODES, QuantisedLinear, Scheme, WeightFormat
from gpuir.frontends.torch.quantised import ENGINE, described

NARROW = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
UNWRAPPED = re.compile(r"((?:.+\.)?)parametrizations\.(\w+)\.original\d+")
WHOLE = "torchao: the inputs of a product have one scale a row here, not one scale a tensor"
LINEAR = ("torch.nn.modules.linear.Linear", "torch.nn.utils.parametrize.ParametrizedLinear")
PRODUCTS = (  # what torchao calls for a linear layer: ATen's, and those of mslk
    *("mm", "addmm", "matmul", "linear", "_int_mm", "_scaled_mm", "_weight_int4pack_mm"),
    *("bf16i4bf16_rowwise", "f8f8bf16_rowwise", "f8i4bf16_rowwise", "f8i4bf16_shuffled"),
)


# ---------------------------------------------------------------------------- what is stored


def stored(parts: Sequence[torch.Tensor], out: int, into: int) -> tuple[WeightFormat, bool] | None:
    """How the tensors of a weight [out, in] store it, and whether the scale of what it multiplies
    is among them; None where it is not one of the ways that are known here."""
    if len(parts) < 2 or not parts[1].is_floating_point():
        return None
    numbers, scale, *rest = parts
    bits = 8 * numbers.numel() * numbers.element_size()
    if numbers.dtype in NARROW and tuple(numbers.shape) == (out, into):
        dtype = numbers.dtype
    elif not numbers.is_floating_point() and bits == 4 * out * into:
        dtype = CODES[4]
    else:
        return None
    pairs = scale.dim() == 3 and scale.shape[-1] == 2  # a scale and a zero point for each block
    count = scale.numel() // 2 if pairs else scale.numel()
    block = blocks(scale, count, out, into, groups=dtype == CODES[4])
    if block is None:
        return None
    zero, static = scale.dtype if pairs else None, False
    for part in rest:
        if part.numel() == count and zero is None and (part.dtype == torch.int8 or not static):
            zero = part.dtype
        elif part.numel() == 1:  # what is multiplied has one scale, and perhaps a zero point
            static = True
        else:
            return None
    return WeightFormat(dtype, *block, scale.dtype, zero), static


def blocks(
    scale: torch.Tensor, count: int, out: int, into: int, groups: bool
) -> tuple[int, int] | None:
    """The rows and columns that have a scale in common (0: all)."""
    if count == 1:
        return 0, 0
    if count % out == 0 and into % (count // out) == 0 and (groups or len(scale) == out):
        return 1, 0 if count == out else into * out // count
    if scale.dim() == 2 and out % len(scale) == 0 and into % scale.shape[1] == 0:
        return out // len(scale), into // scale.shape[1]
    return None


def scheme_of(weight: Any) -> Scheme | None:
    """How a subclass is stored and multiplied; None where it is none that is known here."""
    names, _ = weight.__tensor_flatten__()
    found = stored([getattr(weight, name) for name in names], *weight.shape)
    if found is None or "act_pre_scale" in names:
        return None
    weights, static = found
    inputs = getattr(weight, "act_quant_kwargs", None)
    others = (
        getattr(weight, "activation_quantization", None) is not None,
        getattr(weight, "activation_dtype", None) not in (None, torch.bfloat16),
        getattr(getattr(inputs, "mapping_type", None), "name", "") == "ASYMMETRIC",
        inputs is not None and weights.dtype not in NARROW,
    )
    if any(others):
        return None
    return Scheme(weights, None if inputs is None else weights.dtype, static)


def is_subclass(tensor: Any) -> bool:
    """Whether it is a tensor made of others by torchao."""
    return type(tensor).__module__.startswith("torchao.") and isinstance(tensor, torch.Tensor)


# ---------------------------------------------------------------------------- a module


def linears_of(module: nn.Module) -> dict[str, Any]:
    """The linear layers whose weight is a subclass, by name."""
    named = module.named_modules(remove_duplicate=False)
    return {n: m for n, m in named if isinstance(m, nn.Linear) and is_subclass(m.weight)}


@contextmanager
def as_layers(module: nn.Module, left: Collection[str] = ()) -> Generator[nn.Module]:
    """The module with quantised layers in the place of linear ones whose weight is a subclass, but
    for those `left` as they are. It is as it was again afterwards."""
    linears, made = linears_of(module), dict[str, nn.Module]()
    for name, part in linears.items():
        if name not in left and (scheme := scheme_of(part.weight)) is not None:
            made[name] = layer(scheme, (*part.weight.shape,), part.bias is not None, part.weight)
    try:
        for name in made.keys() - {""}:
            module.set_submodule(name, made[name])
        yield made.get("", module)
    finally:
        for name in made.keys() - {""}:
            module.set_submodule(name, linears[name])


def read_elsewhere(program: ExportedProgram, module: nn.Module) -> set[str]:
    """The layers of the module whose weight something else reads too than the quantised layer in
    their place: a product written out, with the weight of the module."""
    targets = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs}
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    made = [name for name in linears_of(module) if joined(name, "scale") in targets]
    places = {name: nodes[targets[joined(name, "weight")]] for name in made}
    ours = "gpuir."
    return {
        n for n, at in places.items() if any(not str(u.target).startswith(ours) for u in at.users)
    }


def assumed_of(program: ExportedProgram, module: nn.Module) -> list[str]:
    """What is to be said of the layers that are in the place of the module's own."""
    made = {str(spec.target) for spec in program.graph_signature.input_specs}
    linears = linears_of(module).items()
    schemes = [scheme_of(m.weight) for name, m in linears if joined(name, "scale") in made]
    return [*notes([scheme for scheme in schemes if scheme is not None])]


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def layer(scheme: Scheme, shape: Sequence[int], bias: bool, like: torch.Tensor) -> QuantisedLinear:
    """A layer of such weights where the given tensor is, in its dtype. No memory is taken."""
    made = QuantisedLinear(out=shape[0], into=shape[1], bias=bias, scheme=scheme, dtype=like.dtype)
    for name, parameter in [*made.named_parameters()]:
        one = torch.empty((1,) * parameter.dim(), dtype=parameter.dtype, device=like.device)
        held = one.as_strided(parameter.shape, (0,) * parameter.dim())
        setattr(made, name, nn.Parameter(held, requires_grad=False))
    return made.eval()


def notes(schemes: Sequence[Scheme]) -> Iterator[str]:
    """What is assumed of the layers with these schemes."""
    for text, count in Counter(map(described, schemes)).items():
        yield f"torchao: linear layers of {text}: {count}"
    if any(scheme.inputs is None for scheme in schemes):
        yield ENGINE
    if any(s.inputs is not None and not s.static and not s.weights.rows for s in schemes):
        yield WHOLE


def as_traced(paths: Sequence[str]) -> Iterator[str]:
    """What is said of the layers that are none known here."""
    if paths:
        named = ", ".join(paths[:3]) + (", .." if len(paths) > 3 else "")
        yield f"quantised weights are read step by step, as torch traced them: {named}"


# ---------------------------------------------------------------------------- a program


@dataclass
class QuantisedCall:
    """A quantised layer in a program: the node that it multiplies, and the one that it gives."""

    path: str
    layer: QuantisedLinear
    x: fx.Node
    y: fx.Node
    traced: dict[tuple[int, ...], fx.GraphModule] = field(default_factory=dict[Any, Any])

    def graph(self, shape: tuple[int, ...]) -> fx.GraphModule:
        """The layer's own calls, on so much; its placeholders are `params`, then what it
        multiplies. They are in the module that the layer is."""
        if shape not in self.traced:
            x = torch.empty(shape, dtype=self.x.meta["val"].dtype, device="meta")
            with torch.no_grad():
                module = torch.export.export(self.layer, (x,)).graph_module
            for node in module.graph.nodes:
                node.meta["nn_module_stack"] = self.y.meta["nn_module_stack"]
            self.traced[shape] = module
        return self.traced[shape]

    @cached_property
    def params(self) -> dict[str, torch.Tensor]:
        return {f"{self.path}.{name}": x for name, x in self.layer.named_parameters()}


@dataclass(frozen=True)
class Calls:
    """The quantised layers of a program: each by the node that it gives, the nodes that are parts
    of them, the weights that only they read, and what is assumed."""

    made: Mapping[fx.Node, QuantisedCall] = field(default_factory=dict[fx.Node, QuantisedCall])
    parts: frozenset[fx.Node] = frozenset()
    weights: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()


def has_subclasses(program: ExportedProgram) -> bool:
    """Whether weights of it are subclasses, which torch takes apart when it decomposes it."""
    return any(is_subclass(tensor) for tensor in program.state_dict.values())


def is_quantised(made: ExportedProgram | nn.Module) -> bool:
    """Whether linear layers of it multiply by quantised weights."""
    if isinstance(made, nn.Module):
        return bool(linears_of(made))
    return has_subclasses(made) or bool(unwrapped(made))


def unwrapped(program: ExportedProgram) -> dict[str, dict[str, fx.Node]]:
    """The tensors of each weight that was a subclass, by its name before: their places in the
    program by their own names, the quantised numbers first."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found: dict[str, dict[str, fx.Node]] = {}
    for spec in program.graph_signature.input_specs:
        matched = UNWRAPPED.fullmatch(str(spec.target))
        if matched and spec.kind is not InputKind.USER_INPUT:
            parts = found.setdefault(matched[1] + matched[2], {})
            parts[matched[0]] = nodes[spec.arg.name]
    first = {name: next(iter(parts.values())).meta["val"] for name, parts in found.items()}
    narrow = (n for n, x in first.items() if x.element_size() == 1 or not x.is_floating_point())
    return {name: found[name] for name in narrow}


def calls_of(program: ExportedProgram) -> Calls:
    """The quantised layers of a program whose subclasses are unwrapped."""
    held = unwrapped(program)
    if not held:
        return Calls()
    specs = program.graph_signature.input_specs
    own = {spec.arg.name for spec in specs if spec.kind is not InputKind.USER_INPUT}
    groups: dict[tuple[str, str], list[fx.Node]] = {}
    for node in program.graph.nodes:
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            weight = joined(path, "weight")
            if node.op == "call_function" and weight in held and str(kind).endswith(LINEAR):
                groups.setdefault((weight, key), []).append(node)
    found = {key: call_of(key[0], nodes, held[key[0]], own) for key, nodes in groups.items()}
    others = {weight for (weight, _), call in found.items() if call is None}
    made = {k: call for k, call in found.items() if call is not None and k[0] not in others}
    taken = {weight for weight, _ in made}
    schemes = {call.path: call.layer.scheme for call in made.values()}
    return Calls(
        made={call.y: call for call in made.values()},
        parts=frozenset(node for key in made for node in groups[key]),
        weights=frozenset(
            name
            for weight in taken
            for name in (f"{weight.removesuffix('weight')}bias", *held[weight])
        ),
        assumed=(
            *notes([*schemes.values()]),
            *as_traced([weight for weight in held if weight not in taken]),
        ),
    )


def call_of(
    weight: str, nodes: Sequence[fx.Node], parts: Mapping[str, fx.Node], own: Collection[str]
) -> QuantisedCall | None:
    """The layer that these nodes are; None where they are something else than one known here. Those
    in `own` are the program's weights."""
    inside = {*nodes}
    given = {n: None for node in nodes for n in node.all_input_nodes if n not in inside}
    outside = [n for n in given if n.name not in own]
    gives = [n for n in nodes if any(user not in inside for user in n.users)]
    if len(outside) != 1 or len(gives) != 1:
        return None
    (x,), (y,) = outside, gives
    (into, of), (out, to) = ((n.meta["val"].shape[-1], n.meta["val"].dtype) for n in (x, y))
    if of != to or not (isinstance(into, int) and isinstance(out, int)):
        return None
    found = stored([part.meta["val"] for part in parts.values()], out, into)
    rows = rows_of(nodes, x)
    if found is None or rows is None:
        return None
    weights, static = found
    scheme = Scheme(weights)
    if any(is_narrow(n) for n in rows):
        if weights.dtype not in NARROW or any("ASYMMETRIC" in n.args for n in nodes):
            return None
        if not is_narrow(rows[-1]):  # brought to few bits and back again
            return None
        scheme = Scheme(weights, weights.dtype, static)
    held = parts.values()
    biased = any(n is not x and n not in held and n.meta["val"].shape == (out,) for n in given)
    like = torch.empty((), dtype=of, device="meta")
    return QuantisedCall(
        weight.removesuffix(".weight"), layer(scheme, (out, into), biased, like), x, y
    )


def rows_of(nodes: Sequence[fx.Node], x: fx.Node) -> list[fx.Node] | None:
    """What is made of x on its way into the product, which is the last; None without a product."""
    made = {x: None}
    for node in nodes:
        before = [n for n in node.all_input_nodes if n in made]
        if before and str(node.target).split(".")[1:2] in ([name] for name in PRODUCTS):
            return [*made, before[0]]
        if before:
            made[node] = None
    return None


def is_narrow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.element_size() == 1
