"""A parallel plan: its record, as a JSON object, and what all configurations of it share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast, get_args

from gpuir.backends.plans.cuts import CUT_KINDS, Cuts
from gpuir.backends.structured import json_text, plain
from gpuir.ir.errors import UsageError, nearest
from gpuir.simulate.parallel import ContextExchange, Parallel, PipelineSchedule

SCHEMA = "gpuir.plan/1"
AXES = ("tp", "cp", "ep", "dp", "pp")  # neighbours differ in the first


@dataclass(frozen=True)
class TrainingPlan:
    """How a training step is spread over ranks. `batch` is how many sequences all ranks take in one
    step; `model` and `cluster` say of what and on what, in words. `cuts` are the modules that ranks
    of `tp` share, and how, where that is known; with `recompute` the backward pass computes each
    block again. UsageError where the batch does not divide among
    ranks and microbatches."""

    parallel: Parallel
    batch: int
    model: str = ""
    cluster: str = ""
    cuts: Cuts = ()
    recompute: bool = False

    def __post_init__(self) -> None:
        p = self.parallel
        parts = p.dp * p.ep * p.microbatches
        if self.batch < 1 or self.batch % parts:
            down, up = self.batch // parts * parts, -(-self.batch // parts) * parts
            raise UsageError(
                "the batch cannot be split evenly over ranks and microbatches",
                expected=f"a multiple of {parts}: {p.dp} x {p.ep} ranks (dp, ep), "
                f"{p.microbatches} microbatches",
                found=str(self.batch),
                fix=" or ".join(str(n) for n in dict.fromkeys((down, up)) if n > 0) or str(parts),
            )

    @property
    def microbatch(self) -> int:
        """Sequences of one microbatch on one rank."""
        p = self.parallel
        return self.batch // (p.dp * p.ep * p.microbatches)

    @property
    def title(self) -> str:
        named = " on ".join(x for x in (self.model, self.cluster) if x) or "a plan"
        count = f"{self.parallel.ranks} rank{'s' if self.parallel.ranks > 1 else ''}"
        degrees = f"{self.parallel}{', blocks computed again' * self.recompute}"
        return f"{' '.join(named.split())}: {count}, {degrees}; {self.batch} sequences a step"


# ---- JSON ----------------------------------------------------------------------------------------


def plan_json(plan: TrainingPlan) -> str:
    """The plan as a JSON object of schema `gpuir.plan/1`."""
    parts = {"ranks": plan.parallel.ranks, "order": AXES, **plain(plan), "cuts": dict(plan.cuts)}
    return json_text(SCHEMA, **parts)


def read_plan(text: str, where: str = "<text>") -> TrainingPlan:
    """The plan that `plan_json` wrote, or somebody by hand: `schema`, `batch` and `parallel` are
    needed, degrees that are left out are 1. UsageError for what is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("not a JSON file", where=where, found=str(error)) from error
    schema = cast(dict[str, Any], found).get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise UsageError("not a plan", where=where, expected=SCHEMA, found=repr(schema))
    given = cast(dict[str, Any], found)
    _check_keys(given, ("schema", "ranks", "order", *(f.name for f in fields(TrainingPlan))), where)
    degrees = given.get("parallel")
    if not isinstance(degrees, dict):
        raise UsageError("no degrees", where=where, expected='"parallel": {"dp": 8, ...}')
    parallel = _degrees(cast(dict[str, Any], degrees), where)
    if (order := given.get("order", [*AXES])) != [*AXES]:
        raise UsageError(
            "the order of ranks differs", where=where, expected=", ".join(AXES), found=repr(order)
        )
    if given.get("ranks", parallel.ranks) != parallel.ranks:
        raise UsageError(
            "the product of the degrees is not the number of ranks",
            where=where,
            expected=f"{parallel.ranks}: {parallel}",
            found=str(given["ranks"]),
        )
    names = {name: given.get(name, "") for name in ("model", "cluster")}
    for name, value in names.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} must be text", where=where, found=repr(value))
    batch = _whole(given.get("batch"), "batch", 1, where)
    cuts = _cuts(given.get("cuts", {}), where)
    recompute = given.get("recompute", False)
    if not isinstance(recompute, bool):
        raise UsageError("recompute must be true or false", where=where, found=repr(recompute))
    return TrainingPlan(parallel, batch, **names, cuts=cuts, recompute=recompute)


def _cuts(given: object, where: str) -> Cuts:
    if not isinstance(given, dict):
        raise UsageError(
            "the cuts must be an object with modules as keys",
            where=where,
            expected='{"fc": "column", ...}',
        )
    found = cast(dict[str, Any], given)
    for module, kind in found.items():
        if kind not in CUT_KINDS:
            raise UsageError(
                f"the cut of {module!r} is unknown",
                where=where,
                expected=", ".join(CUT_KINDS),
                found=repr(kind),
            )
    return tuple(found.items())


def _degrees(given: dict[str, Any], where: str) -> Parallel:
    _check_keys(given, [f.name for f in fields(Parallel)], where)
    values = dict(given)
    for name in (*AXES, "microbatches", "chunks", "zero"):
        if name in values:
            _whole(values[name], name, 0 if name == "zero" else 1, where)
    if values.get("zero", 0) > 3:
        raise UsageError("the stage of ZeRO is unknown", where=where, expected="0 to 3")
    for name in ("sequence", "overlap"):
        if not isinstance(values.get(name, False), bool):
            raise UsageError(f"{name} must be true or false", where=where)
    schedules = get_args(PipelineSchedule)
    if (schedule := values.get("schedule", "1f1b")) not in schedules:
        raise UsageError(
            "the schedule is unknown",
            where=where,
            expected=", ".join(schedules),
            found=repr(schedule),
        )
    exchanges = get_args(ContextExchange)
    if (exchange := values.get("exchange", "")) not in exchanges:
        named = ", ".join(x for x in exchanges if x)
        raise UsageError(
            "the exchange is unknown", where=where, expected=named, found=repr(exchange)
        )
    return Parallel(**values)


def _check_keys(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(
                "a plan has no field of this name",
                where=where,
                found=name,
                fix=nearest(name, names),
            )


def _whole(value: object, name: str, least: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name} is not a valid number",
            where=where,
            expected=f"a whole number, at least {least}",
            found=repr(value),
        )
    return value
