"""A software stack as data: which ops share a launch, in which dtypes, and what the host spends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, cast

from gpuir.ir.errors import TargetError, UsageError, nearest
from gpuir.ir.graph import Graph
from gpuir.ir.plugins import installed
from gpuir.targets.load import paths_to_text, plugin_path, read_spec, record, refuse, spec_folder
from gpuir.targets.target import Quantity, Row, Table, walk

HostTime = Annotated[float, Quantity("s", 0, 1e-2)]
Queue = Annotated[int, Quantity("", 1, 1 << 20, "launches in flight")]
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_NO_TEXT: Table[str] = Table()
TF32 = ("none", "conv", "all")


@dataclass(frozen=True)
class Host:
    """What one host thread spends around the launches of a model's ops, in seconds.

    The five parts are those of Lin et al., TPDS 2024, section 4: `between_s` from one op to the
    next (T1), `before_s` from an op's start to its first launch (T2), `launch_s` the launch call
    (T4), `next_s` between two launches of an op (T5), `after_s` from the last launch to the op's
    end (T3). An op that launches nothing (a view) takes `empty_s`, a call of the model `call_s`
    before its first op. `graph_s` is what each kernel adds to the one launch of a CUDA graph, with
    `graph` the whole call is one. `queue` launches may wait for the device before the host does.
    """

    between_s: HostTime
    before_s: HostTime
    launch_s: HostTime
    next_s: HostTime
    after_s: HostTime
    empty_s: HostTime
    call_s: HostTime
    queue: Queue
    graph: bool = False
    graph_s: HostTime = 0.0


@dataclass(frozen=True)
class Profile:
    """How a stack runs a model. `passes` is the pipeline from a graph to its kernels, and says what
    the stack recognises and fuses; `tf32` which f32 kernels run in TF32 on the matrix units by
    default: `none`, `conv` or `all`. `streams` is how many run independent branches beside each
    other."""

    name: str
    title: str
    passes: str
    tf32: str
    host: Host
    streams: Annotated[int, Quantity("", 1, 128)] = 1
    notes: str = ""
    sources: Table[str] = field(default=_NO_TEXT, repr=False)

    def __hash__(self) -> int:
        return hash(self.name)

    def source(self, path: str) -> str:
        """Where the number of a field comes from: its own entry, else its longest prefix's."""
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path.rpartition(".")[0]
        return ""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What no document says, in words."""
        together: dict[str, list[str]] = {}
        for path, text in self.sources.items():
            if text.startswith("assumed"):
                together.setdefault(text, []).append(path)
        return tuple(f"{', '.join(paths)}: {text}" for text, paths in together.items())

    def rows(self) -> list[Row]:
        """Every field that has a value, in the order of a profile's file."""
        return [
            Row(path, value, spec.unit if spec else "", self.source(path))
            for path, spec, value in walk(self)
        ]


def load_profile(name: str | Path) -> Profile:
    """The profile of a built-in name, of a `.toml` path, or of a plug-in's name. TargetError when
    nothing has that name or the file is wrong."""
    return _loaded(_find(str(name)))


def tf32_rule(given: str, g: Graph) -> str:
    """Which f32 kernels of a graph run in TF32: as asked for, else as its profile has it, else
    none. UsageError for no such rule."""
    if given not in ("", *TF32):
        raise UsageError(f"no tf32 rule {given!r}", fix=f"one of {', '.join(TF32)}")
    return given or (load_profile(g.profile).tf32 if g.profile else "none")


def profile_names() -> tuple[str, ...]:
    """Names of the built-in profiles and of those that installed plug-ins add, sorted."""
    return tuple(sorted({*_files(), *installed("profiles")}))


@cache
def _files() -> Mapping[str, Path]:
    return {path.stem: path for path in sorted((spec_folder() / "profiles").glob("*.toml"))}


def _find(name: str) -> Path:
    if name.endswith(".toml") or "/" in name or "\\" in name:
        return Path(name)
    if name in _files():
        return _files()[name]
    plugins = installed("profiles")
    if name in plugins:
        return plugin_path(plugins[name], "profile")
    close = nearest(name, profile_names())
    raise TargetError(
        f"no profile is called {name!r}",
        fix=(close if close.startswith("did") else "`gpuir profiles` lists the names")
        + "\nor give the path of a .toml file of your own",
    )


@cache
def _loaded(path: Path) -> Profile:
    raw, where = dict(read_spec(path)), str(path)
    raw["sources"] = Table(paths_to_text(raw, "sources", where))
    profile = cast(Profile, record(Profile, raw, "", where))
    if not _NAME.fullmatch(profile.name):
        refuse(
            f"{profile.name!r} cannot be the name of a profile",
            where,
            "name",
            expected="lower-case letters, digits, `-` and `.`",
            fix="write my-stack",
        )
    if profile.tf32 not in TF32:
        refuse(
            "tf32 is no such rule",
            where,
            "tf32",
            found=profile.tf32,
            fix=f"one of {', '.join(TF32)}",
        )
    for path_, quantity, _ in walk(profile):
        if quantity and not profile.source(path_):
            refuse(
                f"{path_} has no source",
                where,
                path_,
                fix=f'add "{path_}" = "..." under [sources]: a document, or `assumed: why`',
            )
    return profile
