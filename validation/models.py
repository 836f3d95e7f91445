"""Whole models against measurements: NeuSight's labels, each case built from its config.

A case is a model, a mode, sizes, a device and a software stack. How it is built follows from how it
was measured (README of the labels; Lee, Phanishayee, Mahajan, ASPLOS 2025, section 6): eager
attention in f32 without TF32; training without an optimizer, gradients added to those that are
there, dropout active. Beside it stand what four published predictors said of the same case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gpuir.files import read_json
from gpuir.fit.columns import TableFile, count_of
from gpuir.fit.score import ALL, Errors, errors_of
from gpuir.fit.tables import target_of
from gpuir.ir.build import Builder, rewrite
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Node, Value
from gpuir.ir.phases import is_training, phase_of
from gpuir.ops import tensor as t
from gpuir.simulate.timeline import timeline
from gpuir.targets.load import load_target
from gpuir.targets.profile import load_profile
from validation.cases import PROFILES, Case, Labels, Predicted, Program, Result, Times
from validation.eager import DEVICES
from validation.operators import by_kind

KEY = ("device", "model", "mode", "seqlen", "batch", "option")
MEASURED = ("e2e_ms", "fw_ms", "bwall_ms")
SUMS = ("fw_vs_opsum", "bwall_vs_opsum")
PUBLISHED = ("neusight", "habitat", "roofline", "micro")
MODES = ("inf", "train")
# What a config's model_type is run as, and what it reads (README of the labels).
TASKS: Mapping[str, Mapping[str, str]] = {
    "bert": {"inf": "seq-cls", "train": "pretraining"},
    "gpt2": {"inf": "causal-lm", "train": "causal-lm"},
    "opt": {"inf": "causal-lm", "train": "causal-lm"},
    "switch_transformers": {"inf": "seq2seq", "train": "seq2seq"},
}
# Models whose code of 2024 makes a padding mask where none is given, and adds it to the scores
# (transformers 4.38, get_extended_attention_mask); that of today leaves it out. torch.compile does
# too: a mask of ones comes down to adding a uniform zero, which it folds before it looks for
# attention (PyTorch 2.1, torch/_inductor/fx_passes/joint_graph.py, constant_fold_uniform_value).
MASKED = ("bert",)
# The forward pass of the loss lies outside both timed spans (README of the labels).
LOSS = ("cross_entropy_loss", "log_softmax", "nll_loss", "nll_loss_forward", "nll_loss_nd")
# A whole model that takes longer than its operators one by one, by more than they differ among
# themselves, was measured under other conditions. (One that takes less may be small, where each
# operator alone pays for its launch, or have a slow trace: README of the labels.)
MOST_OF_SUM = 1.1


# ---- reading -----------------------------------------------------------------------------------


def read_configs(path: str) -> dict[str, dict[str, Any]]:
    """The configs of a file, by the name that labels call them."""
    content = read_json(path, "the configs")
    configs = cast(dict[str, dict[str, Any]], content) if isinstance(content, dict) else {}
    if not configs or not all(isinstance(c, dict) for c in configs.values()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "not a file of configs", where=path, expected='{"gpt2": {"model_type": "gpt2", ...}}'
        )
    return configs


def read_labels(path: str, configs: Mapping[str, Mapping[str, Any]]) -> Labels:
    """The cases of a table of labels. UsageError where a column is missing."""
    file = TableFile(Path(path))
    missing = [name for name in (*KEY, *MEASURED) if name not in file.names]
    if missing:
        raise UsageError(
            "not a table of whole models",
            where=path,
            expected=f"the columns {', '.join((*KEY, *MEASURED))}",
            found=f"no {', '.join(missing)}",
        )
    others = [f"{p}_{m}" for p in PUBLISHED for m in MEASURED]
    columns = file.read((*KEY, "num_layer", *MEASURED, *SUMS, *others))
    cases: list[Case] = []
    skipped: dict[str, int] = {}
    numbers = ("seqlen", "batch", "num_layer", *MEASURED, *SUMS, *others)
    for line in columns.lines(("device", "model", "mode", "option"), numbers):
        case = _case(line, configs)
        if isinstance(case, str):
            skipped[case] = skipped.get(case, 0) + 1
        else:
            cases.append(case)
    return Labels(path, tuple(cases), skipped)


def _case(line: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> Case | str:
    """The case of a line, or why it is none that is predicted."""
    option = line["option"] or "none"
    if option not in PROFILES:
        parallel = option.startswith(("dp", "tp", "pp"))
        return f"option {option}: {'several GPUs' if parallel else 'no stack of that name'}"
    if line["model"] not in configs:
        return f"no config called {line['model']}"
    kind = configs[line["model"]].get("model_type")
    if kind not in TASKS or line["mode"] not in MODES:
        return f"nobody has said how a {kind} of mode {line['mode']} was run"
    target = target_of(DEVICES.get(line["device"], line["device"]))
    if target is None:
        return f"no target is called {line['device']}"
    measured = _times(line, "")
    if not measured.total_s > 0:
        return "no measurement"
    sizes = count_of(line["seqlen"]), count_of(line["batch"])
    if not all(sizes):
        return f"{'batch' if sizes[0] else 'seqlen'} is no size"
    masked = kind in MASKED and option == "none"
    published = {p: _times(line, f"{p}_") for p in PUBLISHED}
    ratios = {name: line[name] for name in SUMS if not math.isnan(line[name])}
    return Case(
        Program(line["model"], line["mode"], *sizes, masked),
        line["device"],
        option,
        target,
        measured,
        {p: times for p, times in published.items() if times.total_s > 0},
        ratios,
        "slower than its operators" if any(r > MOST_OF_SUM for r in ratios.values()) else "",
        count_of(line["num_layer"]),
    )


def _times(line: Mapping[str, Any], of: str) -> Times:
    total, forward, backward = (line[f"{of}{name}"] * 1e-3 for name in MEASURED)
    return Times(total, forward, backward)


def load_options(program: Program, config: Mapping[str, Any]) -> dict[str, Any]:
    """How a config's model is loaded as it was measured: the options of `gpuir.load`."""
    kind = str(config["model_type"])
    task = TASKS[kind][program.mode]
    dims = {"batch": program.batch, "seq": program.seq}
    if task == "seq2seq":
        dims["target"] = program.seq
    options: dict[str, Any] = {"task": task, "dims": dims, "dtype": "f32", "attention": "eager"}
    if program.masked:
        options["mask"] = True
    if program.mode == "train":
        options |= {"train": True, "accumulate": True}
    return options


