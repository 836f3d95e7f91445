"""Targets given more of something: of SMs, clocks, memories, power."""

from __future__ import annotations

from hypothesis import strategies as st

from gpuir.targets.load import load_target
from gpuir.targets.target import Target

# What a kernel may have more of. SMs and clocks come with the rates that hang on them, as those of
# `a100+sms=160` do; shared memory of an SM with that of a block.
RESOURCES = (
    *("sms", "clock_hz", "sm.registers", "sm.smem_bytes", "sm.threads", "sm.blocks"),
    *("l2.bytes", "l2.bytes_per_s", "dram.bytes_per_s", "tdp_w", "sm.l1_bytes"),
)
MORE = st.dictionaries(
    st.sampled_from(RESOURCES), st.sampled_from([1.01, 1.2, 1.5, 2.0, 4.0]), min_size=1, max_size=3
)


def given_more(target: Target, changes: dict[str, float]) -> Target:
    """The target with some resources multiplied by factors of at least 1."""
    chosen: dict[str, float] = {}
    for path, by in changes.items():
        value = target
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None:  # no limit of power is stated, or no L1
            chosen[path] = round(value * by) if isinstance(value, int) else value * by
    if "sm.smem_bytes" in chosen:
        chosen["sm.smem_bytes_per_block"] = chosen["sm.smem_bytes"]
        if target.sm.l1_holds_smem:
            chosen["sm.l1_bytes"] = max(chosen["sm.smem_bytes"], chosen.get("sm.l1_bytes", 0))
            chosen["sm.l1_bytes"] = max(chosen["sm.l1_bytes"], target.sm.l1_bytes)
    return load_target(target.name, chosen)
