"""What a store knows kernels, targets and tiles by: texts, and hashes of their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

import numpy as np

from gpuir.cost import local
from gpuir.cost.work import Work
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import BY_OPERAND, Tile
from gpuir.ir.types import DType
from gpuir.store import digest
from gpuir.targets.target import Target

# Of a target, what no prediction goes by.
WORDS = ("name", "title", "aliases", "notes", "sources", "discrepancies", "base")


def kernel_key(work: Work) -> str:
    """A hash of all that a kernel does. It stays when a later version of gpuir tells kernels apart
    by more, if this one has the default there."""
    return digest(_text(work))[:16]


def kernel_text(work: Work) -> str:
    """A kernel for people to read, and its columns, as in `Target.local`:
    `gemm f16.b=1 m=512 n=512 k=64 bytes=...`."""
    return f"{local.label(work)}.{local.point(local.columns(work))}"


def columns_in(text: str) -> tuple[str, dict[str, float]]:
    """The kind and the columns that `kernel_text` wrote."""
    kind, _, point = text.partition(".")
    return kind, local.columns_of(point)


def target_key(target: Target) -> str:
    """A hash of a target's numbers, and of the device whose constants it has."""
    numbers = {f.name: getattr(target, f.name) for f in fields(target) if f.name not in WORDS}
    return digest(_text({**numbers, "device": target.device}))[:16]


def _text(value: Any) -> str:
    """A value as text: of records the fields that differ from their defaults, numbers as floats."""
    match value:
        case None | bool() | str():
            return repr(value)
        case DType():
            return value.name
        case Mapping():
            items = sorted(cast("Mapping[str, Any]", value).items())
            return f"{{{' '.join(f'{k}={_text(v)}' for k, v in items)}}}"
        case tuple() | list():
            return f"({' '.join(map(_text, cast('tuple[Any, ...]', value)))})"
        case _ if is_dataclass(value):
            parts = ((f.name, f.default, getattr(value, f.name)) for f in fields(value))
            kept = (f"{name}={_text(v)}" for name, d, v in parts if d is MISSING or v != d)
            return f"{type(value).__name__}({' '.join(kept)})"
        case _ if np.ndim(value):
            raise UsageError(
                "a store takes one kernel at a time, but this describes many kernels",
                fix="give one number for each extent",
            )
        case _:
            return repr(float(value))


def tile_in(text: str) -> Tile:
    """The tile whose `settings` a text is."""
    dims, _, options = text.partition(";")
    plain: dict[str, int] = {}
    parts: dict[str, dict[str, int]] = {}
    for name, n in _numbers(options).items():
        part, dot, of = name.partition(".")
        if dot:
            parts.setdefault(part, {})[of] = n
        else:
            plain[name] = n
    given: dict[str, Any] = {
        part: tuple((int(of) if part in BY_OPERAND else of, n) for of, n in found.items())
        for part, found in parts.items()
    }
    return Tile(tuple(_numbers(dims).items()), **plain, **given)


def _numbers(text: str) -> dict[str, int]:
    pairs = (field.strip().partition("=") for field in text.split(",") if field.strip())
    return {name: int(n) for name, _, n in pairs}
