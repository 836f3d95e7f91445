"""Precisions, by how tables call them: `amp bf16`, `fp16`, `tf32`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuir.fit.readers import Unmodelled

HALVES = ("f16", "bf16")
DTYPES = {
    **dict.fromkeys(("f32", "fp32", "float32"), "f32"),
    "tf32": "tf32",
    **dict.fromkeys(("f16", "fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}
AUTOCAST = ("amp", "autocast")


@dataclass(frozen=True)
class Precision:
    """What weights and inputs are in, the dtype of autocast (empty: none), and whether products in
    f32 run in TF32 (None: there are none)."""

    dtype: str
    autocast: str = ""
    tf32: bool | None = None


def precision_of(said: str) -> Precision:
    """At most one dtype, at most one word for autocast, and no other word. `Unmodelled` else."""
    words = re.findall(r"[^\s,;/()_+-]+", said.lower())
    dtypes = [DTYPES[w] for w in words if w in DTYPES]
    mixed = [w for w in words if w in AUTOCAST]
    known = len(words) == len(dtypes) + len(mixed) and len(dtypes) < 2 and len(mixed) < 2
    if not (words and known) or (mixed and dtypes and dtypes[0] not in HALVES):
        raise Unmodelled(f"precision {said.strip() or 'not stated'} is not modelled")
    if mixed:  # f16 where nobody says otherwise: torch.get_autocast_dtype("cuda")
        return Precision("f32", dtypes[0] if dtypes else "f16")
    if dtypes[0] in HALVES:
        return Precision(dtypes[0])
    # until torch 1.12 products in f32 ran in TF32 where they could, so a table says whether
    return Precision("f32", tf32=dtypes[0] == "tf32")
