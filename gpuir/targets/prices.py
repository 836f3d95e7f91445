"""What an hour of a GPU costs: dated list prices, each with the vendor's page that it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, cast

from gpuir.ir.errors import TargetError
from gpuir.targets.load import load_target, target_names
from gpuir.targets.spec import read_spec, refuse, spec_folder
from gpuir.targets.target import Target

HIGHEST = 1000.0  # US dollars an hour of one GPU: beyond lies a slip of the point
_FIELDS: dict[str, type] = {"vendor": str, "what": str, "date": date, "page": str}


@dataclass(frozen=True)
class Price:
    """US dollars for an hour of one GPU, as `vendor` listed it on a day on its `page`."""

    usd_per_hour: float
    vendor: str = "your own"
    what: str = ""
    date: str = ""
    page: str = ""

    def __str__(self) -> str:
        return ", ".join(x for x in (self.vendor, self.date) if x)


def price_of(target: Target, own: Mapping[str, Price] | None = None) -> Price | None:
    """The price of a target: one's own, by the target's name, else the lowest listed for it or the
    shipped target that it is a variant of. None where no list has it. A MIG slice without a price
    of its own has its share of its GPU's."""
    known = {**list_prices(), **(own or {})}
    if target.name in known or target.slice is None:
        return known.get(target.name) or known.get(target.device)
    whole = known.get(target.slice.gpu) or known.get(target.device)
    if whole is None:
        return None
    share = target.slice.share
    what = f"{share:.3g} of {whole.what or 'the GPU'}"
    return replace(whole, usd_per_hour=whole.usd_per_hour * share, what=what)


def own_price(name: str, usd_per_hour: float) -> tuple[str, Price]:
    """A price of the user's own under the name that the target has; TargetError for a wrong one."""
    where = f"--price {name}={usd_per_hour:g}"
    try:
        target = load_target(name)
    except TargetError as error:
        error.where = error.where or where
        raise
    _check_amount(usd_per_hour, where, "", "")
    return target.name, Price(usd_per_hour)


@cache
def list_prices() -> Mapping[str, Price]:
    """The lowest list price of each shipped GPU that has one, by the GPU's name."""
    return read_prices(spec_folder() / "prices.toml")


def read_prices(path: Path) -> Mapping[str, Price]:
    """The lowest price of each GPU in a file of lists; TargetError at the first thing wrong."""
    where = str(path)
    raw = read_spec(path)
    if wrong := [name for name in raw if name != "list"]:
        refuse(f"no such field: {wrong[0]}", where, wrong[0], fix="write [[list]]")
    found: dict[str, Price] = {}
    for i, prices in enumerate(cast(list[dict[str, Any]], raw.get("list", []))):
        for name, price in _prices(prices, f"list {i + 1}", where).items():
            if name not in found or price.usd_per_hour < found[name].usd_per_hour:
                found[name] = price
    return found


def _prices(raw: dict[str, Any], path: str, where: str) -> dict[str, Price]:
    """The prices of one list."""
    for name in raw:
        if name not in (*_FIELDS, "usd_per_hour"):
            refuse(
                f"{path} has no field {name}",
                where,
                name,
                fix=f"the fields are {', '.join(_FIELDS)} and the table usd_per_hour",
            )
    for name, kind in _FIELDS.items():
        if not isinstance(raw.get(name), kind) or not raw[name]:
            words = {date: "a day, like 2026-09-20"}.get(kind, "text")
            refuse(f"{path}: {name} is missing", where, name, expected=words, fix=f"add {name}")
    if not raw["page"].startswith("https://"):
        refuse(
            f"{path}: the source of a price must be a page of the vendor",
            where,
            "page",
            found=raw["page"],
            fix="write https://...",
        )
    found: dict[str, Price] = {}
    for name, amount in cast(dict[str, Any], raw.get("usd_per_hour") or {}).items():
        if name not in target_names():
            refuse(f"{path}: no target is called {name}", where, name, fix="`gpuir targets`")
        _check_amount(amount, where, name, f"{name}: ")
        found[name] = Price(
            float(amount), raw["vendor"], raw["what"], raw["date"].isoformat(), raw["page"]
        )
    return found


def _check_amount(amount: Any, where: str, path: str, named: str) -> None:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount <= HIGHEST:
        refuse(
            f"{named}the price of an hour is not valid",
            where,
            path,
            expected=f"US dollars, above 0, at most {HIGHEST:g}",
            found=str(amount),
            fix="write the price of one GPU, not of a machine or a month",
        )
