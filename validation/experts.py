"""Mixtures of experts of inference servers, timed in CUDA graphs: the aiconfigurator table."""

from __future__ import annotations

import re

import numpy as np

from gpuir.cost import routing
from gpuir.cost.work import Work
from gpuir.fit.columns import Columns, WordColumn
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.ir.types import DType, bf16, f4e2m1, f8e4m3, f16, i4
from gpuir.stacks.serving.engines import implementation
from validation.serving import DEVICES, STACK

# dtype of the experts → what is multiplied, what the weights are stored in
EXPERTS: dict[str, tuple[DType, DType | None]] = {
    "bf16": (bf16, None),
    "fp16": (f16, None),
    "fp8": (f8e4m3, None),
    "fp8_block": (f8e4m3, None),
    "nvfp4": (f4e2m1, None),
    "int4_wo": (bf16, i4),
    "w4a16_mxfp4": (bf16, f4e2m1),
    "w4a8_mxfp4_mxfp8": (f8e4m3, f4e2m1),
}
DISTRIBUTION = re.compile(r"balanced|power_law_(\d(?:\.\d+)?)")
MOST_EXPERTS = 65536.0  # a popularity is drawn for each
BEFORE_BLACKWELL = ("a10", "a30", "a40", "h100", "h200", "l4", "gh200")


def experts(s: Shapes) -> tuple[Work, ...]:
    """A mixture of experts on one rank: tokens sorted by expert, two grouped products with the
    activation between, and sorted back."""
    if s.words["dtype"] not in EXPERTS:
        raise Unmodelled(f"dtype {s.words['dtype']} is none we know of experts")
    dtype, weight = EXPERTS[s.words["dtype"]]
    distribution = DISTRIBUTION.fullmatch(s.words["distribution"])
    if not distribution:
        raise Unmodelled(f"distribution {s.words['distribution']} is none we know of experts")
    if np.any(s["experts"] > MOST_EXPERTS) or np.any(s["experts"] < np.maximum(s["topk"], s["ep"])):
        raise Unmodelled("numbers of experts that we do not believe")
    skew = float(distribution[1] or 0)
    whole = s.words["strays"] == "all"
    return (
        routing.mixture(
            s["tokens"],
            s["hidden"],
            s["inter"],
            s["topk"],
            s["experts"] // (s["ep"] if whole else 1),
            dtype,
            weight=weight,
            gated=s.words["gated"] == "yes",
            shards=s["tp"],
            ranks=1 if whole else s["ep"],
            skew=skew,
            scales="block" if s.words["dtype"] == "fp8_block" else "",
            library=s.words["stack"],
            strays=s.words["strays"] == "rest",
            again=True,
        ),
    )


def _stacks(columns: Columns) -> Columns:
    """Which implementation ran, whether its experts are gated, and what it did with the rows of
    other ranks' experts.

    As far as the rows tell, SGLang up to 0.5.10 computed them too: as one more expert's ("rest"),
    or, with Marlin's kernels in 0.5.9 and on Blackwell, among its own experts ("all").

    Nothing should be fitted to vLLM 0.14's fp8, which takes twice what 0.24's does on L40S."""
    source, version = columns.words("kernel_source"), columns.words("version")
    gated = source.mapped(lambda name: "no" if "nongated" in name else "yes")
    stack = source.mapped(implementation)
    systems = columns.words("system")
    before = systems.where(*(n for n in systems.names if n.startswith(BEFORE_BLACKWELL)))
    sglang = columns.words("framework").where("sglang")
    older, old = version.where("0.5.9"), version.where("0.5.10")
    rest = sglang & (older | old) & before
    whole = sglang & stack.where("marlin") & (older | (old & ~before))
    strays = WordColumn(
        np.where(whole, 2, np.where(rest, 1, 0)).astype(np.int64), ("", "rest", "all")
    )
    slow = columns.words("framework").where("vllm") & version.where("0.14.0")
    slow &= columns.words("dtype").where("fp8")
    cells = {"gated": gated, "stack": stack, "strays": strays, "rough": WordColumn.yes_or_no(slow)}
    return columns.with_cells(cells)


READERS = (
    Reader(
        name="experts",
        key=(
            *("system", "dtype", "distribution", "tokens", "hidden", "inter", "topk", "experts"),
            *("tp", "ep"),
        ),
        words=("dtype", "distribution", "gated", "stack", "strays", "rough"),
        shape=("tokens", "hidden", "inter", "topk", "experts", "tp", "ep"),
        works=experts,
        op=lambda _: "moe",
        dtype=lambda words: words["dtype"],
        beside=(*STACK, "distribution"),
        device="system",
        devices=DEVICES,
        prepare=_stacks,
    ),
)
