"""Whole layers of language models against their measurements: vidur's profiles, part by part.

What was measured are vLLM's layers of 2023: queries, keys and values in one product, gate and up in
one, a kernel each for a norm, for the rotation and for the activation. What is predicted is the
layer that transformers builds from the model's config, one rank's share of it, as a software stack
runs it, from the graph on; and beside it the measured kernels themselves, which leaves the errors
of the kernel model alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost.learned import Model
from gpuir.cost.work import Work
from gpuir.fit.batch import alike
from gpuir.fit.columns import Columns, Floats, TableFile
from gpuir.fit.readers import Shapes
from gpuir.fit.score import GroupScores, RowErrors, Score, ScoredRows, kernel_s, row_errors
from gpuir.fit.tables import target_of
from gpuir.targets.target import Target
from validation import profiled
from validation.steps import ATTENTION, Build, Kernel, steps

LAYER = "layer"
LAYERS = 5  # those built
MIDDLE = (2, 3)  # those predicted: what fuses across two layers comes by turns
MEASURED = "measured kernels"
EXTENTS = ("tp", "hidden", "ffn", "q_heads", "kv_heads", "vocab", "gated")
PROFILES = ("compiled", "eager")
# Vidur's names of the parts; no more tokens than a model has room for, nor slower than a minute.
KNOWN = (
    *("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "add"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj"),
)
LEAST, MOST = 1e-3, 6e7
NUMBERLESS = "a number is missing, too small or too large"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}  # as transformers calls them


@dataclass(frozen=True)
class Profiled:
    """A model on a GPU, split over `tp` ranks: seconds of each part of a layer, by tokens. `add` is
    of all residual additions of the layer."""

    file: str
    gpu: str
    model: str
    dtype: str
    target: Target
    extents: Mapping[str, int]
    tokens: Floats
    parts: Mapping[str, Floats]

    @property
    def config(self) -> dict[str, Any]:
        """A rank's share as a config of transformers: heads, feed-forward and vocabulary divided as
        Megatron does (arXiv 1909.08053, section 3). Layers enough for some amid others."""
        e = self.extents
        share = {
            "hidden_size": e["hidden"],
            "head_dim": e["hidden"] // e["q_heads"],
            "intermediate_size": e["ffn"] // e["tp"],
            "num_attention_heads": e["q_heads"] // e["tp"],
            "num_key_value_heads": max(e["kv_heads"] // e["tp"], 1),
            "num_hidden_layers": LAYERS,
            "vocab_size": max(e["vocab"] // e["tp"], 1),
            "dtype": DTYPES[self.dtype],
        }
        if e["gated"]:
            return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **share}
        return {"model_type": "phi", "architectures": ["PhiForCausalLM"], **share}

    def works(self, part: str) -> tuple[Work, ...]:
        """The kernels that were measured of a part."""
        e, size = self.extents, np.ones(len(self.tokens))
        words = {"op": part, "dtype": self.dtype, "gated": str(e["gated"]), "product": "no"}
        extents = {"tokens": self.tokens, **{n: e[n] * size for n in EXTENTS}}
        if product := self._product(part):
            words["product"] = "yes"
            extents |= {"gemm_m": self.tokens, "gemm_n": product[0] * size}
            extents |= {"gemm_k": product[1] * size}
        works = profiled.layers(Shapes(words, extents, self.target))
        return works * 2 if part == "add" and e["gated"] else works

    def _product(self, part: str) -> tuple[float, float] | None:
        """Columns and depth of a part that is a product."""
        e, tp = self.extents, self.extents["tp"]
        head = e["hidden"] // e["q_heads"]
        return {
            "attn_pre_proj": ((e["q_heads"] + 2 * e["kv_heads"]) * head / tp, e["hidden"]),
            "attn_post_proj": (e["hidden"], e["q_heads"] * head / tp),
            "mlp_up_proj": ((1 + e["gated"]) * e["ffn"] / tp, e["hidden"]),
            "mlp_down_proj": (e["hidden"], e["ffn"] / tp),
        }.get(part)


@dataclass(frozen=True)
class Profile:
    """The models of a table, and how many rows are left out and why."""

    file: str
    count: int
    models: tuple[Profiled, ...]
    skipped: Mapping[str, int]


def read(path: str | Path) -> Profile:
    """The models of a table of vidur's."""
    kind = next(k for k in profiled.READERS if k.clock == "profiler")
    columns = TableFile(Path(path)).read(kind.reads)
    skipped = Counter[str]()
    models = tuple(_profiled(columns, kind.devices, skipped))
    return Profile(columns.file, columns.count, models, dict(skipped))


