"""What a search has simulated, kept in a file whose first line says of what."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpuir.cli.output import check_ahead
from gpuir.files import read_text
from gpuir.ir.errors import UsageError

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.ir.graph import Graph
    from gpuir.plan.parallel import Tried
    from gpuir.targets.cluster import Cluster

SCHEMA = "gpuir.kept/1"
# Options that choose among plans, or how they are shown: what a plan takes is the same.
ASIDE = (
    *("tp", "pp", "dp", "cp", "ep", "zero", "microbatch", "recompute", "best", "exhaustive"),
    *("resume", "price", "format", "width", "output"),
)
# The options that may be why what decides a result differs, where not all are.
OF = {
    "cluster": ("cluster",),
    "profile": ("profile", "tf32"),
    "predictor": ("predictor", "modules"),
    "gpuir": (),
}
FIX = "--resume another file, or delete this one"


class Kept:
    """The plans `known` from the file, to which each that is simulated is added. Without a path
    nothing is kept."""

    def __init__(self, path: str | None):
        self.path, self.known = path, dict[str, "Tried"]()
        self.text = ""
        if path is not None:
            check_ahead(path)
            if Path(path).exists():
                self.text = read_text(path, "the earlier search", fix=FIX)

    def open(self, given: Mapping[str, Any], decides: Mapping[str, str]) -> None:
        """Goes on from the file; UsageError where it keeps plans of another search."""
        from gpuir.plan.parallel import read_lines

        if self.path is None:
            return
        here = {"schema": SCHEMA, "decides": dict(decides), "options": dict(_options(given))}
        whole = self.text[: self.text.rfind("\n") + 1]  # what was written when it was stopped
        head, _, rest = whole.partition("\n")
        if whole:
            _check(head, here, self.path)
            self.known = read_lines(rest, self.path, first=2)
        elif not json.dumps(here).startswith(self.text):
            raise UsageError(
                "the file does not come from an earlier search", where=self.path, fix=FIX
            )
        if whole != self.text or not whole:
            self._write("w", whole or json.dumps(here) + "\n")

    def add(self, tried: Tried) -> None:
        from gpuir.plan.parallel import line_of

        if self.path is not None:
            self._write("a", line_of(tried))

    def _write(self, mode: str, text: str) -> None:
        try:
            with open(str(self.path), mode, encoding="utf-8") as out:
                out.write(text)
        except OSError as error:
            raise UsageError(
                "cannot save the results of the search",
                where=str(self.path),
                found=error.strerror or str(error),
                fix="give --resume a file elsewhere",
            ) from error


def decides(g: Graph, machine: Cluster, given: Mapping[str, Any], loaded: Loaded) -> dict[str, str]:
    """What decides how long each plan of a model takes: digests of the model's text, of what the
    files of the cluster, its GPU and the profile say; the predictor, and gpuir's version."""
    import gpuir
    from gpuir.targets.profile import profile_of
    from gpuir.targets.target import walk

    return {
        "model": _digest(gpuir.show(g)),
        "cluster": _digest(repr(list(_parts(machine)))),
        "profile": _digest(repr(list(walk(profile_of(g))))),
        "predictor": _predictor(given["predictor"], loaded),
        "gpuir": gpuir.__version__,
    }


def _parts(machine: Cluster) -> Iterator[object]:
    """What its file says, and those of its GPUs; of several kinds also of the cluster of each."""
    from gpuir.targets.target import walk

    yield list(walk(machine))
    for x in machine.stretches:
        yield (list(walk(x.cluster)), x.first, x.end, x.skipped)
    yield from (list(walk(gpu)) for gpu in machine.targets)


def _predictor(name: str, loaded: Loaded) -> str:
    """Its name, and a digest of the file it is in, which is not ours where it has no version."""
    from inspect import getsourcefile

    from gpuir.cost.table import PREDICTORS, find_predictor

    plain = name.partition("@")[0]
    if plain in PREDICTORS:
        return plain
    found = find_predictor(name, loaded.predictors)
    file = getsourcefile(cast(Any, found if hasattr(found, "__code__") else type(found)))
    return f"{plain} {_digest(Path(file).read_text('utf-8') if file else '')}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


def _options(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each option as one would write it: `--optimizer adamw`, `no --optimizer`."""
    for name, value in given.items():
        flag = {"model": "the model", "modules": "--load"}.get(name, f"--{name.replace('_', '-')}")
        if name in ASIDE:
            continue
        if name == "tf32" and value is False:
            yield name, "--no-tf32"
        elif name == "modules":
            yield name, f"{flag} {' '.join(value)}" if value else f"no {flag}"
        elif value is True:
            yield name, flag
        else:
            text = " ".join(_words(value))
            yield name, f"{flag} {text}" if text else f"no {flag}"


def _words(value: Any) -> Iterator[str]:
    """`(("batch", 8), ("seq", 128))` → `batch=8`, `seq=128`."""
    match value:
        case None | False:
            return
        case (str(name), str() | int() | float() as x):
            yield f"{name}={x}"
        case (str(name), (*numbers,)):
            yield f"{name}={','.join(map(str, cast('list[object]', numbers)))}"
        case (*several,):
            for x in cast("list[object]", several):
                yield from _words(x)
        case _:
            yield str(value)


def _check(head: str, here: Mapping[str, Any], path: str) -> None:
    """UsageError, with the settings that differ, where the first line of a file is of another
    search."""
    try:
        there: Any = json.loads(head)
        if there["schema"] != SCHEMA:
            raise ValueError
        decided, options = dict(there["decides"]), dict(there["options"])
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            "the file does not come from an earlier search", where=path, fix=FIX
        ) from None
    found: dict[str, tuple[str, str]] = {}  # what is said of each here, and was said there
    for name, value in here["decides"].items():
        if (old := decided.get(name)) == value:
            continue
        of = OF.get(name, tuple(here["options"]))
        pairs = {n: (here["options"][n], str(options.get(n, f"no --{n}"))) for n in of}
        differ = {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
        if name == "gpuir":
            differ = {name: (f"gpuir {value}", f"gpuir {old}")}
        changed = f"what {here['options'].get(name, name)} says"
        found |= differ or {name: (f"{changed} now", f"{changed.replace('says', 'said')} then")}
    if found:
        raise UsageError(
            "the file belongs to another search",
            where=path,
            expected=", ".join(new for new, _ in found.values()),
            found=", ".join(old for _, old in found.values()),
            fix=FIX,
        )
