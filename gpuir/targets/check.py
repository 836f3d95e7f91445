"""Peaks and bandwidths recomputed from clocks and widths: which listed numbers are doubtful."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from gpuir.targets.target import Target

Status = Literal["ok", "explained", "doubtful"]
TOLERANCE = 0.03

# Bits that a pin moves in one cycle of the memory clock as drivers report it. The 61 shipped specs
# that list bus and clock agree with it within 3 %, but for the B200.
_TRANSFERS = {"HBM": 2, "GDDR5": 4, "GDDR6": 8, "GDDR6X": 16, "GDDR7": 16}


class CheckRow(NamedTuple):
    """A listed number beside its recomputation; `diff` is recomputed / listed - 1."""

    field: str
    listed: float
    recomputed: float
    diff: float
    status: Status
    formula: str
    explanation: str


def check_target(target: Target) -> list[CheckRow]:
    """Every number of a target that follows from others, recomputed.

    Within 3 % it is `ok`; beyond, `explained` when the spec file says why under `[discrepancies]`,
    else `doubtful`: a slip in one of the numbers of the formula, or a peak quoted at another clock.
    What the spec file says does not excuse a number set by the user.
    """
    rows: list[CheckRow] = []
    for field, listed, recomputed, formula in _recomputed(target):
        diff = recomputed / listed - 1
        by_user = target.source(field).startswith("set by the user")
        why = "" if by_user else target.discrepancies.get(field, "")
        status: Status = "ok" if abs(diff) <= TOLERANCE else "explained" if why else "doubtful"
        said = {"formula": formula, "explanation": why if status == "explained" else ""}
        rows.append(CheckRow(field, listed, recomputed, diff, status, **said))
    return rows


def _recomputed(target: Target) -> Iterator[tuple[str, float, float, str]]:
    sm, vector, tensor = target.sm, target.flops_per_s.vector, target.flops_per_s.tensor
    yield (
        "flops_per_s.vector.f32",
        vector["f32"],
        target.sms * sm.fp32_lanes * sm.flops_per_lane_clock * target.clock_hz,
        "sms x sm.fp32_lanes x sm.flops_per_lane_clock x clock_hz",
    )
    if "f16" in tensor and sm.tensor_flops_per_clock is not None:
        yield (
            "flops_per_s.tensor.f16",
            tensor["f16"],
            target.sms * sm.tensor_flops_per_clock * target.clock_hz,
            "sms x sm.tensor_flops_per_clock x clock_hz",
        )
    f16_acc = target.flops_per_s.tensor_f16_acc
    for dtype, share in (("tf32", 0.5), ("f8e4m3", 2), ("i8", 2)):
        # GeForce sums in f32 at half the rate of sums in f16, but integers at the full one.
        table = "tensor_f16_acc" if dtype == "i8" and "f16" in f16_acc else "tensor"
        f16 = (f16_acc if table == "tensor_f16_acc" else tensor).get("f16")
        # On a CPU each dtype has a library of its own, and its rate is measured.
        if f16 is not None and dtype in tensor and not target.is_cpu:
            formula = f"{share} x flops_per_s.{table}.f16"
            yield f"flops_per_s.tensor.{dtype}", tensor[dtype], share * f16, formula
    yield from _bandwidth(target)


def _bandwidth(target: Target) -> Iterator[tuple[str, float, float, str]]:
    dram = target.dram
    if dram.bus_bits is None:
        return
    if dram.pin_bits_per_s is not None:
        yield (
            "dram.bytes_per_s",
            dram.bytes_per_s,
            dram.bus_bits / 8 * dram.pin_bits_per_s,
            "dram.bus_bits / 8 x dram.pin_bits_per_s",
        )
    transfers = _TRANSFERS.get("HBM" if dram.kind.startswith("HBM") else dram.kind)
    if dram.clock_hz is not None and transfers is not None:
        yield (
            "dram.bytes_per_s",
            dram.bytes_per_s,
            dram.bus_bits / 8 * transfers * dram.clock_hz,
            f"dram.bus_bits / 8 x {transfers} x dram.clock_hz",
        )