# Of the rows that experts would take of tokens that spread evenly, those they take of tokens that
# dropout alone tells apart: 147 of 256 a sequence, by running transformers' router in training mode
# on 2 x 512 ones, 24 layers of random weights.
DROPPED_SHARE = 147 / 256


def as_measured(g: Graph, program: Program, config: Mapping[str, Any]) -> Graph:
    """The graph as its inputs were, ones alone (README of the labels): in inference each token is
    like all others, so all choose one expert, and of a sequence it takes what its capacity lets
    through. In training dropout tells them apart, but not much: `DROPPED_SHARE`."""
    if "expert_capacity" not in config:
        return g
    rows = min(program.seq, int(config["expert_capacity"])) * program.batch

    def seen(n: Node, b: Builder) -> tuple[Value, ...] | None:
        if not isinstance(n.op, t.Experts | t.ExpertsGradient) or not n.op.each:
            return None
        alone = (rows, *(0 for _ in n.op.each[1:]))
        spread = tuple(round(DROPPED_SHARE * expected) for expected in n.op.each)
        each = spread if program.mode == "train" else alone
        return b.add(replace(n.op, each=each))

    return rewrite(g, seen)


# ---- predicting --------------------------------------------------------------------------------


def predicted(costed: Graph, profile: str) -> Predicted:
    """What a costed graph says: forward and backward are timed one after the other, and the loss
    between them is not."""
    stack = load_profile(profile, load_target(costed.target) if costed.target else None)
    backward = is_training(costed)
    parts = [
        tuple(n for n in costed.nodes if not is_backward(n) and not (backward and is_loss(n))),
        tuple(n for n in costed.nodes if is_backward(n)),
    ]
    runs = [timeline(replace(costed, nodes=nodes), stack) for nodes in parts if nodes]
    times = [x.time_s for x in runs]
    between = [x.interval for x in runs if x.interval is not None]
    return Predicted(
        Times(sum(times), times[0], times[1] if backward else math.nan),
        (sum(low for low, _ in between), sum(high for _, high in between)) if between else None,
        sum(x.gaps_s for x in runs) / sum(times),
        sum(len(x.starts) for x in runs),
        by_kind(costed.nodes),
    )


