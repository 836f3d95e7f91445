"""Attention behind a past and within a window as one operator of ours: what fused kernels do, and
torch's own operator says by a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpuir.frontends.emit import Emitter
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ops import tensor as t


def seen(new: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys each of the last `new` tokens sees: those up to itself, within the window."""
    at = torch.arange(keys - new, keys, device=device)[:, None]
    behind = at - torch.arange(keys, device=device)
    return (behind >= 0) & (behind <= window)


@torch.library.custom_op("gpuir::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """Causal `t.Attention`: the last query sees all keys, each no more than `window` behind. Keys
    and values may be of other numbers than queries, as a cache keeps them."""
    mask = seen(query.shape[-2], key.shape[-2], window, query.device)
    key, value = key.to(query.dtype), value.to(query.dtype)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=True
    )


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def convert(n: TorchNode, e: Emitter) -> Results:
    q, k, v = (n[name] for name in ("query", "key", "value"))
    keys, new, window = k.type.shape[-2], q.type.shape[-2], int(n.args["window"])
    hides = new > 1 or window < keys - 1
    return e(
        t.Attention(
            *(q, k, v, None, float(n.args["scale"])),
            causal=hides,
            offset=keys - new if hides else 0,
            window=window if window < keys - 1 else None,
        )
    )


CONVERTERS: dict[str, Converter] = {"gpuir::attention": convert}
