"""Advice for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuir.backends.structured import json_text, record
from gpuir.backends.sweep import usd
from gpuir.backends.terminal import Layout, Page, fits_text
from gpuir.plan.advise import LEAST_GAIN, Advice, Money, Trial
from gpuir.plan.changes import Change, Setup
from gpuir.plan.outcome import Outcome
from gpuir.report.units import percent, quantity, rate

SCHEMA = "gpuir.advice/1"

# What a user writes to make one setup of another, in the words of whoever asked for advice.
Flags = Callable[[Setup, Setup], Sequence[str]]


def advice_text(r: Advice, layout: Layout, flags: Flags) -> str:
    """What helps, the most first, then several at once, then other GPUs, then what was in vain."""
    page = Page(layout.width, layout.color)
    now = r.before
    title = now.target.title or now.target.name
    page.heading(f"{now.graph.name} on {title} ({now.target.name})")
    page.line()
    page.wrapped("now", f"{_run(now)}, profile {now.timeline.profile.name}")
    others = [x.before for x in (*r.advice, *r.together, *r.rest) if x.before is not now]
    if others:
        took = (
            f"by gpuir's derivatives, {_run(others[0])}: what saves is of that where it needs them"
        )
        page.wrapped("backward", took)
    if now.memory.fits is False:
        page.wrapped(
            "fits", f"{fits_text(now.memory)}; `gpuir largest` finds the largest that does"
        )
    page.line()
    if r.advice:
        _table(r, page)
        page.line()
        shown: list[Change] = []
        for name, x in _named(r):
            page.wrapped(name, " ".join(flags(r.setup, x.setup)), _margin(r))
            if x.changes[-1] not in shown:
                shown.append(x.changes[-1])
                page.wrapped("", x.changes[-1].costs, _margin(r))
        page.line()
        sure = "larger than the prediction's error, in what differs between both runs"
        page.wrapped("sure", sure)
    else:
        page.line(f"nothing found that gains {percent(LEAST_GAIN)}")
    if r.faster:
        page.wrapped("faster", _gpu(r, r.faster))
    if r.cheaper:
        page.wrapped("cheaper", _gpu(r, r.cheaper))
    for why, texts in _in_vain(r).items():
        page.wrapped(why, "; ".join(texts))
    return page.text()


def _named(r: Advice) -> list[tuple[str, Trial]]:
    """What is advised by its number, and what is tried together by theirs: `1 + 2`."""
    both = (*r.advice, *r.together)
    each = dict.fromkeys(id(change) for x in both for change in x.changes)
    numbers = {change: str(i) for i, change in enumerate(each, 1)}
    return [(" + ".join(numbers[id(change)] for change in x.changes), x) for x in both]


def _margin(r: Advice) -> int:
    return max(len(name) for name, _ in _named(r)) + 2


def _table(r: Advice, page: Page) -> None:
    per = "items" if r.before.items > 1 else "runs"
    columns = [("", False), ("saves", True), ("a run", True), (f"{per}/s", True)]
    columns += [("memory", True), ("sure", False), ("change", False)]
    rows = [
        [
            name,
            percent(x.gain),
            quantity(x.after.latency_s, "s"),
            rate(x.after.items_per_s),
            quantity(x.after.memory.reserved_bytes, "bytes"),
            "yes" if x.is_certain else "no",
            " + ".join(change.what for change in x.changes)
            + ("; does not fit yet" if x.after.memory.fits is False else ""),
        ]
        for name, x in _named(r)
        if x.after is not None
    ]
    page.table(columns, rows, drop=("memory",))


def _run(run: Outcome) -> str:
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
    text = f"{x.after.target.name}, {speed}: {_run(x.after)}"
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


def advice_json(r: Advice, flags: Flags) -> str:
    """`{"schema": "gpuir.advice/1", ...}`, as docs/guide/advise.md describes it."""
    return json_text(
        SCHEMA,
        model=r.before.graph.name,
        target=r.before.target.name,
        profile=r.before.timeline.profile.name,
        setup=r.setup,
        before=_run_record(r.before),
        advice=[_record(r, x, flags) for x in r.advice],
        together=[_record(r, x, flags) for x in r.together],
        faster=r.faster and _record(r, r.faster, flags),
        cheaper=r.cheaper and _record(r, r.cheaper, flags),
        rest=[_record(r, x, flags) for x in r.rest],
    )


def _record(r: Advice, x: Trial, flags: Flags) -> dict[str, Any]:
    money = x.money(r.prices)
    return record(
        x,
        "gain refusal",
        changes=[record(c, "kind what costs") for c in x.changes],
        options=flags(r.setup, x.setup),
        beyond_error=x.is_certain,
        before_s=x.before.latency_s,
        after=x.after and _run_record(x.after),
        usd_per_million=money and money[1].usd_per_million,
        before_usd_per_million=money and money[0].usd_per_million,
        price=money and money[1].price,
        before_price=money and money[0].price,
    )


def _run_record(run: Outcome) -> dict[str, Any]:
    return record(
        run,
        "latency_s items items_per_s",
        interval_s=run.interval,
        host_bound=run.timeline.is_host_bound,
        **record(run.memory, "peak_bytes reserved_bytes fits"),
    )
