"""Host machines as data: how much longer than on the reference one thread's work takes there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from gpuir.ir.door import PATH, takes
from gpuir.targets.spec import (
    Raw,
    SpecKind,
    check_name,
    check_notes,
    paths_to_text,
    quoted,
    record,
)
from gpuir.targets.target import FrozenTable, Quantity, Sourced

REFERENCE = "reference"  # the host that the shipped profiles' numbers are of
Spread = Annotated[float, Quantity("", 1, 10, "times as long, or as short, in 80 % of cases")]
_NO_TEXT: FrozenTable[str] = FrozenTable()


@dataclass(frozen=True, repr=False)
class HostMachine(Sourced):
    """A machine that launches kernels. What one thread of it does takes `slowdown` times as long as
    on the reference, in 80 % of cases between 1/`uncertainty` and `uncertainty` times that.
    `single_thread` is PassMark's score of one thread of its `processor`, where that is what the
    slowdown was computed from."""

    name: str
    title: str
    slowdown: Annotated[float, Quantity("", 0.1, 10, "times as long as on the reference")]
    processor: str = ""
    single_thread: Annotated[float, Quantity("", 1e2, 1e5, "PassMark, one thread")] | None = None
    uncertainty: Spread = 1.0
    base: str = ""
    notes: str = ""
    sources: FrozenTable[str] = _NO_TEXT

    def __hash__(self) -> int:
        return hash(self.name)


@takes(name=PATH)
def load_host(name: str | Path) -> HostMachine:
    """The host of a built-in name or of a `.toml` path. TargetError when nothing has that name or
    the file is wrong."""
    return cast(HostMachine, _KIND.load(str(name)))


def dump_host(host: HostMachine) -> str:
    """The text of the file of a host that was measured."""
    lines = ["# Written by gpuir. Times of one thread.", ""]
    lines += [f"name = {quoted(host.name)}", f"title = {quoted(host.title)}"]
    lines += [f"slowdown = {host.slowdown:g}", f"uncertainty = {host.uncertainty:g}"]
    lines += ["", "[sources]"]
    lines += [f"{quoted(path)} = {quoted(text)}" for path, text in host.sources.items()]
    return "\n".join(lines) + "\n"


def host_names() -> tuple[str, ...]:
    """Names of the built-in hosts, sorted."""
    return tuple(_KIND.shipped)


def _host_of(raw: Raw, where: str) -> HostMachine:
    sources = paths_to_text(raw, "sources", where)
    host = cast(
        HostMachine, record(HostMachine, {**raw, "sources": FrozenTable(sources)}, "", where)
    )
    check_name(host.name, "host", where)
    check_notes(host, {"sources": sources}, where)
    return host


_KIND = SpecKind("host", REFERENCE, ("hosts",), _host_of)
