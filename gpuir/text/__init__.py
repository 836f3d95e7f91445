"""The text of graphs, schedules and pipelines, both ways. The parser of graphs is loaded when one
is parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuir.text.pipelines import parse_passes
from gpuir.text.printer import show

if TYPE_CHECKING:
    from gpuir.text.parser import parse, parse_schedule

__all__ = ["parse", "parse_passes", "parse_schedule", "show"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from gpuir.text import parser

        return getattr(parser, name)
    raise AttributeError(f"module 'gpuir.text' has no attribute {name!r}")
