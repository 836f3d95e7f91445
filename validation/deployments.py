"""Deployments of language models against their measurements: time per output token, and requests.

A closed loop of clients keeps as many sequences in the batch, or as many as the caches have room
for. Each token then waits for a decoding step of all of them, and for its share of others' prompts:
while a sequence gives its `osl` tokens, the others begin batch - 1 new ones,

    tpot = decode(batch, isl + osl / 2) + later · (batch - 1) / osl · added(isl)
    request = clients / batch · (batch · added(isl) + osl · decode(batch, isl + osl / 2))

where `added` is what a prompt adds to the step it is computed in, and `later` is 1 where prompts
share steps with tokens. Where they go before all tokens, sequences of one length that begin
together end together, and the next ones begin together again: half of the others' prompts then come
before a request's own first token, and `later` is 1/2. Work is conserved: a request takes as long
as all that the GPUs do from its arrival to its end, whatever waits for what. What no step holds is
not predicted: scheduling, sampling, detokenising, the network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost.learned import Model
from gpuir.fit.columns import Floats, TableFile, count_of
from gpuir.fit.score import ALL, GroupScores, RowErrors, Score, ScoredRows, kernel_s, row_errors
from gpuir.fit.tables import target_of
from validation.experts import EXPERTS
from validation.served import (
    Build,
    Decoder,
    Deployment,
    Part,
    Share,
    Step,
    collectives_s,
    decoders,
    held,
    launches,
)
from validation.serving import DEVICES

WORDS = ("model", "system", "framework", "mode", "gemm_dtype", "moe_dtype")
VERSION = "backend_version"  # where a table has it
NUMBERS = (
    *("isl", "osl", "concurrency", "ttft_ms", "tpot_ms", "tp_size", "pp_size"),
    *("attention_dp_size", "moe_tp_size", "moe_ep_size"),
)
LOAD = ("isl", "osl", "concurrency", "ttft_ms", "tpot_ms", "tp_size")
RANKS = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
LEAST, MOST = 1e-3, 1e9
NODE = 8  # GPUs that NVLink joins in the systems of the table
# Why models of the table have no facts in specs/decoders.toml.
WITHOUT = {
    "zhipuai/GLM-5": "sparse attention, of which no kernel is modelled",
    "Qwen/Qwen3.5-397B-A17B": "linear attention, of which no kernel is modelled well",
}


@dataclass(frozen=True)
class Run:
    """A measured deployment under load."""

    deployment: Deployment
    system: str
    isl: float
    osl: float
    concurrency: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Runs:
    """The runs of a table that can be predicted, and how many rows are left out and why."""

    file: str
    count: int
    runs: tuple[Run, ...]
    skipped: dict[str, int] = field(default_factory=dict[str, int])


def read(path: str | Path) -> Runs:
    """The deployments of a table; each measurement once."""
    table = TableFile(Path(path))
    words = (*WORDS, VERSION) if VERSION in table.names else WORDS
    columns = table.read((*words, *NUMBERS))
    known, skipped, seen = decoders(), Counter[str](), set[Any]()
    runs: list[Run] = []
    for row in columns.lines(words, NUMBERS):
        found = _run(row, known)
        if isinstance(found, str):
            skipped[found] += 1
            continue
        load = found.isl, found.osl, found.concurrency, round(row["tpot_ms"], 2)
        if (found.deployment, *load) in seen:  # by another source, or rounded
            skipped["the same measurement again"] += 1
            continue
        seen.add((found.deployment, *load))
        runs.append(found)
    return Runs(columns.file, columns.count, tuple(runs), dict(skipped))


def _run(row: dict[str, Any], known: dict[str, Decoder]) -> Run | str:
    """The run, or why there is none."""
    if row["mode"] != "agg":
        return "prefill and decode on different GPUs"
    decoder = known.get(row["model"])
    if decoder is None:
        return WITHOUT.get(row["model"], f"no config of {row['model']}")
    target = target_of(DEVICES.get(row["system"], row["system"]))
    if target is None:
        return f"no target is called {row['system']}"
    odd = [n for n in (*RANKS, "pp_size") if row[n] > 0 and not count_of(row[n])]
    if odd or not all(LEAST <= row[n] <= MOST for n in LOAD):
        return "a number of its load is missing, too small or too large"
    tp, own, expert_tp, expert_ep = _ranks(row)
    if tp * own > NODE or row["pp_size"] > 1:
        return "more than a node of GPUs"
    if own > 1:
        return "ranks with sequences of their own"
    mixed = "num_experts_per_tok" in decoder.config
    if mixed and expert_tp * expert_ep != tp:
        return "experts on other numbers of ranks than attention"
    if decoder.config["num_attention_heads"] % tp:
        return "heads that its ranks do not divide"
    if tp > 1 and target.link is None:
        return f"several {target.name}, which have no links"
    fp8 = {"fp8": decoder.fp8}
    gemm, moe = row["gemm_dtype"] or "bf16", row["moe_dtype"] or "bf16"
    if unknown := {gemm, moe} - set(EXPERTS):
        return f"dtype {min(unknown)} is none we know of decoders"
    deployment = Deployment(
        decoder=decoder,
        target=target,
        framework=row["framework"],
        products=fp8.get(gemm, gemm),
        experts=fp8.get(moe, moe),
        tp=tp,
        expert_tp=expert_tp if mixed else 1,
        expert_ep=expert_ep if mixed else 1,
        version=row.get(VERSION, ""),
    )
    return Run(
        deployment=deployment,
        system=row["system"],
        **{n: row[n] for n in ("isl", "osl", "concurrency")},
        ttft_s=row["ttft_ms"] * 1e-3,
        tpot_s=row["tpot_ms"] * 1e-3,
    )


def _ranks(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """How many ranks the columns say, one where they say nothing, as of models without experts.

    Where experts seem to be on more GPUs than a node has, both their numbers alike, one was
    multiplied by the other: ids of such rows say `tp8_ep8`, which is 8 GPUs that share attention,
    or have sequences of their own.
    """
    tp, own, expert_tp, expert_ep = (count_of(row[n]) or 1 for n in RANKS)
    if expert_tp == expert_ep and tp * own == expert_tp * expert_ep > NODE:
        return (expert_ep, 1, 1, expert_ep) if own == 1 else (tp, expert_ep, 1, expert_ep)
    return tp, own, expert_tp, expert_ep


# ---------------------------------------------------------------------------- predictions


@dataclass(frozen=True)
class Forecast:
    """Seconds of a run, each predicted, low, high and by the roofline: of a decoding step of
    `batch` sequences, of a prompt by itself, and of what one adds to a decoding step."""

    run: Run
    batch: float
    decode_s: Floats
    prompt_s: Floats
    added_s: Floats

    @property
    def tpot_s(self) -> Floats:
        later = 1.0 if self.run.deployment.mixes else 0.5
        return self.decode_s + later * (self.batch - 1) / self.run.osl * self.added_s

    @property
    def request_s(self) -> Floats:
        """From a request's arrival to its last token: the turns of all clients, `batch` at once."""
        turn = self.batch * self.added_s + self.run.osl * self.decode_s
        return self.run.concurrency / self.batch * turn