def is_backward(node: Node) -> bool:
    return phase_of(node) is not None


def is_loss(node: Node) -> bool:
    """Whether a node is of a loss's forward pass, as at `gpt2:nll_loss_forward_1`."""
    if not node.locs or is_backward(node):
        return False
    name = node.locs[0].replace(":", "/").rpartition("/")[2]
    return name.rstrip("_0123456789").lstrip("_") in LOSS


Predict = Callable[[Case], tuple[Predicted, Predicted | None]]


def results(cases: Iterable[Case], predict: Predict) -> Iterator[Result]:
    """Every case with its predictions; those of one program come one after another, so that it has
    to be loaded once."""
    programs: dict[Program, list[Case]] = {}
    for case in cases:
        programs.setdefault(case.program, []).append(case)
    for some in programs.values():
        for case in some:
            yield Result(case, *predict(case))


# ---- scoring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Cases of one option, mode and device (or vendor, or all) with their errors by predictor:
    `gpuir`, `unseen` and the published ones, each on the cases that it has all of."""

    option: str
    mode: str
    device: str
    suspect: bool
    n: int
    errors: Mapping[str, Errors]
    parts: Mapping[str, Errors]  # of forward and backward


def groups(results: Sequence[Result]) -> list[Group]:
    """The errors by option, mode and device; of each option and mode by vendor and in all, suspect
    cases apart."""
    made: list[Group] = []
    for option in PROFILES:
        for mode in MODES:
            for suspect in (False, True):
                some = [
                    r
                    for r in results
                    if (r.case.option, r.case.program.mode) == (option, mode)
                    and bool(r.case.suspect) == suspect
                ]
                made += _groups(some, option, mode, suspect)
    return made


def _groups(results: Sequence[Result], option: str, mode: str, suspect: bool) -> Iterator[Group]:
    by_device: dict[str, list[Result]] = {}
    by_vendor: dict[str, list[Result]] = {}
    for r in results:
        by_device.setdefault(r.case.target.name, []).append(r)
        by_vendor.setdefault(f"{ALL} {r.case.target.vendor}", []).append(r)
    for name in sorted(by_device):
        yield _group(option, mode, name, suspect, by_device[name])
    for name in sorted(by_vendor):
        yield _group(option, mode, name, suspect, by_vendor[name])


def _group(option: str, mode: str, device: str, suspect: bool, results: Sequence[Result]) -> Group:
    times: dict[str, list[tuple[Times, Times]]] = {"gpuir": []}
    for r in results:
        own = r.case.measured
        times["gpuir"].append((r.predicted.times, own))
        if r.unseen is not None:
            times.setdefault("unseen", []).append((r.unseen.times, own))
        for name, theirs in r.case.published.items():
            times.setdefault(name, []).append((theirs, own))
    parts = ("forward_s", "backward_s") if mode == "train" else ()
    return Group(
        option,
        mode,
        device,
        suspect,
        len(results),
        {name: errors_of([a.error(b) for a, b in pairs]) for name, pairs in times.items()},
        {p: errors_of([a.error(b, p) for a, b in times["gpuir"]]) for p in parts},
    )
