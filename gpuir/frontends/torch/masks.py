"""The attention masks of transformers' models, as they are when a model runs."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

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
