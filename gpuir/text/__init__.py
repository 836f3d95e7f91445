"""The text of graphs, schedules and pipelines, both ways."""

from gpuir.text.parser import parse, parse_passes, parse_schedule
from gpuir.text.printer import show

__all__ = ["parse", "parse_passes", "parse_schedule", "show"]
