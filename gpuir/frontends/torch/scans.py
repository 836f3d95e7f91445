"""The scans of transformers' Mamba models as one loop: their own, where no kernel is installed,
is Python's, which an export writes down step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from gpuir.frontends.torch.fallbacks import hear
from gpuir.frontends.torch.masks import Change

MODELS = ("mamba", "falcon_mamba", "jamba", "zamba")
NAME = "mamba_selective_scan"
NAMES = (
    *("hidden_states", "dt", "A", "B", "C"),
    *("D", "z", "delta_bias", "delta_softplus", "return_last_state"),
)


def changes() -> list[Change]:
    """`scanned` in place of the scan of each of these models that is imported."""
    places = (sys.modules.get(f"transformers.models.{m}.modeling_{m}") for m in MODELS)
    known = [(place, getattr(place, NAME)) for place in places if hasattr(place, NAME)]
    return [(place, NAME, partial(scanned, own)) for place, own in known]


def scanned(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The selective scan of Mamba (Gu and Dao, 2023, algorithm 2): state = exp(dt A) state +
    dt B u, y = C state. Training runs the model's `own`, which has a gradient.

    u and dt are [b, d, s], A is [d, n], B and C are [b, n, s]. The steps are those of transformers'
    sequential path (models/mamba/modeling_mamba.py, mamba_selective_scan).
    """
    hear(own)
    if torch.is_grad_enabled():
        return own(*args, **kwargs)
    given: Any = signature(own).bind(*args, **kwargs)
    given.apply_defaults()
    u, dt, A, B, C, D, z, delta_bias, softplus, returns_last = map(given.arguments.get, NAMES)
    from torch._higher_order_ops.scan import scan_op

    dtype = u.dtype
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if softplus:
        dt = functional.softplus(dt)
    steps = dt[..., None]
    decay = torch.exp(A[None, :, None, :] * steps)
    enters = steps * B.transpose(1, 2)[:, None].float() * u[..., None].float()

    def step(state: torch.Tensor, *x: torch.Tensor) -> list[torch.Tensor]:
        decay, enters, reads = x
        state = decay * state + enters
        return [state, torch.matmul(state.to(dtype), reads.unsqueeze(-1))[..., 0]]

    first = torch.zeros_like(enters[:, :, 0])
    xs = [decay.movedim(2, 0), enters.movedim(2, 0), C.movedim(2, 0)]
    last, rows = scan_op(step, [first], xs, ())  # scan() compiles it first, for each layer anew
    y = rows.movedim(0, 2)
    if D is not None:
        y = y + u * D[None, :, None]
    if z is not None:
        y = y * functional.silu(z)
    return (y, last) if returns_last else y
