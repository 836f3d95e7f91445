"""Which GPUs have at least every rate of another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuir.targets.load import load_target, target_names
from gpuir.targets.order import is_at_least, pairs, rates


def test_pairs_are_found_in_the_specs():
    gpus = [t for t in map(load_target, target_names()) if not t.is_cpu]
    found = {(more.name, less.name) for more, less in pairs(gpus)}
    assert ("h200-sxm-141gb", "h100-sxm-80gb") in found
    assert ("a100-sxm-80gb", "a100-sxm-40gb") in found
    assert ("a100-sxm-40gb", "a100-sxm-80gb") not in found  # its memory is slower
    assert ("rtx5090", "rtx4090") not in found  # another architecture, and a slower clock
    assert len(found) > 30


def test_capacity_links_and_launches_are_no_rates():
    assert not {"dram.bytes", "launch_s", "base_clock_hz"} & set(rates(load_target("a100")))
    assert not [path for path in rates(load_target("h100")) if path.startswith(("link", "pcie"))]
    assert {"dram.bytes_per_s", "l2.bytes", "sms", "tdp_w"} <= set(rates(load_target("a100")))


@pytest.mark.parametrize("path", ["sms", "l2.bytes", "dram.bytes_per_s", "tdp_w", "clock_hz"])
def test_more_of_one_thing_is_more(path: str):
    one = load_target("h100-sxm")
    more = load_target("h100-sxm", {path: 1.25 * rates(one)[path]})
    assert is_at_least(more, one) and not is_at_least(one, more)


def test_a_board_that_states_no_power_has_enough():
    one = load_target("h100-sxm")
    assert is_at_least(replace(one, tdp_w=None), one)
    assert not is_at_least(one, replace(one, tdp_w=None))


def test_an_sm_of_another_make_is_another_architecture():
    one = load_target("h100-sxm")
    assert not is_at_least(replace(one, sm=replace(one.sm, fp32_lanes=256)), one)
