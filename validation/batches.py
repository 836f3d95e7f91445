"""Measured batches of prompts and tokens, on one GPU and on several, against the engines' profiles.

Prompts of a batch have lengths of their own. Products count their tokens, attention the sum of
their squares, so a batch of prompts is costed as prompts of one length, the mean that tokens see:
sum of squares / sum. Of a token of each request, attention counts the sum of what lies behind them,
so their mean is exact; half of the tokens to generate count as there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any, cast

import numpy as np

from gpuir.cli.exam import ScoredRow
from gpuir.files import read_json
from gpuir.fit.columns import Floats, TableFile, count_of
from gpuir.fit.score import ALL, GroupScores, Score, ScoredRows, row_errors
from gpuir.fit.tables import target_of
from gpuir.ir.errors import GpuirError
from gpuir.simulate.parallel import Parallel
from gpuir.targets.profile import load_profile
from validation.commands import Simulation, config

WORDS = ("gpu", "engine", "model", "workload")
NUMBERS = ("tp", "pp", "batch", "output_len", "prefill_ms", "decode_ms", "total_ms")
COLUMNS = (*WORDS, *NUMBERS)
# The nodes that the README of the tables describes; of other GPUs, what a name like `2xa40` means.
NODES = {
    "a100-sxm-80gb": "dgx-a100",
    "h100-sxm-80gb": "4xh100-mesh",
    "h20-sxm-96gb": "h20-node",
    "rtx-6000-ada": "rtx6000-ada-pcie",
}


@dataclass(frozen=True)
class Case:
    """A measured batch: seconds of all prompts, of one token of each request, and of all, NaN where
    they were not measured."""

    device: str
    target: str
    engine: str
    model: str
    config: Mapping[str, Any] = field(hash=False)
    prompts: tuple[int, ...]
    output: int
    tp: int
    pp: int
    prefill_s: float
    decode_s: float
    total_s: float

    @property
    def cluster(self) -> str:
        ranks = self.tp * self.pp
        return NODES.get(self.target, f"{ranks}x{self.target}")


@dataclass(frozen=True)
class Cases:
    file: str
    count: int
    cases: tuple[Case, ...]
    skipped: Mapping[str, int]


def read(path: str | Path) -> Cases:
    """The batches of a table, with the lengths of their prompts from `workloads/` beside it."""
    columns = TableFile(Path(path)).read(COLUMNS)
    folder = Path(path).parent / "workloads"
    content = read_json(folder / "models.json", "the models of these batches")
    facts = cast("dict[str, dict[str, Any]]", content) if isinstance(content, dict) else {}
    found: list[Case] = []
    skipped: Counter[str] = Counter()
    for line in columns.lines(WORDS, NUMBERS):
        case = _case(line, facts, folder)
        if isinstance(case, str):
            skipped[case] += 1
        else:
            found.append(case)
    return Cases(columns.file, columns.count, tuple(found), dict(skipped))


def _lengths(path: Path) -> tuple[int, ...]:
    """The lengths of a workload's prompts, none where there is no such file."""
    if not path.is_file():
        return ()
    numbers = TableFile(path).read(("input_len",)).numbers("input_len")
    lengths = tuple(count_of(n) for n in numbers.tolist())
    return lengths if all(lengths) else ()


@cache
def _unknown(engine: str) -> str:
    """Why no profile stands for an engine, empty where one does."""
    try:
        load_profile(engine)
    except GpuirError as error:
        return error.what
    return ""


