"""The costed graph itself, and its schedule, in gpuir's own text."""

from __future__ import annotations

from collections.abc import Sequence

from gpuir.backends.terminal import Terminal
from gpuir.ir.errors import UsageError
from gpuir.report.answer import Answer
from gpuir.schedule import extract
from gpuir.text import show


def ir(summaries: Sequence[Answer], _: Terminal) -> str:
    """The costed graph: reads back as a `.gir` file."""
    return show(only(summaries, "ir").graph)


def schedule(summaries: Sequence[Answer], _: Terminal) -> str:
    """The tiles alone: to edit, or for a tuner; `--schedule FILE` applies them."""
    return show(extract(only(summaries, "schedule").graph))


def only(summaries: Sequence[Answer], format: str) -> Answer:
    """The one run that a format holds; UsageError where there are several."""
    if len(summaries) > 1:
        raise UsageError(
            f"the format {format!r} can hold only one target under one profile",
            found=", ".join(f"{s.device.name} under {s.profile}" for s in summaries),
            fix="give one --target and one --profile, or use the formats table, json or csv",
        )
    return summaries[0]
