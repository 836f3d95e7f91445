"""A design space as a file states it: which models, sizes, dtypes, stacks, devices and plans.

A space is never written out: points are numbered, jobs (a model, its sizes, a dtype, a stack) times
columns (a device, or a plan on a cluster), and looked up by their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NoReturn, cast

from gpuir.files import read_toml
from gpuir.ir.errors import GpuirError, UsageError, nearest
from gpuir.ir.types import DTYPES
from gpuir.simulate.parallel import Parallel
from gpuir.targets.cluster import load_cluster
from gpuir.targets.load import load_target, target_names
from gpuir.targets.mig import mig_of
from gpuir.targets.profile import load_profile

Dims = tuple[tuple[str, int], ...]

OWN = "own"  # the dtype that a model has
LARGEST = 1 << 40  # of a size, and of the points of a space
DEGREES = ("dp", "tp", "pp", "cp", "ep", "microbatches", "zero")
# What of `gpuir.load` a space may give, to all of its models.
LOAD = {
    **dict.fromkeys(("train", "fused", "accumulate", "fast_norms", "mask", "strict"), bool),
    **dict.fromkeys(("fp16", "channels_last"), bool),
    **dict.fromkeys(("task", "attention", "phase", "cache_dtype", "optimizer", "autocast"), str),
    **dict.fromkeys(("autodiff", "loss", "checkpoint", "indices"), str),
    **dict.fromkeys(("past",), int),
    **dict.fromkeys(("expert_skew", "clip"), float),
}


@dataclass(frozen=True)
class ModelAxis:
    """A model, as `gpuir.load` takes it, and the sizes that it is tried at."""

    path: str
    dims: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def sizes(self) -> int:
        return prod(len(values) for _, values in self.dims)

    def at(self, i: int) -> Dims:
        """The i-th choice of sizes, the last dimension changing first."""
        found: list[tuple[str, int]] = []
        for name, values in reversed(self.dims):
            i, place = divmod(i, len(values))
            found.append((name, values[place]))
        return tuple(reversed(found))


@dataclass(frozen=True)
class Job:
    """What is loaded and lowered once. An empty profile is the default of the model's framework."""

    model: str
    dims: Dims
    dtype: str
    profile: str

    @property
    def items(self) -> int:
        """How many a run does at once: the extent of the one dimension that is called a batch."""
        found = [n for name, n in self.dims if "batch" in name.lower()]
        return found[0] if len(found) == 1 else 1


@dataclass(frozen=True)
class Hardware:
    """GPUs nobody has built: every choice of these numbers, in place of those of each base."""

    base: tuple[str, ...]
    numbers: tuple[tuple[str, tuple[float, ...]], ...]

    @cached_property
    def count(self) -> int:
        return len(self.base) * prod(len(values) for _, values in self.numbers)

    def at(self, i: int) -> tuple[str, tuple[tuple[str, float], ...]]:
        """The i-th: its base, and the numbers set."""
        found: list[tuple[str, float]] = []
        for name, values in reversed(self.numbers):
            i, place = divmod(i, len(values))
            found.append((name, values[place]))
        return self.base[i], tuple(reversed(found))


@dataclass(frozen=True)
class RankPlan:
    """A model over the ranks of a cluster."""

    cluster: str
    parallel: Parallel


@dataclass(frozen=True)
class Site:
    """Where a job runs: a device, with numbers set, or a plan."""

    target: str = ""
    numbers: tuple[tuple[str, float], ...] = ()
    plan: RankPlan | None = None

    @property
    def name(self) -> str:
        """What `load_target` knows the device by."""
        return "+".join((self.target, *(f"{path}={_number(n)}" for path, n in self.numbers)))


