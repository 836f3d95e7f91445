"""How attention is traced: transformers' masks as models run, FlexAttention for any device."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Change = tuple[Any, str, Any]  # a module, a name in it, and what is to be there instead


@contextmanager
def replaced(changes: Sequence[Change]) -> Generator[None]:
    """Other objects under these names of these modules."""
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    try:
        for place, name, thing in changes:
            setattr(place, name, thing)
        yield
    finally:
        for place, name, thing in before:
            setattr(place, name, thing)


def changes() -> list[Change]:
    """What has transformers make the masks that it makes when a model runs.

    While exporting, it writes out every attention mask, because shapes might change and several
    sequences might be packed into one. Here they do not: a causal mask is a flag of the attention
    kernel, and where no token is hidden there is none. (transformers, masking_utils.py,
    _ignore_causal_mask_sdpa.)
    """
    from transformers import masking_utils

    return [
        (masking_utils, "is_torchdynamo_exporting", lambda: False),
        (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
    ]


@contextmanager
def as_run(module: torch.nn.Module) -> Generator[None]:
    """What of a module is one of transformers' makes the masks that it makes when it runs."""
    transformers: Any = sys.modules.get("transformers")
    parts = module.modules() if transformers else ()
    has_models = any(isinstance(part, transformers.PreTrainedModel) for part in parts)
    with replaced(changes() if has_models else ()):
        yield


@contextmanager
def on_any_device() -> Generator[None]:
    """FlexAttention may be traced where it cannot run: its backward pass on the CPU, and all of it
    on meta (torch 2.13, torch/nn/attention/flex_attention.py, _validate_device). What Dynamo keeps
    of its calls in earlier traces is dropped: it stumbles over masks that are gone."""
    from torch.nn.attention import flex_attention

    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    for part in flex_attention.flex_attention.__code__.co_consts if dynamo else ():
        if isinstance(part, CodeType):
            dynamo.remove_from_cache(part)
    with replaced([(flex_attention, "_validate_device", lambda *_: None)]):
        yield


@contextmanager
def held(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Generator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments without those that are block masks, or hold any, which the module has meanwhile
    by itself: torch.export takes none, and which blocks are visited is known of constants."""
    from torch.nn.attention.flex_attention import BlockMask

    def has_masks(given: Any) -> bool:
        leaves = tree_leaves(given, is_leaf=lambda x: isinstance(x, BlockMask))
        return any(isinstance(x, BlockMask) for x in leaves)

    first = next((i for i, x in enumerate(args) if has_masks(x)), len(args))
    names = [*inspect.signature(module.forward).parameters]
    named = {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}
    masks = {name: given for name, given in named.items() if has_masks(given)}
    if not masks:
        yield (*args,), {**kwargs}
        return
    before = vars(module).get("forward")
    module.forward = partial(module.forward, **masks)
    try:
        yield (*args[:first],), {n: x for n, x in named.items() if n not in masks}
    finally:
        del module.forward
        if before is not None:
            module.forward = before
