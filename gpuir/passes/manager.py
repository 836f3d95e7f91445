"""Passes and pipelines: a graph at one level in, a graph at another out, verified in between."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from gpuir.ir.door import CALLED, FLAG, holds, many, of_type, takes
from gpuir.ir.errors import GpuirError, PluginError, UsageError, VerifyError
from gpuir.ir.graph import GRAPH, Graph, Level
from gpuir.ir.verify import verify
from gpuir.plugins import blamed, is_ours

if TYPE_CHECKING:
    from gpuir.targets.target import Target


@dataclass(frozen=True)
class Pass:
    """Subclass as a frozen dataclass whose fields are its options; set `name`, `takes`, `gives`.

    A pipeline's text and a pass's documentation come from its fields and docstring. `takes` None
    means any level; `gives` None means the level it was given.
    """

    name: ClassVar[str] = ""
    takes: ClassVar[Level | None] = Level.graph
    gives: ClassVar[Level | None] = Level.graph

    def run(self, g: Graph) -> Graph:
        raise NotImplementedError

    def on(self, target: Target) -> Self:
        """The pass as it is for a target, where that makes a difference."""
        return self

    def __str__(self) -> str:
        """`fuse{max_ops=8}`: the options that differ from their defaults."""
        options = [
            f"{f.name}={_option(value)}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return self.name + (f"{{{','.join(options)}}}" if options else "")


def _option(value: object) -> str:
    """An option's value as pipeline text: bare where it reads back the same, else quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = getattr(value, "__name__", "") or str(value)  # a function by its name
    plain = text.replace("-", "").replace("_", "").replace(".", "")
    if plain.isalnum() and text[0].isalpha() and text not in ("true", "false", "inf", "nan"):
        return text
    return json.dumps(text, ensure_ascii=False)