@dataclass(frozen=True)
class DesignSpace:
    """Every choice of model, sizes, dtype and profile, on every target, hypothetical GPU and plan.
    `load` are further options of loading."""

    models: tuple[ModelAxis, ...]
    dtypes: tuple[str, ...]
    profiles: tuple[str, ...]
    targets: tuple[str, ...]
    hardware: Hardware = Hardware((), ())
    plans: tuple[RankPlan, ...] = ()
    load: tuple[tuple[str, bool | int | float | str], ...] = ()

    @cached_property
    def jobs(self) -> int:
        return sum(m.sizes for m in self.models) * len(self.dtypes) * len(self.profiles)

    @cached_property
    def devices(self) -> int:
        """Columns that are one device."""
        return len(self.targets) + self.hardware.count

    @cached_property
    def columns(self) -> int:
        return self.devices + len(self.plans)

    @cached_property
    def points(self) -> int:
        return self.jobs * self.columns

    def job(self, i: int) -> Job:
        i, profile = divmod(i, len(self.profiles))
        i, dtype = divmod(i, len(self.dtypes))
        for model in self.models:
            if i < model.sizes:
                return Job(model.path, model.at(i), self.dtypes[dtype], self.profiles[profile])
            i -= model.sizes
        raise IndexError(i)

    def column(self, i: int) -> Site:
        if i < len(self.targets):
            return Site(self.targets[i])
        if i < self.devices:
            return Site(*self.hardware.at(i - len(self.targets)))
        return Site(plan=self.plans[i - self.devices])

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The names of all dimensions, in the order they are first met."""
        return tuple(dict.fromkeys(name for m in self.models for name, _ in m.dims))


def _number(n: float) -> str:
    return str(int(n)) if float(n).is_integer() and abs(n) < 1e15 else repr(float(n))


# ---- from a file -------------------------------------------------------------------------------


def read_space(path: str) -> DesignSpace:
    """The space that a TOML file states; UsageError or TargetError, with the place in the file,
    where it states none. Paths of models and other files are from the file's folder."""
    return space_of(read_toml(path, "the space"), path)


def space_of(raw: Mapping[str, Any], where: str) -> DesignSpace:
    """The space of the tables of a file called `where`."""
    reader = _SpaceReader(where)
    known = ("models", "dims", "dtypes", "profiles", "targets", "hardware", "plans", "load")
    reader.keys(raw, "", known)
    shared = reader.dims(raw.get("dims", {}), "dims")
    models = [
        reader.model(x, f"models[{i}]", shared)
        for i, x in enumerate(reader.axis(raw, "models", required=True))
    ]
    space = DesignSpace(
        models=tuple(models),
        dtypes=tuple(reader.dtype(x) for x in reader.axis(raw, "dtypes", [OWN])),
        profiles=tuple(reader.profile(x) for x in reader.axis(raw, "profiles", [""])),
        targets=tuple(reader.targets(reader.axis(raw, "targets", []))),
        hardware=reader.hardware(raw["hardware"]) if "hardware" in raw else Hardware((), ()),
        plans=tuple(reader.plans(raw["plans"])) if "plans" in raw else (),
        load=reader.load(raw.get("load", {})),
    )
    if not space.columns:
        reader.refuse(
            "targets",
            "the space has no targets",
            fix='targets = ["a100"], a table [hardware] or [[plans]]',
        )
    if space.points > LARGEST:
        reader.refuse(
            "",
            "the space has too many points",
            expected=f"at most {LARGEST:,}",
            found=f"{space.points:,}",
        )
    return space


