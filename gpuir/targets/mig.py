"""MIG: the profiles that divide a GPU, a slice of one as a target, and which slices go together.

A GPU instance owns SMs, and memory slices with their controllers and banks of the L2; it lies on
contiguous places of the GPU. A compute instance (`1c.3g.20gb`) is a part of the SMs of a GPU
instance, whose memory and L2 it shares. NVIDIA Multi-Instance GPU User Guide, concepts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from gpuir.ir.errors import TargetError, nearest
from gpuir.targets.spec import Raw, leaves, number_text, paths_to_text, read_spec, spec_files
from gpuir.targets.target import Target

WHOLE = "mig"  # `a100:mig`: MIG is on, and one instance has all there is
_PART = re.compile(r"(\d+)c\.(.+)")


@dataclass(frozen=True)
class InstanceProfile:
    """A kind of GPU instance, `3g.20gb`, as the driver lists it: `id` is its number there, `bytes`
    what it leaves to use, `most` how many of this kind alone a GPU holds. An instance begins at one
    of `starts` and takes `size` places of the GPU's grid.
    """

    name: str
    id: int
    compute_slices: int
    memory_slices: int
    sms: int
    bytes: int
    most: int
    copy_engines: int
    decoders: int
    encoders: int
    jpeg: int
    ofa: int
    starts: tuple[int, ...]
    size: int
    driver: str = ""

    @property
    def variant(self) -> str:
        """What follows the size: `+me` (media engines), `+gfx`, `-me`, or nothing."""
        return self.name[len(self.plain) :]

    @property
    def plain(self) -> str:
        """The name of the profile with the same SMs and memory and no variant."""
        return re.split(r"(?<=gb)[+-]", self.name)[0]

    @property
    def has_all_media(self) -> bool:
        """Whether it has engines of which a GPU has one set alone."""
        return self.variant in ("+me", "+me.all")


class InstancePlacement(NamedTuple):
    """An instance on a GPU: its profile, and the place where it begins."""

    profile: InstanceProfile
    start: int

    @property
    def end(self) -> int:
        return self.start + self.profile.size

    def __str__(self) -> str:
        return f"{self.profile.name}@{self.start}"


Layout = tuple[InstancePlacement, ...]  # by their starts


@dataclass(frozen=True)
class Mig:
    """How GPUs of one kind divide: their profiles, and the places there are."""

    gpus: tuple[str, ...]
    compute_slices: int
    memory_slices: int
    grid: int
    profiles: tuple[InstanceProfile, ...]
    sources: tuple[tuple[str, str], ...]

    @cached_property
    def by_name(self) -> dict[str, InstanceProfile]:
        return {p.name: p for p in self.profiles}

    @property
    def whole(self) -> InstanceProfile:
        """The profile of one instance that has all there is."""
        return next(p for p in self.profiles if p.size == self.grid and not p.variant)

    def source(self, field: str, profile: str) -> str:
        """Where a number of a profile comes from."""
        known = dict(self.sources)
        for key, text in known.items():
            what, _, names = key.partition(" of ")
            if what == field and profile in names.split(", "):
                return text
        return known["profiles"]

    def find(self, name: str, where: str) -> InstanceProfile:
        """The profile of a name; TargetError with the nearest."""
        if name == WHOLE:
            return self.whole
        if name not in self.by_name:
            gpu, _, _ = where.partition(":")
            raise TargetError(
                f"{gpu} has no MIG profile {name}",
                where=where,
                expected=", ".join(self.by_name),
                fix=nearest(name, self.by_name),
            )
        return self.by_name[name]


# ---- files --------------------------------------------------------------------------------------


@cache
def mig_specs() -> dict[str, Mig]:
    """How each shipped GPU divides that does, by the GPU's name."""
    found: dict[str, Mig] = {}
    for path in spec_files("mig").values():
        mig = _read(path)
        found |= dict.fromkeys(mig.gpus, mig)
    return found


def _read(path: Path) -> Mig:
    raw = read_spec(path)
    profiles = cast(list[dict[str, Any]], raw["profiles"])
    return Mig(
        gpus=tuple(raw["gpus"]),
        compute_slices=raw["compute_slices"],
        memory_slices=raw["memory_slices"],
        grid=raw["grid"],
        profiles=tuple(replace(InstanceProfile(**p), starts=tuple(p["starts"])) for p in profiles),
        sources=tuple(raw["sources"].items()),
    )


def mig_of(target: Target) -> Mig:
    """How a GPU divides; TargetError for one that does not, or of which that is not known."""
    found = mig_specs().get(target.device)
    if found is None or target.slice is not None:
        if target.slice is not None:
            what, fix = "is a slice itself", f"give the whole GPU: {target.slice.gpu}"
        elif target.mig_capable:
            what, fix = "has MIG, but gpuir does not know its profiles", "GPUs with known ones: "
        else:
            what, fix = "has no MIG", "GPUs that can: "
        if target.slice is None:
            fix += ", ".join(mig_specs())
        raise TargetError(f"{target.name} {what}", where=target.name, fix=fix)
    return found


