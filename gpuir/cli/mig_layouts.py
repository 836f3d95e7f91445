"""`gpuir mig layouts`: what a GPU can be divided into, or where given instances go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuir.backends.table import FORMATS
from gpuir.cli import options
from gpuir.cli.output import emit, layout, show
from gpuir.cli.request import ask, option, request

if TYPE_CHECKING:
    from gpuir.backends.mig import Divided
    from gpuir.targets.mig import Geometry, InstanceProfile, Mig
    from gpuir.targets.target import Target

OF_ONE_LAYOUT = ("svg", "nvidia-smi")
OF_A_NODE = ("mig-parted", "nvidia-smi")
MOST = 64  # instances that are named: more than any GPU has
ITEM = re.compile(r"(?:(\d{1,3})x)?([^/\s]+)((?:/\d+c)*)")


@dataclass(frozen=True)
class Layouts:
    gpu: str = ask(click.argument("gpu"))
    everything: bool = option("Also those with room for more.", "--all")
    profiles: str | None = option("These alone, variants too: 3g.20gb,1g.5gb,1g.5gb+me.")
    place: str | None = option("One layout: 3g.20gb+2g.10gb+2x1g.5gb. In parts: 3g.20gb/1c/2c.")
    devices: str | None = option(
        "The GPUs' numbers on the node, for mig-parted and nvidia-smi: 0,1.  [all; 0]"
    )
    format: str = ask(options.formats(("svg", *OF_A_NODE)))
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)


@request(Layouts)
def command(asked: Layouts) -> None:
    """List what GPU can be divided into by MIG, or show where given instances go on it.

    \b
    gpuir mig layouts a30                                 each set of instances it is full with
    gpuir mig layouts a100 --profiles 3g.20gb,1g.5gb      of these profiles alone
    gpuir mig layouts a100 --place 3g.20gb+2g.10gb        where they go, with a picture
    gpuir mig layouts a100 --place 3g.20gb+2g.10gb --format nvidia-smi   the commands that do it
    gpuir mig layouts a30 --format mig-parted             every geometry, for NVIDIA's mig-parted
    """
    import gpuir
    from gpuir.ir.errors import UsageError
    from gpuir.targets.mig import geometries, mig_of

    target = gpuir.load_target(asked.gpu)
    mig = mig_of(target)
    if asked.devices is not None and asked.format not in OF_A_NODE:
        raise UsageError(
            "--devices has no effect on this format",
            fix=f"remove it, or use --format {' or '.join(OF_A_NODE)}",
        )
    if asked.place is not None:
        if asked.everything or asked.profiles:
            raise UsageError(
                "--place shows one layout, so --all and --profiles have no effect",
                fix="remove --all and --profiles",
            )
        _show_one(target, mig, asked.place, asked)
        return
    if asked.format in OF_ONE_LAYOUT:
        raise UsageError(
            f"the format {asked.format!r} shows one layout",
            fix=f"give the layout: gpuir mig layouts {asked.gpu} --place {mig.profiles[0].name}",
        )
    kinds = _kinds(target, mig, asked.profiles)
    found = geometries(mig, kinds, packed=not asked.everything)
    if asked.format == "mig-parted":
        emit(_parted(target, found, asked), asked.output)
        return
    from gpuir.backends.mig import geometries_report

    show(
        geometries_report(target, mig, found, kinds, packed=not asked.everything),
        asked.format,
        asked.width,
        asked.output,
    )


def _kinds(target: Target, mig: Mig, text: str | None) -> list[InstanceProfile]:
    """The profiles that are named, or all without a variant."""
    if text is None:
        return [p for p in mig.profiles if not p.variant]
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(mig.find(name, f"{target.name}:{name}") for name in names))


def _parted(target: Target, found: Sequence[Geometry], asked: Layouts) -> str:
    """Every geometry, on each of `--devices`."""
    from gpuir.backends.mig import Divided
    from gpuir.backends.mig_parted import config_name, mig_parted

    devices = _devices(asked.devices, [None])
    return mig_parted(
        {config_name(g.profiles): [Divided(target, g.layout, n) for n in devices] for g in found}
    )


def _show_one(target: Target, mig: Mig, place: str, asked: Layouts) -> None:
    from gpuir.backends.mig import layout_report, part_labels, svg

    divided = _placed(target, mig, place)
    if asked.format in FORMATS:
        width = layout(asked.width, asked.output).width
        show(
            layout_report(mig, divided, _geometry(mig, divided), width),
            asked.format,
            asked.width,
            asked.output,
        )
    elif asked.format == "svg":
        title = f"{target.title or target.name}: {place}"
        emit(svg(mig, divided.layout or (), part_labels(divided), title), asked.output)
    else:
        emit(_commands(divided, asked), asked.output)


def _commands(divided: Divided, asked: Layouts) -> str:
    """The layout on each of `--devices`, for the tool that divides them."""
    from dataclasses import replace

    from gpuir.backends.mig_parted import config_name, mig_parted, nvidia_smi

    if asked.format == "nvidia-smi":
        numbers = _devices(asked.devices, [0])
        return nvidia_smi([replace(divided, gpu=n) for n in numbers])
    numbers = _devices(asked.devices, [None])
    name = config_name([x.profile for x in divided.layout or ()])
    return mig_parted({name: [replace(divided, gpu=n) for n in numbers]})


def _devices(text: str | None, default: Sequence[int | None]) -> list[int | None]:
    from gpuir.ir.errors import UsageError

    if text is None:
        return list(default)
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"\d{1,3}", name) for name in names):
        raise UsageError(
            "--devices must be a list of numbers", expected="like 0,1", found=options.shorter(text)
        )
    return list(dict.fromkeys(map(int, names)))


def _placed(target: Target, mig: Mig, text: str) -> Divided:
    """Where the instances of `--place` go; those of one profile in parts take the first places."""
    from gpuir.backends.mig import Divided
    from gpuir.targets.mig import place

    named = list(_items(target, mig, text))
    found = place(mig, [profile.name for profile, _ in named], target.name)
    waiting: dict[str, list[tuple[int, ...]]] = {}
    for profile, parts in named:
        waiting.setdefault(profile.name, []).append(parts)
    return Divided(target, found, parts=tuple(waiting[x.profile.name].pop(0) for x in found))


def _items(target: Target, mig: Mig, text: str) -> list[tuple[InstanceProfile, tuple[int, ...]]]:
    """`3g.20gb/1c/2c+2x1g.5gb`: the profile of each instance, and the slices of its compute
    instances where it has several."""
    from gpuir.ir.errors import TargetError, UsageError

    named: list[tuple[InstanceProfile, tuple[int, ...]]] = []
    for item in re.split(r"\s*\+\s*(?=\d|mig\b)", text):
        found = ITEM.fullmatch(item.strip())
        if found is None:
            raise UsageError(
                "--place must be a list of instances",
                expected="for example 3g.20gb+2x1g.5gb, or 3g.20gb/1c/2c",
                found=options.shorter(text),
            )
        profile = mig.find(found[2], f"{target.name}:{found[2]}")
        parts = tuple(int(part[:-1]) for part in found[3].split("/")[1:])
        if 0 in parts or sum(parts) > profile.compute_slices:
            raise TargetError(
                f"the compute instances do not fit into {profile.name}",
                where=f"{target.name}:{item.strip()}",
                expected=f"at least 1c each, and {profile.compute_slices}c together",
                found=f"{sum(parts)}c",
                fix="use smaller compute instances, or fewer",
            )
        count = int(found[1] or 1)
        if not 0 < count <= MOST - len(named):
            raise UsageError(
                "no GPU can have so many instances",
                where=f"--place {item.strip()}",
                found=str(count),
            )
        named += [(profile, parts)] * count
    return named


def _geometry(mig: Mig, divided: Divided) -> Geometry:
    """A layout as a geometry, with how many layouts have the same instances."""
    from collections import Counter

    from gpuir.targets.mig import Geometry, geometries

    held = Counter(x.profile for x in divided.layout or ())
    same = next(g for g in geometries(mig, list(held), packed=False) if Counter(g.profiles) == held)
    return Geometry(same.profiles, divided.layout or (), same.layouts)