def forecast(
    runs: Iterable[Run],
    build: Build,
    watch: Callable[[str], None] = lambda _: None,
    weights: Mapping[str, Model] | None = None,
) -> list[Forecast]:
    """All runs, those of one deployment together. A target in `weights` has a model of its own."""
    shares: dict[tuple[str, int], Share] = {}
    by_deployment: dict[Deployment, list[Run]] = {}
    for run in runs:
        by_deployment.setdefault(run.deployment, []).append(run)
    found: list[Forecast] = []
    for d, mine in by_deployment.items():
        place = d.decoder.name, d.tp
        if place not in shares:
            watch(f"{d.decoder.name} on {d.tp} ranks")
            shares[place] = Share.of(build, d.decoder, d.tp)
        found += _forecast(shares[place], d, mine, (weights or {}).get(d.target.name))
    return found


def _forecast(
    share: Share, d: Deployment, runs: list[Run], model: Model | None
) -> Iterator[Forecast]:
    isl, osl, clients = (
        np.array([getattr(r, n) for r in runs]) for n in ("isl", "osl", "concurrency")
    )
    one = np.ones(len(runs))
    batch = np.minimum(clients, held(share, d, isl + osl))
    tokens, prompt = Part(batch, one, isl + osl / 2), Part(one, isl, isl)
    decode_s, prompt_s = (seconds(share, d, Step((p,)), model) for p in (tokens, prompt))
    both = seconds(share, d, Step((tokens, prompt)), model)
    added_s = both - decode_s if d.mixes else prompt_s
    for i, run in enumerate(runs):
        yield Forecast(run, float(batch[i]), decode_s[:, i], prompt_s[:, i], added_s[:, i])