# ---- a slice as a target ------------------------------------------------------------------------


def sliced(raw: Raw, target: Target, wanted: str) -> Raw:
    """The tables of a slice's spec file, from those of its GPU: `wanted` is a profile, `mig`, or a
    compute instance of a profile, `1c.3g.20gb`.

    Rates of arithmetic go with the SMs; memory, its bandwidth, the L2 and its bandwidth with the
    memory slices. The board's power is that of all instances together: of a slice it is the whole,
    as if all others were idle; `tdp_w` sets another share.
    """
    where = f"{target.name}:{wanted}"
    mig = mig_of(target)
    part = _PART.fullmatch(wanted)
    profile = mig.find(part[2] if part else wanted, where)
    sms, sms_source = profile.sms, mig.source("sms", profile.name)
    name, compute = profile.name, profile.compute_slices
    if part and int(part[1]) != profile.compute_slices:
        compute = int(part[1])
        if not 0 < compute < profile.compute_slices:
            raise TargetError(
                f"{profile.name} has no compute instance of {compute} slices",
                where=where,
                expected=f"from 1c to {profile.compute_slices}c",
                fix=f"write {target.name}:{profile.compute_slices}c.{profile.name}",
            )
        name = f"{compute}c.{profile.name}"
        one = min((p for p in mig.profiles), key=lambda p: (p.compute_slices, p.memory_slices))
        sms = min(sms, compute * one.sms)
        sms_source = f"assumed: {compute} times the SMs of {one.name}; {sms_source}"
    arithmetic = sms / target.sms
    memory = profile.memory_slices / mig.memory_slices
    flat = dict(leaves(raw))
    sources = paths_to_text(raw, "sources", str(raw["name"]))
    gone = [p for p in flat if p.startswith(("link.", "local.")) or p in ("aliases", "notes")]
    for path in gone:
        del flat[path]

    listed = f", profile {profile.name}"

    def put(path: str, value: float, source: str) -> None:
        flat[path] = value
        sources[path] = source

    def share(path: str, by: float, of: str) -> None:
        if path in flat:
            value = flat[path] * by
            text = f"{target.source(path)}; {of} of the GPU's {number_text(flat[path])}"
            put(path, round(value) if isinstance(flat[path], int) else value, text)

    for path in [p for p in flat if p.startswith("flops_per_s.")]:
        share(path, arithmetic, f"{sms}/{target.sms}, as of its SMs,")
    for path in ("dram.bytes_per_s", "dram.bus_bits", "l2.bytes", "l2.bytes_per_s"):
        slices = f"{profile.memory_slices}/{mig.memory_slices}"
        share(path, memory, f"{slices}, as of its memory slices,")
    put("sms", sms, sms_source + listed)
    put("dram.bytes", profile.bytes, mig.source("bytes", profile.name) + listed)
    if "tdp_w" in flat:
        put(
            "tdp_w",
            flat["tdp_w"],
            "assumed: the other instances are idle, so this instance can use "
            "all the power of the board, and clocks go as high as that "
            f"allows; {target.source('tdp_w')}",
        )
    engines = {"copy_engines": profile.copy_engines, "decoders": profile.decoders}
    for field, value in {
        "gpu": target.name,
        "profile": profile.name,
        "compute_slices": compute,
        "memory_slices": profile.memory_slices,
        **engines,
        "share": max(
            compute / mig.compute_slices, memory if compute == profile.compute_slices else 0
        ),
    }.items():
        flat[f"slice.{field}"] = value
    sources["slice"] = mig.source("engines", profile.name) + listed
    flat["name"] = f"{target.name}:{name}"
    flat["title"] = f"{target.title or target.name}, MIG {name}"
    flat["base"] = target.device
    flat["mig_capable"] = False
    kept = {p: s for p, s in sources.items() if not p.startswith(("link", "local"))}
    return {**nested(flat), "sources": kept, "discrepancies": raw.get("discrepancies", {})}


def nested(flat: dict[str, Any]) -> Raw:
    """`{"l2.bytes": 1}` → `{"l2": {"bytes": 1}}`."""
    result: Raw = {}
    for path, value in flat.items():
        *tables, name = path.split(".")
        inner = result
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[name] = value
    return result


# ---- layouts ------------------------------------------------------------------------------------


def layouts(mig: Mig, profiles: Sequence[InstanceProfile] | None = None) -> Iterator[Layout]:
    """Every set of instances that lie on a GPU together, none included; `profiles` are those that
    may be in it, else all without a variant."""
    kinds = [p for p in mig.profiles if not p.variant] if profiles is None else list(profiles)
    yield from _after(kinds, mig, 0, ())


