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


def is_composite(target: torch._ops.OpOverload) -> bool:
    """Whether ATen computes an operator by calling others, on every device: on the CPU too, which
    stands for all that have kernels."""
    has_kernel, keys = torch._C._dispatch_has_kernel_for_dispatch_key, torch._C.DispatchKey
    name = target.name()
    return has_kernel(name, keys.CompositeImplicitAutograd) and not has_kernel(name, keys.CPU)


def is_mutable(target: Any) -> bool:
    """Whether a call of it writes to an operand: some decompositions do."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _inverse_stft(
    self: torch.Tensor,
    n_fft: int,
    hop_length: int | None,
    win_length: int | None,
    window: torch.Tensor | None,
    center: bool,
    normalized: bool,
    onesided: bool | None,
    length: int | None,
    return_complex: bool,
) -> torch.Tensor:
    """istft (PyTorch 2.13, aten/src/ATen/native/SpectralOps.cpp) without its check of the window,
    which reads numbers: each frame back from frequencies, times the window, added up where frames
    overlap, over the sum of the squared windows."""
    hop = n_fft // 4 if hop_length is None else hop_length
    frames = self.shape[-1]
    whole = n_fft + hop * (frames - 1)
    size = n_fft if win_length is None else win_length
    if window is None:
        window = torch.ones(size, dtype=self.real.dtype, device=self.device)
    if size != n_fft:
        left = (n_fft - size) // 2
        window = torch.constant_pad_nd(window, [left, n_fft - size - left])
    spectra = (self if self.dim() == 3 else self.unsqueeze(0)).transpose(1, 2)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        parts = torch.fft.ifft(spectra, norm=norm)
    else:
        parts = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, norm=norm)

    def overlapped(frames: torch.Tensor) -> torch.Tensor:
        sizes = [frames.shape[0], whole]
        return torch.ops.aten.unfold_backward(frames, sizes, 1, n_fft, hop)

    y = overlapped(parts * window.view(1, 1, n_fft))
    envelope = overlapped(window.square().expand(1, frames, n_fft))
    start = n_fft // 2 if center else 0
    end = whole - start if length is None else start + length
    y = y[:, start:end] / envelope[:, start:end]
    if end > whole:
        y = torch.constant_pad_nd(y, [0, end - whole])
    return y if self.dim() == 3 else y.squeeze(0)


OURS = {torch.ops.aten.istft.default: _inverse_stft}  # torch's own stop at a check of numbers

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
        return OURS.get(target, target)(*positional, **named)

    try:
        with torch.no_grad():
            # what ATen calls, each of which may be decomposed in turn
            rules = {} if is_composite(target) else dict(_table())
            module = make_fx(call, decomposition_table=rules)(*metas)
            if any(is_mutable(n.target) for n in module.graph.nodes):
                module = make_fx(torch.func.functionalize(module))(*metas)
    except Exception:  # whatever a decomposition stumbles over: then there is none
        return None
    calls = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return None if target in calls else module
