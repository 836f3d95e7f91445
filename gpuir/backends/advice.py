"""Advice: what to change, and what each change comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from gpuir.backends.analysis import fits_text
from gpuir.backends.structured import record
from gpuir.plan.advise import LEAST_GAIN, Advice, Money, Trial
from gpuir.plan.changes import ModelChange, Setup
from gpuir.report.answer import Answer
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from gpuir.report.units import percent, quantity, rate, usd

# What a user writes to make one setup of another, in the words of whoever asked for advice.
Flags = Callable[[Setup, Setup], Sequence[str]]


def advice_report(r: Advice, flags: Flags) -> Report:
    """JSON is described in docs/guide/advise.md; programs have a row for each change tried."""
    return Report(
        "gpuir.advice/1",
        lambda: _parts(r, flags),
        lambda: _fields(r, flags),
    )


def _parts(r: Advice, flags: Flags) -> Iterator[Part]:
    """What helps, the most first, then several at once, then other GPUs, then what was in vain."""
    now = r.before
    yield Heading(f"{now.model} on {now.device.title or now.target} ({now.target})")
    yield Notes(list(_now(r)))
    if r.advice:
        named = _named(r)
        yield _table(r, named)
        yield Notes(list(_how(r, named, flags)), max(len(name) for name, _ in named) + 2)
    yield Notes(list(_others(r)))


def _now(r: Advice) -> Iterator[tuple[str, str]]:
    now = r.before
    yield "now", f"{_run(now)}, profile {now.profile}"
    others = [x.before for x in (*r.advice, *r.together, *r.rest) if x.before is not now]
    if others:
        took = f"by gpuir's derivatives, {_run(others[0])}"
        yield "backward", f"{took}: what saves is of that where it needs them"
    if now.fits is False:
        yield "fits", f"{fits_text(now.memory)}; `gpuir largest` finds the largest that does"


def _named(r: Advice) -> list[tuple[str, Trial]]:
    """What is advised by its number, and what is tried together by theirs: `1 + 2`."""
    both = (*r.advice, *r.together)
    each = dict.fromkeys(id(change) for x in both for change in x.changes)
    numbers = {change: str(i) for i, change in enumerate(each, 1)}
    return [(" + ".join(numbers[id(change)] for change in x.changes), x) for x in both]


def _table(r: Advice, named: Sequence[tuple[str, Trial]]) -> Table:
    def after(title: str, unit: str, of: str, drop: int = 0) -> Column:
        return Column(title, unit, value=lambda x: attrgetter(of)(x[1].after), drop=drop)

    unfit = "; does not fit yet"
    return Table(
        [x for x in named if x[1].after is not None],
        (
            Column("", "", value=lambda x: x[0]),
            Column("saves", "%", value=lambda x: x[1].gain),
            after("a run", "s", "latency_s"),
            after("items/s" if r.before.items > 1 else "runs/s", "1/s", "items_per_s"),
            after("memory", "bytes", "reserved_bytes", 1),
            Column("sure", value=lambda x: "yes" if x[1].is_certain else "no"),
            Column("change", value=lambda x: _what(x[1]) + unfit * (x[1].after.fits is False)),
        ),
    )


def _what(x: Trial) -> str:
    return " + ".join(change.what for change in x.changes)


def _how(r: Advice, named: Sequence[tuple[str, Trial]], flags: Flags) -> Iterator[tuple[str, str]]:
    """The options that make each change, and once what it costs."""
    said: list[ModelChange] = []
    for name, x in named:
        yield name, " ".join(flags(r.setup, x.setup))
        if x.changes[-1] not in said:
            said.append(x.changes[-1])
            yield "", x.changes[-1].costs


def _others(r: Advice) -> Iterator[tuple[str, str]]:
    if r.advice:
        yield "sure", "larger than the prediction's error, in what differs between both runs"
    else:
        yield "change", f"nothing found that gains {percent(LEAST_GAIN)}"
    if r.faster:
        yield "faster", _gpu(r, r.faster)
    if r.cheaper:
        yield "cheaper", _gpu(r, r.cheaper)
    for why, texts in _in_vain(r).items():
        yield why, "; ".join(texts)


def _run(run: Answer) -> str:
    """`3.70 ms a run, 2,159 items/s`."""
    text = f"{quantity(run.latency_s, 's', 4)} a run"
    if run.items > 1:
        text += f" of {run.items:,}: {rate(run.items_per_s)} items/s"
    return text


def _gpu(r: Advice, x: Trial) -> str:
    """`l4, 2.1 times as fast: 1.8 ms a run; $0.20 per million at ..., instead of ...`."""
    assert x.after is not None, "it was chosen for its run"
    speed = f"{x.speedup:.3g} times as fast"
    if abs(x.gain) < 0.01:
        speed = "as fast"
    elif x.speedup < 1:
        speed = f"{1 / x.speedup:.3g} times as long"
    text = f"{x.after.target}, {speed}: {_run(x.after)}"
    if money := x.money(r.prices):
        before, after = money
        text += f"; {_paid(after)}, instead of {_paid(before)}"
    else:
        text += "; no list prices of one kind for both GPUs"
    return text


def _paid(money: Money) -> str:
    """`$0.238 per million at $0.799 an hour (Modal serverless, 2026-05-07)`."""
    price = money.price
    return (
        f"{usd(money.usd_per_million)} per million at {usd(price.usd_per_hour)} an hour ({price})"
    )


def _in_vain(r: Advice) -> dict[str, list[str]]:
    """What was tried and is not advised, by the reason; not what something advised does as well."""
    found: dict[str, list[str]] = {}
    used = {change.what for x in r.together for change in x.changes}
    for x in r.rest:
        what = x.changes[0].what
        if x.after is None:
            found.setdefault("failed", []).append(f"{what} ({x.refusal})")
        elif not x.fits:
            found.setdefault("no room", []).append(f"{what} (it does not fit the memory)")
        elif x.gain < LEAST_GAIN and what not in used and x.changes[0].kind != "batch":
            change = "saves" if x.gain >= 0 else "costs"
            found.setdefault("in vain", []).append(f"{what} ({change} {percent(abs(x.gain))})")
    return found


# ---------------------------------------------------------------------------- for programs


def _columns(r: Advice, flags: Flags) -> tuple[Column, ...]:
    def money(field: str, i: int, of: str) -> Column:
        return Column(field=field, value=lambda x: (m := x.money(r.prices)) and getattr(m[i], of))

    return (
        Column(field="change", value=_what),
        *fields("gain refusal"),
        Column(field="changes", value=lambda x: [record(c, "kind what costs") for c in x.changes]),
        Column(field="options", value=lambda x: list(flags(r.setup, x.setup))),
        Column(field="beyond_error", value=lambda x: x.is_certain),
        Column(field="before_s", value=lambda x: x.before.latency_s),
        Column(field="after", value=lambda x: x.after and _run_record(x.after)),
        money("usd_per_million", 1, "usd_per_million"),
        money("before_usd_per_million", 0, "usd_per_million"),
        money("price", 1, "price"),
        money("before_price", 0, "price"),
    )


def _fields(r: Advice, flags: Flags) -> dict[str, Any]:
    """The trials by the list that they are in."""
    head = {"model": r.before.model, "target": r.before.target, "profile": r.before.profile}
    columns = _columns(r, flags)

    def table(name: str, trials: Sequence[Trial]) -> Table:
        return Table(trials, columns, {**head, "list": name})

    def one(name: str, trial: Trial | None) -> Table:
        made = table(name, [trial] if trial else [])
        return replace(made, nested=lambda: next(iter(made.records()), None))

    return {
        **head,
        "setup": r.setup,
        "before": _run_record(r.before),
        "advice": table("advice", r.advice),
        "together": table("together", r.together),
        "faster": one("faster", r.faster),
        "cheaper": one("cheaper", r.cheaper),
        "rest": table("rest", r.rest),
    }


def _run_record(run: Answer) -> dict[str, Any]:
    return record(
        run,
        "latency_s items items_per_s",
        interval_s=run.interval,
        host_bound=run.timeline.is_host_bound,
        **record(run, "peak_bytes reserved_bytes fits"),
    )
