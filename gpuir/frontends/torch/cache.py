"""Keys and values of past tokens as arguments of a program, for transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from gpuir.ir.errors import ModelError, reason


class PastLayer(CacheLayerMixin):
    """A layer's keys and values in memory that has room for `past` tokens and the new ones.

    The new ones are written behind the past, at a place known now: nothing is copied but them. The
    memory may have narrower numbers than the model: new ones are cast on their way in. A
    layer that sees `window` tokens at most keeps no more than those, as a ring: attention does not
    ask in which order keys come. Without `places` nothing is ever written.
    """

    is_compileable = False

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        past: int,
        window: int | None,
        places: torch.Tensor | None,
        masked: bool = False,
    ):
        super().__init__()
        self.keys, self.values, self.places = keys, values, places
        self.past, self.window, self.seen = past, window, past
        self.masked = masked
        self.is_sliding = window is not None
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads: all there is, in the model's numbers (`kept` has the memory's).
        Without a past, that is the new ones alone."""
        self.keys = self._put(self.keys, key_states)
        self.values = self._put(self.values, value_states)
        self.seen = self.past + key_states.shape[-2]
        if not self.past:
            return key_states, value_states
        return widened(self.keys, key_states.dtype), widened(self.values, value_states.dtype)

    def _put(self, memory: Any, new: torch.Tensor) -> torch.Tensor:
        room, n = memory.shape[-2], new.shape[-2]
        new = new.to(memory.dtype)
        if n == room and not self.past:  # all of it, in order
            return new.contiguous()
        return memory.index_copy(-2, self.places, new[..., max(n - room, 0) :, :])

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys a mask is for, and which is the first."""
        total = self.past + query_length
        if self.window is None or not self.past:
            return total, 0
        # one less than the window: transformers then knows that no key is hidden, and makes no
        # mask, unless its attention is one that always has one
        seen = self.window if self.masked else self.window - 1
        kept = min(total, seen) if query_length == 1 else total
        return kept, total - kept

    def get_max_length(self) -> int:
        return -1


def widened(memory: Any, dtype: torch.dtype) -> torch.Tensor:
    """The memory in a model's numbers, which knows the narrower ones that it is made of."""
    if memory.dtype == dtype:
        return memory
    wide: Any = memory.to(dtype)
    if memory.dtype.itemsize < dtype.itemsize:
        wide.kept = memory
    return wide


def kept(read: torch.Tensor) -> torch.Tensor:
    """The memory itself, of keys or values that a model hands to attention as it got them, where
    that is narrower."""
    return getattr(read, "kept", read)


@dataclass(frozen=True)
class Filled:
    """What a model keeps of one token, a layer each; of its encoder's output, where it has an
    encoder, keys and values a layer, and the shape of that output."""

    layers: list[Any]
    cross_keys: list[torch.Tensor]
    cross_values: list[torch.Tensor]
    hidden: tuple[int, ...] = ()


def filled(run: Callable[..., Any], first: Mapping[str, torch.Tensor], where: str) -> Filled:
    """The cache that a model makes of its `first` inputs; ModelError for a model that keeps
    something else than keys and values."""
    cross: list[Any] = []
    hidden: tuple[int, ...] = ()
    try:
        with torch.no_grad():
            out = run(**first, use_cache=True)
        made = out.get("past_key_values")
        if isinstance(made, EncoderDecoderCache):
            cross = list(made.cross_attention_cache.layers)
            hidden = tuple(out.encoder_last_hidden_state.shape)
            made = made.self_attention_cache
        layers: list[Any] = list(made.layers)
    except Exception as error:  # states of another kind are under other names
        raise _no_phases(where, reason(error)) from error
    for layer in (*layers, *cross):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):  # others keep more besides
            raise _no_phases(where, type(layer).__name__)
    return Filled(layers, [x.keys for x in cross], [x.values for x in cross], hidden)


def _no_phases(where: str, found: str) -> ModelError:
    return ModelError(
        "phases are not supported for this model",
        where=where,
        expected="layers that keep the keys and values of every token",
        found=found,
        fix="without --phase, gpuir analyses a pass over the whole sequence",
    )


def memory(
    layers: Sequence[Any], past: int, new: int, where: str, dtype: torch.dtype | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int | None]]:
    """Room for the keys and the values of each layer, in the model's numbers where `dtype` names no
    others, and the layers' windows."""
    windows: list[int | None] = [getattr(layer, "sliding_window", None) for layer in layers]
    rooms = [min(past + new, window or past + new) for window in windows]
    if past and new > 1 and min(rooms) < past + new:
        raise ModelError(
            "several new tokens are not supported when the past is longer "
            "than the attention window",
            where=where,
            expected=f"at most {min(rooms)} past and new tokens together, or one new token",
            found=f"{past} + {new}",
        )
    keys = [_room(layer.keys, room, dtype) for layer, room in zip(layers, rooms, strict=True)]
    values = [_room(layer.values, room, dtype) for layer, room in zip(layers, rooms, strict=True)]
    return keys, values, windows


def _room(one: Any, tokens: int, dtype: torch.dtype | None) -> torch.Tensor:
    return one.new_empty((*one.shape[:-2], tokens, one.shape[-1]), dtype=dtype)


def past(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    windows: Sequence[int | None],
    *,
    length: int,
    new: int,
    masked: bool,
) -> Cache:
    """A cache that holds `length` tokens, about to take `new` ones, for attention that is `masked`
    even where no key is hidden, or not. Where those go is counted once
    for all layers, and one place is a number that kernels are given."""

    @cache
    def places(room: int) -> torch.Tensor:
        count = min(new, room)
        at = (length + new - count) % room
        if count == 1:
            return torch.full((1,), at, device=keys[0].device)
        line = torch.arange(at, at + count, device=keys[0].device)
        return line if at + count <= room else line % room

    layers: list[Any] = [
        PastLayer(
            keys=k, values=v, past=length, window=window, places=places(k.shape[-2]), masked=masked
        )
        for k, v, window in zip(keys, values, windows, strict=True)
    ]
    return Cache(layers=layers)


def crossed(
    own: Cache, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], dtype: torch.dtype
) -> EncoderDecoderCache:
    """A decoder's `own` cache beside the keys and values of its encoder's output, all there, for a
    model of this dtype."""
    layers: list[Any] = [
        PastLayer(
            keys=widened(k, dtype),
            values=widened(v, dtype),
            past=k.shape[-2],
            window=None,
            places=None,
        )
        for k, v in zip(keys, values, strict=True)
    ]
    return EncoderDecoderCache(own, Cache(layers=layers))