def _case(
    line: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> Case | str:
    """The case of a line, or why it is none that is predicted."""
    target = target_of(line["gpu"])
    if target is None:
        return f"no target is called {line['gpu'] or 'nothing'}"
    model = facts.get(line["model"])
    if model is None:
        return f"no facts of {line['model'] or 'a model without a name'}"
    if missing := [n for n in FACTS if n not in model]:
        return f"the facts of {line['model']} have no {', '.join(missing)}"
    if unknown := _unknown(line["engine"]):
        return unknown
    prompts = _lengths(folder / f"{line['workload']}.csv")
    if not prompts:
        return f"no lengths of prompts of the workload {line['workload'] or 'without a name'}"
    output, tp, pp = (count_of(line[n]) for n in ("output_len", "tp", "pp"))
    times = {f"{n}_s": line[f"{n}_ms"] * 1e-3 for n in ("prefill", "decode", "total")}
    if not (output and tp and pp and any(0 < s < inf for s in times.values())):
        return "a size or every time is missing"
    if model["heads"] % tp:
        return "heads that its ranks do not divide"
    return Case(
        line["gpu"],
        target.name,
        *(line["engine"], line["model"], config_of(model), prompts),
        *(output, tp, pp),
        **{n: s if 0 < s < inf else nan for n, s in times.items()},
    )


FACTS = (
    *("architecture", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"),
    *("vocab", "activation", "tied_embeddings", "dtype"),
)


def config_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config as transformers names its fields."""
    architecture: str = facts["architecture"]
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "num_hidden_layers": facts["layers"],
        "hidden_size": facts["hidden"],
        "num_attention_heads": facts["heads"],
        "num_key_value_heads": facts["kv_heads"],
        "head_dim": facts["head_dim"],
        "intermediate_size": facts["intermediate"],
        "vocab_size": facts["vocab"],
        "hidden_act": facts["activation"],
        "tie_word_embeddings": facts["tied_embeddings"],
        "dtype": facts["dtype"],
    }


# ---------------------------------------------------------------------------- predictions


@dataclass(frozen=True)
class Forecast:
    """Seconds of a case, each predicted, low and high."""

    case: Case
    prefill_s: Floats
    decode_s: Floats

    @property
    def total_s(self) -> Floats:
        return self.prefill_s + (self.case.output - 1) * self.decode_s

    @property
    def rows(self) -> Iterator[ScoredRow]:
        """Of prompts and of a token of each sequence: a batch takes both, the tokens `output` - 1
        times."""
        for asked, found in ((prompts, self.prefill_s), (token, self.decode_s)):
            yield ScoredRow(float(found[0]), "s", asked(self.case).command, "time_s")


def forecast(cases: Iterable[Case], watch: Callable[[str], None]) -> Iterator[Forecast]:
    for case in cases:
        watch(f"{case.model}, {case.engine}, {case.tp * case.pp} x {case.target}")
        yield Forecast(case, seconds(prompts(case)), seconds(token(case)))


def prompts(case: Case) -> Simulation:
    """All prompts of a batch, as prompts of one length."""
    tokens = sum(case.prompts)
    count = max(1, round(tokens**2 / sum(n * n for n in case.prompts)))
    return _asked(case, phase="prefill", dims={"batch": count, "seq": round(tokens / count)})


def token(case: Case) -> Simulation:
    """A token of each sequence, behind its prompt and half of what it gives."""
    behind = np.mean(case.prompts) + case.output / 2
    return _asked(case, phase="decode", past=round(behind), dims={"batch": len(case.prompts)})


def _asked(case: Case, **options: Any) -> Simulation:
    return Simulation(
        config(case.config, case.model),
        options,
        profile=case.engine,
        cluster=case.cluster,
        parallel=Parallel(tp=case.tp, pp=case.pp),
    )


def seconds(asked: Simulation) -> Floats:
    """Predicted, low and high."""
    step = asked.step()
    return np.array([step.time_s, *(step.interval or (step.time_s, step.time_s))])


# ---------------------------------------------------------------------------- scores


def score(forecasts: Iterable[Forecast], file: str) -> GroupScores:
    """Errors of prompts, of tokens and of whole batches: by model, engine, GPU and ranks."""
    groups: dict[ScoredRows, list[Floats]] = {}
    totals: dict[ScoredRows, list[Floats]] = {}
    for f in forecasts:
        case = f.case
        by = (("model", case.model), ("engine", case.engine), ("ranks", ranks_of(case)))
        for op in ("prefill", "decode", "total"):
            measured: float = getattr(case, f"{op}_s")
            if not np.isfinite(measured):
                continue
            row = np.array([measured, *getattr(f, f"{op}_s"), np.nan, np.nan])
            one = ScoredRows(file, op, case.device, case.config["dtype"], case.target, by)
            groups.setdefault(one, []).append(row)
            several = "several GPUs" if case.tp * case.pp > 1 else "one GPU"
            for ranks in (several, ALL):
                every = (("model", ALL), ("engine", ALL), ("ranks", ranks))
                totals.setdefault(ScoredRows(file, op, ALL, ALL, ALL, every), []).append(row)
    return GroupScores(groups=_scores(groups), totals=_scores(totals))


def ranks_of(case: Case) -> str:
    return f"tp{case.tp}" + (f" pp{case.pp}" if case.pp > 1 else "")


def _scores(rows: Mapping[ScoredRows, list[Floats]]) -> tuple[Score, ...]:
    return tuple(
        Score(group, row_errors(np.stack(found, axis=1)), {})
        for group, found in sorted(rows.items())
    )
