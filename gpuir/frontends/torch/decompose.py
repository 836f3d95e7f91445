"""ATen calls in terms of simpler ones, as torch itself decomposes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from gpuir.frontends.torch.table import CONVERTERS


@cache
def _table() -> Mapping[Any, Any]:
    """torch's decompositions of what no converter here takes."""
    from torch._decomp import decomposition_table

    def has_converter(op: torch._ops.OpOverload) -> bool:
        packet = op._schema.name.removeprefix("aten::")
        return packet in CONVERTERS or f"{packet}.{op._overloadname}" in CONVERTERS

    return {
        op: rule
        for op, rule in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload) and not has_converter(op)
    }


def is_mutable(target: Any) -> bool:
    """Whether a call of it writes to an operand: some decompositions do."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


_traced: dict[Any, fx.GraphModule | None] = {}


def decomposed(
    target: torch._ops.OpOverload, args: Mapping[str, Any], fakes: Mapping[str, Any]
) -> fx.GraphModule | None:
    """The call as a graph of simpler calls, its placeholders the tensors among the arguments in
    order; None where torch has no decomposition that helps. Traced on the meta device."""
    from gpuir.ir.graph import Value

    key_parts: list[Any] = [target]
    metas: list[torch.Tensor] = []

    def stand_in(value: Any, fake: Any) -> Any:
        if isinstance(value, Value):
            made = torch.empty(value.type.shape, dtype=fake.dtype, device="meta")
            key_parts.append((value.type, fake.dtype))
            metas.append(made)
            return made
        if isinstance(value, tuple):
            fakes = fake if isinstance(fake, list | tuple) else (None,) * len(value)
            return [stand_in(v, f) for v, f in zip(value, fakes, strict=True)]
        if isinstance(value, torch.device):
            return torch.device("meta")
        key_parts.append(value)
        return value

    given = {name: stand_in(value, fakes[name]) for name, value in args.items()}
    key = repr(key_parts)
    if key not in _traced:
        _traced[key] = _trace(target, given, metas)
    return _traced[key]


def _trace(
    target: torch._ops.OpOverload, given: Mapping[str, Any], metas: list[torch.Tensor]
) -> fx.GraphModule | None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._pytree import tree_map

    def call(*tensors: torch.Tensor) -> Any:
        ours = {id(meta): tensor for meta, tensor in zip(metas, tensors, strict=True)}
        filled = tree_map(lambda x: ours.get(id(x), x), dict(given))
        positional = [filled[a.name] for a in target._schema.arguments if not a.kwarg_only]
        named = {a.name: filled[a.name] for a in target._schema.arguments if a.kwarg_only}
        return target(*positional, **named)

    try:
        with torch.no_grad():
            module = make_fx(call, decomposition_table=dict(_table()))(*metas)
            if any(is_mutable(n.target) for n in module.graph.nodes):
                module = make_fx(torch.func.functionalize(module))(*metas)
    except Exception:  # whatever a decomposition stumbles over: then there is none
        return None
    calls = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return None if target in calls else module