def _after(kinds: Sequence[InstanceProfile], mig: Mig, at: int, before: Layout) -> Iterator[Layout]:
    yield before
    for start in range(at, mig.grid):
        for profile in kinds:
            if start in profile.starts and _joins(mig, before, profile):
                placed = InstancePlacement(profile, start)
                yield from _after(kinds, mig, placed.end, (*before, placed))


def _joins(mig: Mig, before: Layout, profile: InstanceProfile) -> bool:
    """Whether a GPU has compute slices and engines left for one more."""
    slices = sum(x.profile.compute_slices for x in before) + profile.compute_slices
    media = sum(x.profile.has_all_media for x in before) + profile.has_all_media
    same = sum(x.profile == profile for x in before) + 1
    return slices <= mig.compute_slices and media <= 1 and same <= profile.most


def is_packed(mig: Mig, layout: Layout, profiles: Sequence[InstanceProfile] | None = None) -> bool:
    """Whether no further instance fits beside those of a layout."""
    kinds = [p for p in mig.profiles if not p.variant] if profiles is None else profiles
    taken = {place for x in layout for place in range(x.start, x.end)}
    return not any(
        _joins(mig, layout, p) and not taken & {*range(start, start + p.size)}
        for p in kinds
        for start in p.starts
    )


class Geometry(NamedTuple):
    """Instances that a GPU holds at once, largest first: the first layout that has them, and how
    many layouts do."""

    profiles: tuple[InstanceProfile, ...]
    layout: Layout
    layouts: int

    def __str__(self) -> str:
        return "+".join(p.name for p in self.profiles)

    @property
    def sms(self) -> int:
        return sum(p.sms for p in self.profiles)

    @property
    def memory_slices(self) -> int:
        return sum(p.memory_slices for p in self.profiles)

    @property
    def compute_slices(self) -> int:
        return sum(p.compute_slices for p in self.profiles)


def geometries(
    mig: Mig, profiles: Sequence[InstanceProfile] | None = None, *, packed: bool = True
) -> tuple[Geometry, ...]:
    """What a GPU can be divided into: each multiset of instances with a layout, fewest first;
    `packed` leaves out those beside which a further instance fits in every layout."""
    found: dict[tuple[InstanceProfile, ...], list[Layout]] = {}
    for layout in layouts(mig, profiles):
        if layout and (not packed or is_packed(mig, layout, profiles)):
            kinds = tuple(sorted((x.profile for x in layout), key=_large_first))
            found.setdefault(kinds, []).append(layout)
    made = [Geometry(kinds, some[0], len(some)) for kinds, some in found.items()]
    return tuple(sorted(made, key=lambda g: (len(g.profiles), *map(_large_first, g.profiles))))


def _large_first(p: InstanceProfile) -> tuple[int, int, str]:
    return -p.compute_slices, -p.memory_slices, p.name


def place(mig: Mig, names: Sequence[str], gpu: str) -> Layout:
    """Where instances of these profiles go; TargetError that names the rule which they break."""
    wanted = [mig.find(name, f"{gpu}:{name}") for name in names]
    where = f"{gpu}: {'+'.join(names)}"
    for profile, count in Counter(wanted).items():
        if count > profile.most:
            raise TargetError(
                f"there are too many instances of {profile.name}",
                where=where,
                expected=f"at most {profile.most} on a GPU",
                found=str(count),
                fix=f"leave {count - profile.most} out",
            )
    media = [p.name for p in wanted if p.has_all_media]
    if len(media) > 1:
        raise TargetError(
            "only one instance of a GPU can have the media engines",
            where=where,
            expected="at most one profile with +me",
            found=", ".join(media),
            fix=f"write {media[1].partition('+')[0]} for all other instances",
        )
    slices = sum(p.compute_slices for p in wanted)
    if slices > mig.compute_slices:
        raise TargetError(
            "the instances have more compute slices than the GPU",
            where=where,
            expected=f"at most {mig.compute_slices}",
            found=" + ".join(str(p.compute_slices) for p in wanted) + f" = {slices}",
            fix="use smaller profiles, or fewer of them",
        )
    found = _placed(sorted(wanted, key=_large_first), frozenset())
    if found is None:
        raise TargetError(
            "two instances cannot share a memory slice",
            where=where,
            expected="each instance at one of the places of its profile, no place twice",
            found="; ".join(
                f"{p.name} takes {p.size} of {mig.grid} places, "
                f"from {' or '.join(map(str, p.starts))}"
                for p in dict.fromkeys(wanted)
            ),
            fix=f"`gpuir mig layouts {gpu}` lists the possible combinations",
        )
    return tuple(sorted(found, key=lambda x: x.start))


def _placed(wanted: Sequence[InstanceProfile], taken: frozenset[int]) -> Layout | None:
    if not wanted:
        return ()
    profile, *rest = wanted
    for start in profile.starts:
        places = {*range(start, start + profile.size)}
        if not places & taken and (after := _placed(rest, taken | places)) is not None:
            return (InstancePlacement(profile, start), *after)
    return None
