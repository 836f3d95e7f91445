"""A node's GPUs as they are to be divided, for the tools that do it: the file of NVIDIA's
mig-parted, and commands of nvidia-smi.

What mig-parted reads: NVIDIA/mig-parted, `api/spec/v1/spec.go`. What a profile's name may be:
NVIDIA/go-nvlib, `pkg/nvlib/device/mig_profile.go`. Commands: NVIDIA Multi-Instance GPU User Guide,
getting started, and `nvidia-smi mig -h`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from gpuir.backends.mig import Divided, counted
from gpuir.backends.terminal import printable
from gpuir.ir.errors import UsageError
from gpuir.targets.mig import InstanceProfile

VERSION = "v1"  # of mig-parted's file
RESET_BY_MIG = ("sm_80",)  # architectures whose GPUs a change of the mode resets: A100, A30


def _yaml() -> Any:
    """PyYAML; UsageError where it is not installed."""
    try:
        return import_module("yaml")
    except ImportError as error:
        raise UsageError(
            "mig-parted's file needs PyYAML", found=str(error), fix="pip install 'gpuir[mig]'"
        ) from error


def mig_parted(configs: Mapping[str, Sequence[Divided]], notes: Sequence[str] = ()) -> str:
    """mig-parted's file: under each name the GPUs of a node, equal ones as one entry. It has no
    places: the tool tries orders of instances until all are there."""
    tree = {
        "version": VERSION,
        "mig-configs": {name: _entries(some) for name, some in configs.items()},
    }
    text = _yaml().safe_dump(tree, sort_keys=False, default_flow_style=None, width=1000)
    return "".join(f"# {printable(note)}\n" for note in notes) + text


def config_name(profiles: Sequence[InstanceProfile]) -> str:
    """`3g.20gb-2x1g.5gb.me`: a configuration's name that may stand in a label of Kubernetes."""
    return "-".join(
        counted([p for p in profiles if p == kind]).replace("+", ".").replace("gb-me", "gb.no-me")
        for kind in dict.fromkeys(profiles)
    )


def _entries(gpus: Sequence[Divided]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, bool, tuple[tuple[str, int], ...]], list[int | None]] = {}
    for x in gpus:
        key = (x.target.name, x.layout is not None, tuple(_counts(x).items()))
        groups.setdefault(key, []).append(x.gpu)
    return [
        {
            "devices": "all" if None in numbers else sorted(n for n in numbers if n is not None),
            "mig-enabled": enabled,
            "mig-devices": dict(counts),
        }
        for (_, enabled, counts), numbers in groups.items()
    ]


def _counts(x: Divided) -> dict[str, int]:
    """How many compute instances of each name, those of large instances first."""
    pairs = zip(x.layout or (), x.names(), strict=True)
    largest = sorted(pairs, key=lambda pair: (-pair[0].profile.compute_slices, pair[1]))
    return dict(Counter(name for _, names in largest for name in names))


def nvidia_smi(gpus: Sequence[Divided]) -> str:
    """A shell script that divides the GPUs, each instance at its place. Every GPU has a number."""
    lines = [
        "#!/bin/sh",
        "# Divides GPUs with MIG. First end all work on them: this removes their instances.",
        "# Needs root. GPU numbers are those of `nvidia-smi -L`.",
        "set -e",
    ]
    for x in gpus:
        lines += ["", *(_divide(x) if x.layout is not None else _undivide(x))]
    return "\n".join([*lines, ""])


def _divide(x: Divided) -> list[str]:
    layout = x.layout or ()
    smi = f"sudo nvidia-smi mig -i {x.gpu}"
    whole = [p for i, p in enumerate(layout) if not x.is_parted(i)]
    resets = x.target.isa in RESET_BY_MIG
    lines = [
        f"# GPU {x.gpu}, {printable(x.target.name)}: {', '.join(map(str, layout))}",
        "# The mode: " + ("resets the GPU." if resets else "no reset is needed."),
        f"sudo nvidia-smi -i {x.gpu} -mig 1",
        *_clear(x),
    ]
    if whole:
        lines.append("# GPU instances as ID:PLACE. -C makes one compute instance that fills each.")
        lines.append(f"{smi} -cgi {','.join(f'{p.profile.id}:{p.start}' for p in whole)} -C")
    for i, names in enumerate(x.names()):
        if x.is_parted(i):
            p = layout[i]
            lines += [
                f"# {p} in parts. The driver prints its number.",
                f"made=$({smi} -cgi {p.profile.id}:{p.start})",
                'echo "$made"',
                r"""gi=$(echo "$made" | sed -n 's/.*GPU instance ID *\([0-9]*\) on GPU.*/\1/p')""",
                f'{smi} -gi "$gi" -cci {",".join(names)}',
            ]
    return [*lines, f"{smi} -lgi"]


def _undivide(x: Divided) -> list[str]:
    head = f"# GPU {x.gpu}, {printable(x.target.name)}: not divided."
    if not x.target.mig_capable:
        return [f"{head} It has no MIG."]
    return [head, *_clear(x), f"sudo nvidia-smi -i {x.gpu} -mig 0"]


def _clear(x: Divided) -> list[str]:
    smi = f"sudo nvidia-smi mig -i {x.gpu}"
    return [
        "# Remove instances. Both commands fail if there are none.",
        f"{smi} -dci || true",
        f"{smi} -dgi || true",
    ]
