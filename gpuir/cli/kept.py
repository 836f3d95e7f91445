"""What a search for a plan has simulated, in a store that says of what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.cli.options import Costing
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Graph
    from gpuir.plan.parallel import Tried
    from gpuir.store import Store
    from gpuir.targets.cluster import Cluster

# Options that choose among plans, or how they are shown: what a plan takes is the same.
ASIDE = (
    *("tp", "pp", "dp", "cp", "ep", "zero", "microbatch", "recompute", "best", "exhaustive"),
    *("resume", "price", "format", "width", "output", "no_cache"),
)
# The options that may be why what decides a result differs, where not all are.
OF = {
    "cluster": ("cluster",),
    "profile": ("profile", "host", "tf32"),
    "predictor": ("predictor", "modules"),
    "gpuir": (),
}


def earlier(store: Store, decides: Mapping[str, str]) -> dict[str, Tried]:
    """The plans of a store, by name; UsageError where it keeps those of another search."""
    from gpuir.plan.parallel import read

    options = dict(_options())
    there = store.rests_on("plan", decides), store.rests_on("plan options", options)
    if there[0] != decides:
        raise _another(store.path, (decides, options), there)
    return read(dict(store.all("select name, plan from plans order by rowid")), store.path)


def decides(g: Graph, machine: Cluster, costing: Costing, loaded: Loaded) -> dict[str, str]:
    """What decides how long each plan of a model takes: digests of the model's text, of what the
    files of the cluster, its GPU and the profile say; the predictor, and gpuir's version."""
    import gpuir
    from gpuir.store import digest, version
    from gpuir.targets.profile import profile_of
    from gpuir.targets.target import walk

    return {
        "model": digest(gpuir.show(g)),
        "cluster": digest(repr(list(_parts(machine)))),
        "profile": digest(repr(list(walk(profile_of(g))))),
        "predictor": _predictor(costing.predictor, loaded),
        "gpuir": version(),
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
    from gpuir.store import digest

    plain = name.partition("@")[0]
    if plain in PREDICTORS:
        return plain
    found = find_predictor(name, loaded.predictors)
    file = getsourcefile(cast(Any, found if hasattr(found, "__code__") else type(found)))
    return f"{plain} {digest(Path(file).read_text('utf-8') if file else '')}"


def _options() -> Iterator[tuple[str, str]]:
    """Each option of the command as one would write it: `--optimizer adamw`, `no --optimizer`."""
    for name, value in click.get_current_context().params.items():
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


Facts = tuple[Mapping[str, str], Mapping[str, str]]  # what decides results, and the options


def _another(path: str, here: Facts, there: Facts) -> UsageError:
    """With the settings that differ."""
    from gpuir.ir.errors import UsageError

    (decides, options), (decided, before) = here, there
    found: dict[str, tuple[str, str]] = {}  # what is said of each here, and was said there
    for name, value in decides.items():
        if (old := decided.get(name)) == value:
            continue
        pairs = {n: (options[n], before.get(n, f"no --{n}")) for n in OF.get(name, tuple(options))}
        differ = {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}
        if name == "gpuir":
            differ = {name: (f"gpuir {value}", f"gpuir {old}")}
        changed = f"what {options.get(name, name)} says"
        found |= differ or {name: (f"{changed} now", f"{changed.replace('says', 'said')} then")}
    return UsageError(
        "the file belongs to another search",
        where=path,
        expected=", ".join(new for new, _ in found.values()),
        found=", ".join(old for _, old in found.values()),
        fix="--resume another file, or delete this one",
    )