class _SpaceReader:
    """Reads a file's tables, and says where one is wrong."""

    def __init__(self, where: str):
        self.where = where

    def refuse(
        self, place: str, what: str, *, expected: str = "", found: object = "", fix: str = ""
    ) -> NoReturn:
        where = f"{self.where}:{place}" if place else self.where
        raise UsageError(what, where=where, expected=expected, found=str(found), fix=fix)

    def keys(self, table: object, place: str, known: Iterable[str]) -> None:
        if not isinstance(table, dict):
            self.refuse(
                place, "this must be a table", found=repr(table)[:80], fix=f"write [{place}]"
            )
        for key in cast("dict[str, Any]", table):
            if key not in known:
                inner = f"{place}.{key}" if place else key
                self.refuse(inner, f"no key has the name {key!r} here", fix=nearest(key, known))

    def axis(
        self,
        table: Mapping[str, Any],
        key: str,
        default: Sequence[Any] | None = None,
        required: bool = False,
        place: str = "",
    ) -> list[Any]:
        """The values along an axis, each once; one that is named has some."""
        place = f"{place}.{key}" if place else key
        if key not in table:
            if required:
                self.refuse(place, "an axis is missing", expected=f"{key} = [...]")
            return list(default or [])
        given = table[key]
        values = cast("list[Any]", given) if isinstance(given, list) else [given]
        if not values:
            self.refuse(
                place,
                "an axis has no values",
                expected="at least one value",
                fix="remove the axis, or give it values",
            )
        found: list[Any] = []
        found += [x for i, x in enumerate(values) if x not in values[:i]]
        return found

    def text(self, value: object, place: str, like: str) -> str:
        if not isinstance(value, str) or not value:
            self.refuse(place, "this must be text", expected=like, found=repr(value)[:80])
        return value

    def beside(self, name: str) -> str:
        """A path from the file's folder; a name that is no path stays one."""
        prefix = "hf:" if name.startswith("hf:") else ""
        there = Path(self.where).parent / name.removeprefix(prefix)
        return f"{prefix}{there}" if there.exists() else name

    # -- models

    def model(self, value: object, place: str, shared: Mapping[str, tuple[int, ...]]) -> ModelAxis:
        dims = dict(shared)
        if isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            self.keys(table, place, ("path", "dims"))
            dims |= self.dims(table.get("dims", {}), f"{place}.dims")
            value = table.get("path")
        path = self.text(value, place, '"model.onnx", or { path = "model.onnx", dims = {} }')
        return ModelAxis(self.beside(path), tuple(dims.items()))

    def dims(self, table: object, place: str) -> dict[str, tuple[int, ...]]:
        if not isinstance(table, dict):
            self.refuse(
                place, "this must be a table", found=repr(table)[:80], fix=f"write [{place}]"
            )
        found: dict[str, tuple[int, ...]] = {}
        for name in cast("dict[str, Any]", table):
            numbers = self.numbers(cast("dict[str, Any]", table), name, place)
            for n in numbers:
                if not float(n).is_integer() or not 0 <= n <= LARGEST:
                    self.refuse(
                        f"{place}.{name}",
                        "a size is not valid",
                        expected=f"whole numbers, at most {LARGEST:,}",
                        found=n,
                    )
            found[name] = tuple(map(int, numbers))
        return found

    def numbers(self, table: Mapping[str, Any], key: str, place: str) -> list[float]:
        """Numbers along an axis: a list of them, or `{ from = 1, to = 9, count = 3 }`."""
        here, value = f"{place}.{key}", table[key]
        if isinstance(value, dict):
            return self.evenly(cast("dict[str, Any]", value), here)
        values = self.axis(table, key, place=place)
        for n in values:
            self.number(n, here)
        return values

    def evenly(self, table: dict[str, Any], place: str) -> list[float]:
        self.keys(table, place, ("from", "to", "count"))
        like = "{ from = 1, to = 9, count = 3 }"
        for key in ("from", "to", "count"):
            if key not in table:
                self.refuse(place, f"{key} is missing", expected=like)
            self.number(table[key], f"{place}.{key}")
        first, last, count = table["from"], table["to"], table["count"]
        if not isinstance(count, int) or not 2 <= count <= 1_000_000 or last <= first:
            self.refuse(
                place,
                "the steps are not valid",
                expected=f"steps from a number up to a larger one, in at least 2 steps: {like}",
                found=table,
            )
        steps = [first + (last - first) * i / (count - 1) for i in range(count)]
        return [int(n) if float(n).is_integer() else n for n in steps]

    def number(self, value: object, place: str) -> None:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, int | float) or not plain or not math.isfinite(value):
            self.refuse(place, "this must be a number", found=repr(value)[:80])

    def dtype(self, value: object) -> str:
        name = self.text(value, "dtypes", '"f16"')
        if name not in (OWN, *DTYPES):
            self.refuse("dtypes", f"no dtype is called {name!r}", fix=nearest(name, (OWN, *DTYPES)))
        return name

    def profile(self, value: object) -> str:
        if value == "":
            return ""
        name = self.beside(self.text(value, "profiles", '"eager"'))
        self.checked(lambda: load_profile(name), "profiles")
        return name

    def load(self, table: object) -> tuple[tuple[str, Any], ...]:
        self.keys(table, "load", LOAD)
        found: list[tuple[str, Any]] = []
        for key, value in cast("dict[str, Any]", table).items():
            wanted = LOAD[key]
            if not isinstance(value, (int, float) if wanted is float else wanted) or (
                isinstance(value, bool) and wanted is not bool
            ):
                self.refuse(
                    f"load.{key}",
                    "the value has the wrong type",
                    expected=wanted.__name__,
                    found=repr(value)[:80],
                )
            found.append((key, value))
        return tuple(found)

    # -- devices

    def checked(self, load: Any, place: str) -> Any:
        """What `load` gives; its error says the place in this file too."""
        try:
            return load()
        except GpuirError as error:
            error.where = ": ".join(filter(None, (f"{self.where}:{place}", error.where)))
            raise

    def targets(self, values: Sequence[object]) -> Iterator[str]:
        """`all` is every target there is, `a30:*` every slice that MIG makes of one."""
        for value in values:
            name = self.text(value, "targets", '"a100"')
            if name == "all":
                yield from (x for x in target_names() if x not in values)
            elif name.endswith(":*"):
                whole = self.beside(name.removesuffix(":*"))
                target = self.checked(lambda whole=whole: load_target(whole), "targets")
                mig = self.checked(lambda target=target: mig_of(target), "targets")
                for profile in mig.profiles:
                    part = f"{whole}:{profile.name}"
                    self.checked(lambda part=part: load_target(part), "targets")
                    yield part
            else:
                name = self.beside(name)
                self.checked(lambda name=name: load_target(name), "targets")
                yield name

    def hardware(self, table: object) -> Hardware:
        self.keys(table, "hardware", ("base", "set"))
        given = cast("dict[str, Any]", table)
        base = tuple(
            self.beside(self.text(x, "hardware.base", '"a100"'))
            for x in self.axis(given, "base", required=True, place="hardware")
        )
        if not given.get("set"):
            self.refuse(
                "hardware.set",
                "the table changes no numbers",
                expected="paths of numbers of a target, for example sms = [80, 108, 132]",
                fix='use targets = ["a100"] for unchanged GPUs',
            )
        numbers = {
            path: tuple(self.numbers({path: value}, path, "hardware.set"))
            for path, value in _flat(given["set"], "")
        }
        for name in base:
            self.checked(lambda name=name: load_target(name), "hardware.base")
            for path, values in numbers.items():
                for n in values:
                    self.checked(
                        lambda name=name, path=path, n=n: load_target(name, {path: n}),
                        f"hardware.set.{path}",
                    )
        return Hardware(base, tuple(numbers.items()))

    # -- plans

    def plans(self, tables: object) -> Iterator[RankPlan]:
        for i, table in enumerate(
            cast("list[Any]", tables) if isinstance(tables, list) else [tables]
        ):
            place = f"plans[{i}]"
            self.keys(table, place, ("cluster", *DEGREES))
            table = cast("dict[str, Any]", table)
            axes = {key: self.axis(table, key, [1], place=place) for key in DEGREES if key in table}
            for key, values in axes.items():
                for n in values:
                    if not isinstance(n, int) or isinstance(n, bool) or n < (key != "zero"):
                        self.refuse(f"{place}.{key}", "this must be at least 1", found=repr(n)[:80])
            for name in self.axis(table, "cluster", required=True, place=place):
                cluster = self.beside(self.text(name, f"{place}.cluster", '"dgx-h100"'))
                self.checked(lambda cluster=cluster: load_cluster(cluster), f"{place}.cluster")
                for degrees in product(*axes.values()):
                    yield RankPlan(cluster, Parallel(**dict(zip(axes, degrees, strict=True))))


def _flat(table: object, prefix: str) -> Iterator[tuple[str, Any]]:
    """`dram.bytes_per_s = [...]` without quotes is a table in a table."""
    if not isinstance(table, dict):
        return
    for key, value in cast("dict[str, Any]", table).items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and not {"from", "to", "count"} & value.keys():
            yield from _flat(cast("dict[str, Any]", value), f"{path}.")
        else:
            yield path, value