def seconds(share: Share, d: Deployment, step: Step, model: Model | None = None) -> Floats:
    """Of a step and the wait after it: predicted, low, high and by the roofline, which has no
    waits, collectives or launches."""
    apart = collectives_s(share, d, step) + d.gap_s * step.sequences
    total: Floats = np.stack([apart, apart, apart, 0.0 * apart])
    for times, work in launches(share, d, step):
        kernel = kernel_s(work, d.target, model)
        kernel[3] -= d.target.launch_s
        total += times * kernel
    return total


IMPOSSIBLE = "faster than its GPUs' peaks"
DRAFTING = "may draft several tokens a step"
# Where the stack's own recipes draft tokens by the checkpoint's further layers (TensorRT-LLM,
# examples of DeepSeek-V3 and -R1: multi-token prediction), and the table does not say whether.
MAY_DRAFT = (("deepseek_v3", "trtllm"),)


def score(forecasts: list[Forecast], file: str) -> GroupScores:
    """Errors of the time per output token and of whole requests, by model, system, framework and
    dtype. Those that no such GPUs can have served (a table's concurrency may be of several
    deployments), and those that may not be what they say, are apart."""
    rows: dict[ScoredRows, list[Floats]] = {}
    totals: dict[ScoredRows, list[Floats]] = {}
    for f in forecasts:
        d, run = f.run.deployment, f.run
        request_s = run.ttft_s + run.osl * run.tpot_s
        suspect = IMPOSSIBLE if f.request_s[3] > request_s else ""
        if (d.decoder.config["model_type"], d.framework) in MAY_DRAFT:
            suspect = DRAFTING
        group = ScoredRows(
            file=file,
            op="tpot",
            device=run.system,
            dtype=d.decoder.experts or d.products,
            target=d.target.name,
            by=(("model", d.decoder.name.rpartition("/")[2]), ("framework", d.framework)),
            suspect=suspect,
        )
        for op, values in (
            ("tpot", (run.tpot_s, *f.tpot_s, np.nan)),
            ("request", (request_s, *f.request_s, np.nan)),
        ):
            rows.setdefault(group._replace(op=op), []).append(np.array(values))
            if not group.suspect:
                anywhere = ScoredRows(
                    file, op, ALL, ALL, ALL, tuple((name, ALL) for name, _ in group.by)
                )
                totals.setdefault(anywhere, []).append(np.array(values))
    return GroupScores(
        groups=tuple(Score(g, _errors(found), {}) for g, found in sorted(rows.items())),
        totals=tuple(Score(g, _errors(found), {}) for g, found in sorted(totals.items())),
    )


def _errors(rows: list[Floats]) -> RowErrors:
    return row_errors(np.stack(rows, axis=1))
