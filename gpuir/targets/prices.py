"""What an hour of a GPU costs: dated list prices, each with the vendor's page that it is from.

A price has a kind, by what is sold. Prices of different kinds are not compared: a marketplace's
lowest offer says nothing about what a cloud would charge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, cast

from gpuir.ir.errors import TargetError
from gpuir.targets.load import load_target, target_names
from gpuir.targets.spec import read_spec, refuse, spec_folder
from gpuir.targets.target import Target

OWN = "your own"
# What is sold, the nearest to a machine of one's own first: a machine with its host, by the hour;
# the GPU for the seconds of a function; the lowest offer of many hosts.
KINDS = ("on demand", "serverless", "marketplace")
HIGHEST = 1000.0  # US dollars an hour of one GPU: beyond lies a slip of the point
_FIELDS: dict[str, type] = {"vendor": str, "kind": str, "what": str, "date": date, "page": str}


@dataclass(frozen=True)
class Price:
    """US dollars for an hour of one GPU, as `vendor` listed it on a day on its `page`.

    `kind` is one of KINDS, or empty for a price of the user's own. `what` says which machine it is.
    """

    usd_per_hour: float
    vendor: str = OWN
    kind: str = ""
    what: str = ""
    date: str = ""
    page: str = ""

    def __str__(self) -> str:
        """`RunPod on demand, 2026-11-09`."""
        who = f"{self.vendor} {self.kind}".strip()
        return ", ".join(x for x in (who, self.date) if x)


def prices_of(target: Target, own: Mapping[str, Price] | None = None) -> tuple[Price, ...]:
    """The prices of a target, at most one of each kind, in the order of KINDS.

    The user's own alone where there is one, by the target's name. Else the lowest of each kind that
    a list has, for the target or for the shipped one that it is a variant of. A MIG slice without
    prices of its own has its share of its GPU's.
    """
    known = {**list_prices(), **{name: (price,) for name, price in (own or {}).items()}}
    if target.name in known or target.slice is None:
        return known.get(target.name) or known.get(target.device, ())
    share = target.slice.share
    return tuple(
        replace(
            x, usd_per_hour=x.usd_per_hour * share, what=f"{share:.3g} of {x.what or 'the GPU'}"
        )
        for x in known.get(target.slice.gpu) or known.get(target.device, ())
    )


def price_of(target: Target, own: Mapping[str, Price] | None = None) -> Price | None:
    """The first of `prices_of`: one's own, else on demand if a list has it. None where none has."""
    return next(iter(prices_of(target, own)), None)


def prices_alike(
    a: Target, b: Target, own: Mapping[str, Price] | None = None
) -> tuple[Price, Price] | None:
    """Prices of two targets that can be compared: of the first kind that both have. None where
    they have none. A price of the user's own is compared with the first price of the other."""
    pairs = ((x, y) for x in prices_of(a, own) for y in prices_of(b, own))
    return next(((x, y) for x, y in pairs if x.kind == y.kind or OWN in (x.vendor, y.vendor)), None)


def prices_together(
    targets: Sequence[Target], own: Mapping[str, Price] | None = None
) -> tuple[Price | None, ...]:
    """A price for each target, of the kind that most of them have a price of, where it has one: its
    own or the first of another kind where not."""
    each = [prices_of(target, own) for target in targets]
    count = Counter(price.kind for prices in each for price in prices)
    kind = max(KINDS, key=lambda kind: count[kind])  # the first of equals
    return tuple(
        next((x for x in prices if x.kind == kind), next(iter(prices), None)) for prices in each
    )


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
def list_prices() -> Mapping[str, tuple[Price, ...]]:
    """Of each shipped GPU that has list prices the lowest of each kind, by the GPU's name."""
    return read_prices(spec_folder() / "prices.toml")


def read_prices(path: Path) -> Mapping[str, tuple[Price, ...]]:
    """Of each GPU in a file of lists the lowest price of each kind, in the order of KINDS;
    TargetError at the first thing wrong."""
    where = str(path)
    raw = read_spec(path)
    if wrong := [name for name in raw if name != "list"]:
        refuse(f"no such field: {wrong[0]}", where, wrong[0], fix="write [[list]]")
    found: dict[str, dict[str, Price]] = {}
    for i, prices in enumerate(cast(list[dict[str, Any]], raw.get("list", []))):
        for name, price in _prices(prices, f"list {i + 1}", where).items():
            kinds = found.setdefault(name, {})
            if price.kind not in kinds or price.usd_per_hour < kinds[price.kind].usd_per_hour:
                kinds[price.kind] = price
    return {
        name: tuple(kinds[kind] for kind in KINDS if kind in kinds) for name, kinds in found.items()
    }


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
    if raw["kind"] not in KINDS:
        refuse(
            f"{path}: no such kind of price: {raw['kind']}",
            where,
            "kind",
            expected=", ".join(KINDS),
            fix="say what is sold",
        )
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
            usd_per_hour=float(amount),
            vendor=raw["vendor"],
            kind=raw["kind"],
            what=raw["what"],
            date=raw["date"].isoformat(),
            page=raw["page"],
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
