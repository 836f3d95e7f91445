"""What a user types to have a number that `gpuir eval` scores: command lines and calls.

A question is asked here by the calls that the command of its text makes.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpuir.simulate.parallel import Parallel

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.report.answer import Answer
    from gpuir.simulate.step import Step


@dataclass(frozen=True)
class Asked:
    """A model, as `gpuir.load` takes it with `options`, under a profile."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    profile: str | None = None
    tf32: bool | None = None

    def graph(self) -> Graph:
        import gpuir

        under: dict[str, Any] = {"profile": self.profile, "tf32": self.tf32}
        return gpuir.load(self.model, warn=lambda _: None, **under, **self.options)

    def line(self, command: str, given: Mapping[str, Any]) -> str:
        """The command line that asks the same; `given` are its other options."""
        tf32 = {} if self.tf32 is None else {"tf32" if self.tf32 else "no-tf32": True}
        return line(command, self.model, {**given, **self.options, "profile": self.profile, **tf32})


@dataclass(frozen=True)
class Analysis(Asked):
    """A run on one target."""

    target: str = ""

    def answer(self, graph: Graph | None = None) -> Answer:
        """What it comes to; `graph` is the model where it is loaded, or lowered, already."""
        import gpuir

        g = self.graph() if graph is None else graph
        return gpuir.analyze(g, self.target, profile=self.profile, tf32=self.tf32)

    @property
    def command(self) -> str:
        return self.line("analyze", {"target": self.target})

    @property
    def call(self) -> str:
        given = {"profile": self.profile, "tf32": self.tf32, **self.options}
        words = "".join(f", {n}={value!r}" for n, value in given.items() if value is not None)
        return f"gpuir.analyze({self.model!r}, {self.target!r}{words})"


@dataclass(frozen=True)
class Simulation(Asked):
    """A step over the ranks of a cluster; sizes are those of the whole step."""

    cluster: str = ""
    parallel: Parallel = field(default_factory=Parallel)

    def step(self) -> Step:
        import gpuir
        from gpuir.passes.microbatch import Microbatch

        return gpuir.simulate_ranks(
            Microbatch(self.parallel.microbatches).run(self.graph()),
            self.cluster,
            self.parallel,
            profile=self.profile,
            tf32=self.tf32,
        ).step

    @property
    def command(self) -> str:
        plain = asdict(Parallel())
        layout = {n: v for n, v in asdict(self.parallel).items() if v != plain[n]}
        return self.line("simulate", {"cluster": self.cluster, **layout})


def line(command: str, of: str, options: Mapping[str, Any]) -> str:
    """The line of a command with its argument and its options."""
    return shlex.join(("gpuir", command, of, *_words(options)))


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """`--option value ...`: what is None, False or empty is left out, True is a flag, and a mapping
    `NAME=VALUE,...`."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is None or value is False or value in ("", {}, ()):
            continue
        if isinstance(value, Mapping):
            pairs = cast("Mapping[str, Any]", value)
            yield from (option, ",".join(f"{k}={v}" for k, v in pairs.items()))
        elif value is True:
            yield option
        else:
            yield from (option, str(value))


def config(of: Mapping[str, Any], name: str) -> str:
    """A model by its config, which is written to a file that stays: `hf:FOLDER`."""
    return f"hf:{kept(of, name, 'config.json').parent}"


def kept(of: Mapping[str, Any], name: str, file: str) -> Path:
    """A file of JSON that stays, in a folder of its own: of equal contents there is one."""
    text = json.dumps(dict(of), indent=1, sort_keys=True)
    plain = "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
    called = f"{plain}-{sha256(text.encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / "gpuir-eval" / called
    if not (folder / file).exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{file}.{id(of)}.part"
        part.write_text(text)
        part.replace(folder / file)
    return folder / file
