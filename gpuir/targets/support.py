"""What a software stack runs at all: on which devices, in which dtypes, which operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from gpuir.files import read_toml
from gpuir.ir.errors import GpuirError, ModelError, TargetError, UsageError, nearest
from gpuir.ir.graph import Graph, Loc
from gpuir.targets.profile import Profile, profile_of
from gpuir.targets.spec import spec_files
from gpuir.targets.target import Target

STANDARD = ("", "ai.onnx.ml", "com.microsoft")  # domains of the files; others bring their own
SHOWN = 3  # nodes that an error names

Takes = tuple[frozenset[str] | None, ...]  # dtypes of each input; None where any will do


@dataclass(frozen=True)
class Operators:
    """The operators of ONNX that a stack has kernels for: `rows` gives by name from which version
    on which dtypes are taken. An operator without a row is taken unless they are all `listed`;
    those `written_out` become primitives. A node without a kernel runs `elsewhere`, or nowhere.
    """

    name: str
    title: str
    listed: bool
    elsewhere: str
    rows: Mapping[str, tuple[tuple[int, Takes], ...]]
    written_out: frozenset[str] = frozenset()

    def takes(self, origin: str) -> bool:
        """Whether there is a kernel for `MatMulInteger@10 u8 i8`."""
        head, *dtypes = origin.split()
        name, _, version = head.rpartition("@")
        domain = name.rpartition("::")[0]
        if domain not in STANDARD or name in self.written_out:
            return True
        rows = self.rows.get(name) or self.rows.get(f"{domain}::*")
        if rows is None:
            return not self.listed
        known = [takes for since, takes in rows if since <= int(version)]
        if not known:
            return False
        return all(
            wanted is None or dtype in wanted or dtype == "-"
            for wanted, dtype in zip(known[-1], dtypes, strict=False)
        )


@cache
def load_operators(name: str) -> Operators:
    """The operators of `specs/operators/NAME.toml`; TargetError where there is no such file."""
    files = spec_files("operators")
    if name not in files:
        raise TargetError(f"no list of operators is called {name!r}", fix=nearest(name, files))
    raw: Any = read_toml(files[name], "the list of operators", TargetError, "")
    rows: dict[str, list[tuple[int, Takes]]] = {}
    for dtypes, names in cast("dict[str, str]", raw["dtypes"]).items():
        takes = tuple(
            None if one.strip() == "any" else frozenset(one.split()) for one in dtypes.split(",")
        )
        for entry in names.split():
            op, _, since = entry.partition("@")
            rows.setdefault(op, []).append((int(since or 1), takes))
    return Operators(
        **{name: raw[name] for name in ("name", "title", "listed", "elsewhere")},
        rows={op: tuple(sorted(found, key=lambda x: x[0])) for op, found in rows.items()},
        written_out=frozenset(raw.get("written_out", "").split()),
    )


def without_kernel(g: Graph, profile: Profile) -> dict[Loc, str]:
    """The model nodes that the stack has no kernel for, and what they are."""
    if not profile.operators or not g.origins:
        return {}
    operators = load_operators(profile.operators)
    missing = {o for o in dict.fromkeys(o for _, o in g.origins) if not operators.takes(o)}
    return {loc: origin for loc, origin in g.origins if origin in missing} if missing else {}


def described(origin: str) -> str:
    """`MatMulInteger@10 u8 i8 u8 i8` → `MatMulInteger of u8 and i8`."""
    head, *dtypes = origin.split()
    known = [d for d in dict.fromkeys(dtypes) if d != "-"]
    return head.rpartition("@")[0] + (f" of {' and '.join(known)}" if known else "")


def refusal(g: Graph, target: Target) -> GpuirError | None:
    """Why the stack of a graph does not run it on a device; None where it does."""
    profile = profile_of(g)
    return device_refused(profile, dtypes_of(g), target) or nodes_refused(g, profile)


def device_refused(profile: Profile, dtypes: Collection[str], target: Target) -> GpuirError | None:
    """Why a stack does not run values of these dtypes on a device; None where it does."""
    return _of_device(profile, target) or _of_dtypes(dtypes, profile, target)


def runs_on(profile: Profile, target: Target) -> bool:
    """Whether a stack runs anything on a device."""
    return _of_device(profile, target) is None


def reason(error: GpuirError) -> str:
    """A refusal in one line."""
    return f"{error.what}: it needs {error.expected}" if error.expected else error.what


def check(g: Graph, target: Target) -> None:
    """Raises what `refusal` finds."""
    if (error := refusal(g, target)) is not None:
        raise error


def emulated(g: Graph, target: Target) -> tuple[str, ...]:
    """What is said of dtypes that a stack computes in another one on this device."""
    profile = profile_of(g)
    used = dtypes_of(g)
    return tuple(
        f"{dtype}: {target.isa} has no units for this type, so {profile.title} computes it in f32"
        for dtype, least in map(str.split, profile.emulated)
        if dtype in used and _is_below(target, least)
    )


def title_on(profile: Profile, vendor: str) -> str:
    """What a stack is on a vendor's devices; where it is not made for them, what of it would run
    there, and that the numbers are another's."""
    if not vendor or not profile.vendors or vendor in profile.vendors:
        return profile.title
    there = profile.titles.get(vendor)
    known = f"{' and '.join(profile.vendors)} devices" if there is None else profile.title
    return f"{there or profile.title}; the numbers are those of {known}"


