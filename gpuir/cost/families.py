"""Which formulas describe which kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from gpuir.cost import (
    attention,
    conv,
    cpu,
    grouped,
    routines,
    rows,
    simt,
    stream,
    tensile,
    tensor,
)
from gpuir.cost.candidates import of_any
from gpuir.cost.family import Family, Places, Terms, among, fastest
from gpuir.cost.nest import Tiles, runs_on_tensor
from gpuir.cost.products import as_product, is_product
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.steps import STREAMS
from gpuir.cost.work import ODD_CHANNELS, Work
from gpuir.ir.errors import TargetError, nearest
from gpuir.ir.types import f32
from gpuir.targets.target import Target

# In the order that they are trained in: where kernels of two families come together in one
# measurement, the later is fitted to it.
FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        stream.FAMILY,
        rows.FAMILY,
        simt.FAMILY,
        tensile.FAMILY,
        tensor.FAMILY,
        attention.FAMILY,
        conv.FAMILY,
        *grouped.FAMILIES.values(),
        routines.FAMILY,
        cpu.FAMILY,
    )
}


def _product_s(
    s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]
) -> Terms:
    """Seconds of a kernel that runs as a product, by the formulas of products."""
    return tensor.seconds(s, *as_product(work, tiles, s.xp), target, p)


def _product_tile(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    places: list[Places] = []
    found: list[Tiles] = []
    for some, tiles in among(work, partial(of_any, target=target)):
        places.append(some)
        found.append(fastest(_product_s, work.take(some), tiles, target, p))
    return Tiles.joined(found).take(np.argsort(np.concatenate(places)))


# Kernels of others that run as products on matrix units: nests, kernels of plug-ins.
PRODUCTS = replace(tensor.FAMILY, tiles=of_any, seconds=_product_s, choose=_product_tile)


def family_of(work: Work, target: Target) -> Family:
    """The family that a kernel belongs to on a target."""
    if target.is_cpu:
        return cpu.FAMILY
    match work.kernel:
        case "k.experts":
            return grouped.family_of(work)
        case "k.attention":
            return attention.FAMILY
        case "k.gemm" if target.vendor == "AMD" and work.rate_dtype == f32:
            return tensile.FAMILY
        case "k.conv" if ODD_CHANNELS in work.form and target.dram.kind.startswith("HBM"):
            return conv.FAMILY  # cuDNN's choice, on A100 and H100 (KernelBench, level 1: 55 to 80)
        case "k.gemm" | "k.conv" if runs_on_tensor(work, target):
            return tensor.FAMILY
        case "k.conv":
            return conv.FAMILY
        case "k.gemm":
            return simt.FAMILY
        case "k.routine" if work.kind not in STREAMS:
            return routines.FAMILY
        case "k.reduce":
            return rows.FAMILY
        case _ if is_product(work, target):
            return PRODUCTS
        case _:
            return stream.FAMILY


def check_factors(target: Target) -> None:
    """TargetError when a file sets a factor that no family has, or tells how far off a family is
    that there is not: it would say nothing."""
    for path in target.backtest:
        if (group := path.partition(".")[0]) not in FAMILIES:
            raise TargetError(
                f"no family of kernels is called {group!r}",
                where=f"{target.name}:backtest.{path}",
                fix=nearest(group, list(FAMILIES)),
            )
    for path in target.factors:
        group, _, name = path.partition(".")
        known = [f.name for f in FAMILIES[group].factors] if group in FAMILIES else list(FAMILIES)
        wanted = name if group in FAMILIES else group
        if wanted not in known:
            what = "factor" if group in FAMILIES else "family of kernels"
            raise TargetError(
                f"no {what} is called {wanted!r}",
                where=f"{target.name}:factors.{path}",
                fix=nearest(wanted, known),
            )