def _profiled(
    columns: Columns, devices: Mapping[str, str], skipped: Counter[str]
) -> Iterator[Profiled]:
    gpu, model, dtype = (columns.words(n) for n in ("gpu", "model", "dtype"))
    numbers = {n: columns.numbers(n) for n in (*EXTENTS, "tokens", "latency_us")}
    numbers["gated"] = np.where(numbers["gated"] > 0, 2.0, 1.0)  # no number here is 0
    kinds = [np.unique(numbers[n], return_inverse=True)[1].astype(np.int64) for n in EXTENTS]
    op = columns.words("op")
    good = np.all([(x >= LEAST) & (x <= MOST) for x in numbers.values()], axis=0)
    known = op.where(*KNOWN)
    for why, bad in ((NUMBERLESS, ~good), ("no part of a layer that we know", good & ~known)):
        if bad.any():
            skipped[why] += int(bad.sum())
    kept = np.flatnonzero(good & known)
    for group in alike([x[kept] for x in (gpu.codes, model.codes, dtype.codes, *kinds)]):
        rows = kept[group]
        first = rows[0]
        device = gpu.names[gpu.codes[first]]
        target = target_of(devices.get(device, device))
        if target is None:
            skipped[f"no target is called {device}"] += len(rows)
            continue
        extents = {n: int(numbers[n][first]) for n in EXTENTS}
        extents["gated"] -= 1
        number = dtype.names[dtype.codes[first]]
        if number not in DTYPES:
            skipped[f"dtype {number} is none we know of layers"] += len(rows)
            continue
        if extents["hidden"] % extents["q_heads"] or extents["q_heads"] % extents["tp"]:
            skipped["heads that do not divide"] += len(rows)
            continue
        tokens = np.unique(numbers["tokens"][rows])
        parts: dict[str, Floats] = {}
        for code, name in enumerate(op.names):
            mine = rows[op.codes[rows] == code]
            if len(mine):
                column = np.full(len(tokens), np.nan)
                place = np.searchsorted(tokens, numbers["tokens"][mine])
                if again := len(mine) - len(np.unique(place)):
                    skipped["the same measurement again"] += again
                column[place] = numbers["latency_us"][mine] * 1e-6
                parts[name] = column * (2 if name == "add" and extents["gated"] else 1)
        yield Profiled(
            file=columns.file,
            gpu=device,
            model=model.names[model.codes[first]],
            dtype=number,
            target=target,
            extents=extents,
            tokens=tokens,
            parts=parts,
        )


# ---------------------------------------------------------------------------- predictions


def predicted(works: Iterable[Work], target: Target, model: Model | None = None) -> Floats:
    """Seconds of kernels one after another, without their launches, by `model` or the weights that
    come with gpuir: predicted, low, high, by the roofline; a column a row."""
    total: Floats = np.zeros((4, 1))
    for work in works:
        total = total + np.maximum(kernel_s(work, target, model) - target.launch_s, 0.0)
    return total


def by_part(
    kernels: Iterable[Kernel], tokens: Floats, target: Target, model: Model | None = None
) -> dict[str, Floats]:
    """Seconds of each part of a layer, and of the embedding, as `predicted`."""
    works: dict[str, list[Work]] = {}
    for kernel in kernels:
        if (kernel.layer in MIDDLE and kernel.part != ATTENTION) or kernel.part == "emb":
            works.setdefault(kernel.part, []).append(kernel.at(tokens))
    return {
        part: predicted(some, target, model) / (1 if part == "emb" else len(MIDDLE))
        for part, some in works.items()
    }


def score(
    models: Iterable[Profiled],
    build: Build,
    watch: Callable[[str], None] = lambda _: None,
    weights: Mapping[str, Model] | None = None,
) -> GroupScores:
    """Errors of each part, and of whole layers without attention, of the measured kernels and of
    transformers' own under each profile. A target in `weights` has a model of its own."""
    rows: dict[ScoredRows, list[Floats]] = {}
    graphs: dict[str, tuple[Kernel, ...]] = {}
    for model in models:
        watch(f"{model.gpu}, {model.model}, {model.extents['tp']} ranks")
        own = (weights or {}).get(model.target.name)
        measured = {p: predicted(model.works(p), model.target, own) for p in model.parts}
        stacks = {MEASURED: measured}
        for profile in PROFILES:
            key = f"{profile} {model.config}"
            if key not in graphs:
                graphs[key] = steps(build, model.config, profile)
            stacks[profile] = by_part(graphs[key], model.tokens, model.target, own)
        for stack, parts in stacks.items():
            for group, numbers in _compared(model, stack, parts):
                rows.setdefault(group, []).append(numbers)
    groups = [Score(g, _errors(found), {}) for g, found in sorted(rows.items())]
    return GroupScores(groups=tuple(groups))


def _errors(parts: list[Floats]) -> RowErrors:
    return row_errors(np.concatenate(parts, axis=1))


def _compared(
    model: Profiled, stack: str, parts: Mapping[str, Floats]
) -> Iterator[tuple[ScoredRows, Floats]]:
    """Measured, predicted, low, high, roofline and NaN, of each part and of the layer."""
    whole = [p for p in model.parts if p != "emb"]
    measured = {p: model.parts[p] for p in model.parts} | {
        LAYER: np.sum([model.parts[p] for p in whole], axis=0)
    }
    forecast = {**parts, LAYER: sum(parts[p] for p in parts if p != "emb")}
    for part, real in measured.items():
        if part not in forecast:
            continue
        numbers = np.broadcast_to(forecast[part], (4, len(real)))
        there = np.isfinite(real)
        group = ScoredRows(
            file=model.file,
            op=part,
            device=model.gpu,
            dtype=model.dtype,
            target=model.target.name,
            by=(("stack", stack),),
        )
        yield group, np.vstack([real, numbers, np.full(len(real), np.nan)])[:, there]