def elsewhere(g: Graph, target: Target) -> tuple[str, ...]:
    """What is said of a stack on a device that it is not made for."""
    vendors = profile_of(g).vendors if g.profile else ()
    if not vendors or target.vendor in vendors:
        return ()
    return (
        f"the profile {g.profile} is for {', '.join(vendors)}; it is used unchanged for this "
        f"{'CPU' if target.is_cpu else 'GPU'}",
    )


def _of_device(profile: Profile, target: Target) -> GpuirError | None:
    least = {maker: isa for maker, _, isa in (need.partition(" ") for need in profile.needs)}
    if not least:
        return None
    if target.vendor in least and not _is_below(target, least[target.vendor]):
        return None
    wants = [f"{vendor} {isa}+".removesuffix(" +") for vendor, isa in least.items()]
    return UsageError(
        f"{profile.title} does not run on this GPU",
        where=target.name,
        expected=" or ".join(wants),
        found=f"{target.vendor} {target.isa}",
        fix="use another --profile: `gpuir profiles` lists them, and the GPUs on which each runs",
    )


def _of_dtypes(used: Collection[str], profile: Profile, target: Target) -> GpuirError | None:
    for dtype, least in map(str.split, profile.dtypes):
        if dtype in used and _is_below(target, least):
            half = "use f16 instead (--dtype f16, or --pipeline 'convert{dtype=f16}')"
            codes = "use 8-bit integers instead (--int8 for --fp8), or a model without this type"
            return UsageError(
                f"{profile.title} does not run {dtype} on this GPU",
                where=target.name,
                expected=f"{least} or newer",
                found=target.isa,
                fix=f"{codes if dtype.startswith('f8') else half}, or another --profile",
            )
    return None


def nodes_refused(g: Graph, profile: Profile) -> GpuirError | None:
    """Why a stack does not take the operators of a graph, whatever the device."""
    if not profile.operators or load_operators(profile.operators).elsewhere:
        return None
    missing = without_kernel(g, profile)
    if not missing:
        return None
    kinds = ", ".join(dict.fromkeys(map(described, missing.values())))
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return ModelError(
        f"{profile.title} does not support {kinds}",
        where=", ".join([*missing][:SHOWN]) + more,
        expected=f"operators that {load_operators(profile.operators).title} supports",
        fix="use --profile ort, which runs such nodes on the CPU, or export the model without them",
    )


def dtypes_of(g: Graph) -> set[str]:
    """The names of the dtypes of its values."""
    return {v.type.dtype.name for v in _values(g)}


def _values(g: Graph) -> Iterable[Any]:
    yield from (*g.inputs, *g.params)
    for node in g.walk():
        yield from node.results


def _is_below(target: Target, least: str) -> bool:
    """Whether the device is older than an architecture of the same maker."""
    family, _, number = least.partition("_")
    own, _, has = target.isa.partition("_")
    return bool(number) and own == family and has.isdecimal() and int(has) < int(number)