def make_pass(kind: type[Pass], options: dict[str, Any]) -> Pass:
    """A pass from its options by name; an unknown one, or one of the wrong type, is refused."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name not in fields:
            known = ", ".join(_described(f) for f in fields.values())
            raise UsageError(
                f"pass {kind.name!r} has no option {name!r}", expected=known or "no options at all"
            )
        given[name] = _typed(kind, fields[name], value)
    missing = [
        name
        for name, f in fields.items()
        if name not in options
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(
            f"pass {kind.name!r} needs {', '.join(missing)}",
            fix=f"{kind.name}{{{','.join(f'{m}=...' for m in missing)}}}",
        )
    return kind(**given)


def _described(f: dataclasses.Field[Any]) -> str:
    """An option in a message: its name, and its default or that it has none."""
    if f.default is not dataclasses.MISSING:
        return f"{f.name} (default {f.default!r})"
    return f.name if f.default_factory is not dataclasses.MISSING else f"{f.name} (required)"


LARGEST_OPTION = (1 << 31) - 1


def _typed(kind: type[Pass], f: dataclasses.Field[Any], value: object) -> object:
    """An option's value, if it is of the type that its default or its annotation says, and in its
    range: integers count something, so they are 1 or more where their default is, else 0 or more.
    """
    known = f.default not in (None, dataclasses.MISSING)
    wants = type(f.default).__name__ if known else getattr(f.type, "__name__", f.type)
    if wants == "float" and type(value) is int:
        value = float(value) if abs(value) < 2**63 else value
    if wants in ("int", "float", "str", "bool") and type(value).__name__ != wants:
        raise UsageError(
            f"pass {kind.name!r}: option {f.name!r} has the wrong type",
            expected=f"{wants}, like {f.default!r}" if known else wants,
            found=repr(value),
        )
    least = min(int(f.default), 1) if isinstance(f.default, int) else 0
    if wants == "int" and not least <= cast("int", value) <= LARGEST_OPTION:
        allowed = f"{least} to {LARGEST_OPTION}"
    elif wants == "float" and not isfinite(cast("float", value)):
        allowed = "a finite number"
    else:
        return value
    raise UsageError(
        f"pass {kind.name!r}: option {f.name!r} is out of range",
        expected=allowed,
        found=repr(value),
    )


LOG = logging.getLogger("gpuir.passes")
Watch = Callable[[Pass, Graph], None]


@holds(passes=many(of_type(Pass, "a pass", "gpuir.pipeline('canonicalize,legalize')")))
@dataclass(frozen=True)
class Pipeline:
    """Passes in order. Levels are checked when it is made; a graph's own when it is run."""

    passes: tuple[Pass, ...]

    def __repr__(self) -> str:
        of = f"{len(self.passes)} pass{'es' * (len(self.passes) != 1)}"
        return f"<Pipeline of {of}: {', '.join(p.name for p in self.passes)}>"

    def __post_init__(self) -> None:
        level: Level | None = None
        for before, p in zip((None, *self.passes), self.passes, strict=False):
            if before is not None and level is not None and p.takes not in (None, level):
                _wrong_level(p, level, f"{before.name} gives level {level.name}")
            level = level if p.gives is None else p.gives
            level = p.takes if p.gives is None and level is None else level

    def on(self, target: Target) -> Pipeline:
        """The pipeline as it is for a target."""
        return Pipeline(tuple(p.on(target) for p in self.passes))

    @takes(g=GRAPH, verify_each=FLAG, watch=CALLED)
    def run(self, g: Graph, verify_each: bool = True, watch: Watch | None = None) -> Graph:
        """The graph through every pass; `watch` sees it after each. Verified at the door, and with
        `verify_each` so that an error names the pass that made it: after the passes of plug-ins,
        and at the end. If that finds a fault, all passes run again, each verified. The logger
        `gpuir.passes` gets a line a pass, at level DEBUG."""
        verify(g)
        if verify_each and watch is None:
            try:
                made = self._run(g, None, is_ours)
                verify(made)
                return made
            except Exception as error:
                if isinstance(error, GpuirError) and not isinstance(error, VerifyError):
                    raise  # what it says is of the model, not of a pass
        return self._run(g, watch, lambda _: not verify_each)

    def _run(self, g: Graph, watch: Watch | None, trusted: Callable[[Pass], bool]) -> Graph:
        """The graph through every pass, verified after those that are not trusted."""
        for p in self.passes:
            if p.takes not in (None, g.level):
                _wrong_level(p, g.level, f"@{g.name} has the level {g.level.name}")
            before, since = g, perf_counter()
            g = _made(p, g, not trusted(p))
            if LOG.isEnabledFor(logging.DEBUG):
                counts = (sum(1 for _ in made.walk()) for made in (before, g))
                LOG.debug(f"%8.3f s  {p}: %s nodes to %s", perf_counter() - since, *counts)
            if watch:
                watch(p, g)
        return g

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))


def _made(p: Pass, g: Graph, verified: bool) -> Graph:
    """What a pass makes of a graph; PluginError when it is not what it says and not ours."""
    what = f"the pass {p.name!r}"
    with blamed(p, what):
        made = p.run(g)
    error = VerifyError if is_ours(p) else PluginError
    if not isinstance(made, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error(f"{what} returns no graph", found=repr(made))
    if not verified:
        return made
    if p.gives not in (None, made.level):
        raise error(
            f"{what} returns a graph of the wrong level",
            expected=f"a graph of level {p.gives.name}",
            found=f"a graph of level {made.level.name}",
        )
    try:
        verify(made, by=p.name)
    except VerifyError as e:
        fix = f"this is a bug in {what}, in the module {type(p).__module__}"
        if is_ours(p):
            raise
        raise PluginError(e.what, where=e.where, expected=e.expected, found=e.found, fix=fix) from e
    return made


def _wrong_level(p: Pass, level: Level, found: str) -> None:
    takes = p.takes.name if p.takes is not None else "any"
    way = {
        Level.graph: "",
        Level.fused: "fuse",
        Level.kernel: "legalize",
        Level.tiled: "tile{target=...}",
        Level.costed: "annotate",
    }
    missing = [way[x] for x in Level if p.takes is not None and level < x <= p.takes]
    raise UsageError(
        f"pass {p.name!r} needs a graph of level {takes}",
        found=found,
        fix=f"put {','.join(missing)} before it"
        if missing
        else "move it to an earlier place in the pipeline",
    )
