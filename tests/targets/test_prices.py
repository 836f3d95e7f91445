"""Prices: dated, sourced, of GPUs that there are."""

from __future__ import annotations

from datetime import date

import pytest

from gpuir.ir.errors import TargetError
from gpuir.targets.load import load_target, target_names
from gpuir.targets.prices import (
    KINDS,
    list_prices,
    own_price,
    price_of,
    prices_alike,
    prices_together,
    read_prices,
)

GOOD = """
[[list]]
vendor = "A"
kind = "on demand"
what = "on demand"
date = 2026-01-02
page = "https://a.example/prices"
[list.usd_per_hour]
l4 = 0.8
t4 = 0.5
[[list]]
vendor = "B"
kind = "on demand"
what = "on demand"
date = 2026-01-03
page = "https://b.example/prices"
[list.usd_per_hour]
l4 = 0.7
[[list]]
vendor = "C"
kind = "marketplace"
what = "starting prices"
date = 2026-01-03
page = "https://c.example/prices"
[list.usd_per_hour]
l4 = 0.1
a10 = 0.2
"""


def test_every_list_price_has_a_vendor_a_day_and_a_page():
    prices = list_prices()
    assert len(prices) >= 20
    for name, price in ((name, price) for name, each in prices.items() for price in each):
        assert name in target_names() and price.kind in KINDS
        assert price.vendor and price.what and price.page.startswith("https://")
        assert date(2024, 1, 1) <= date.fromisoformat(price.date) <= date(2030, 1, 1)
        assert 0 < price.usd_per_hour < 20


def test_the_lowest_of_several_lists_of_one_kind_counts(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(GOOD)
    prices = read_prices(file)
    assert [x.usd_per_hour for x in prices["l4"]] == [0.7, 0.1]
    assert [str(x) for x in prices["l4"]] == [
        "B on demand, 2026-01-03",
        "C marketplace, 2026-01-03",
    ]
    assert [x.vendor for x in prices["t4"]] == ["A"]


@pytest.fixture
def listed(tmp_path, monkeypatch):
    file = tmp_path / "prices.toml"
    file.write_text(GOOD)
    monkeypatch.setattr("gpuir.targets.prices.list_prices", lambda: read_prices(file))
    return {name: load_target(name) for name in ("l4", "t4", "a10", "mi100")}


def test_prices_of_one_kind_alone_are_compared(listed):
    def vendors(a: str, b: str, own=None) -> tuple[str, ...] | None:
        found = prices_alike(listed[a], listed[b], own)
        return found and tuple(x.vendor for x in found)

    assert vendors("l4", "t4") == ("B", "A")  # both on demand
    assert vendors("l4", "a10") == ("C", "C")  # both of a marketplace
    assert vendors("t4", "a10") is None  # on demand and a marketplace
    assert vendors("t4", "a10", dict([own_price("a10", 3.0)])) == ("A", "your own")
    assert vendors("t4", "mi100") is None


def test_many_targets_have_prices_of_the_kind_that_most_have(listed):
    def vendors(*names: str) -> list[str | None]:
        return [x and x.vendor for x in prices_together([listed[name] for name in names])]

    assert vendors("l4", "t4", "a10", "mi100") == ["B", "A", "C", None]
    assert vendors("l4", "a10") == ["C", "C"]


def test_a_price_of_ones_own_counts_before_any_list_and_for_one_target_alone():
    own = dict([own_price("a100", 9.0)])
    assert price_of(load_target("a100"), own).usd_per_hour == 9.0
    assert price_of(load_target("a100-sxm-80gb"), own).vendor != "your own"
    changed = load_target("t4+sms=20")
    assert price_of(changed) == list_prices()["t4"][0]
    assert price_of(changed, dict([own_price("t4+sms=20", 0.1)])).usd_per_hour == 0.1
    assert price_of(load_target("mi100")) is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("l4 = 0.8", "l4 = -1", "the price of an hour is not valid"),
        ("l4 = 0.8", 'l4 = "0.8"', "the price of an hour is not valid"),
        ("l4 = 0.8", "l5 = 0.8", "no target is called l5"),
        ("date = 2026-01-02", 'date = "2026"', "date is missing"),
        ('kind = "on demand"', 'kind = "cheap"', "no such kind of price: cheap"),
        ("https://a.example/prices", "a salesman", "the source of a price must be a page of the"),
        ('vendor = "A"', "", "vendor is missing"),
        ('vendor = "A"', 'vendr = "A"', "no field vendr"),
        ("[[list]]", "[[lists]]\n[[list]]", "no such field: lists"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, old, new, says):
    file = tmp_path / "prices.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(TargetError) as error:
        read_prices(file)
    assert says in str(error.value) and str(file) in str(error.value)


def test_a_wrong_price_of_ones_own_is_refused():
    with pytest.raises(TargetError, match="the price of an hour is not valid"):
        own_price("a100", 0.0)
    with pytest.raises(TargetError, match="no target is called"):
        own_price("a1000000", 1.0)
