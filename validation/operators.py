"""Where the error of a whole model comes from: its operators, by kind, against a trace of each run
by itself.

A trace is a row an operator of a model with one layer; rows in the layer count once a layer (README
of NeuSight's tables). Each is timed between two events, and so holds what a view takes, which
launches nothing: that is taken off. Backward was timed operator by operator with derivatives of
higher order allowed, which makes dropout three kernels instead of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gpuir.fit.columns import Floats, TableFile
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Node
from gpuir.ir.phases import phase_of
from gpuir.ops import kernel as k
from validation.cases import Case, Result
from validation.traced import SUSPECT, VIEWS

Part = Literal["forward", "backward"]
PARTS: tuple[Part, ...] = ("forward", "backward")
COLUMNS = ("device", "model", "mode", "seqlen", "batch", "in_layer", "kind", "target", "module")
TIMES = ("fw_us", "bw_us", "acc_us")
# The kind of an operator, by what fx (of a module its class) or a kernel's location calls it.
READERS = {
    **dict.fromkeys(("Linear", "addmm", "linear", "mm"), "linear"),
    **dict.fromkeys(("matmul", "bmm", "_unsafe_view", "expand", "clone"), "matmul"),
    **dict.fromkeys(("softmax", "_softmax", "_softmax_backward_data"), "softmax"),
    **dict.fromkeys(("LayerNorm", "layer_norm", "native_layer_norm"), "norm"),
    **dict.fromkeys(("native_layer_norm_backward",), "norm"),
    **dict.fromkeys(("Embedding", "embedding", "embedding_dense_backward"), "embedding"),
    **dict.fromkeys(("Dropout", "dropout", "native_dropout", "native_dropout_backward"), "dropout"),
    **dict.fromkeys(("contiguous", "view", "reshape", "transpose", "cat"), "copy"),
    "accumulate": "accumulate",
}
POINTWISE = "pointwise"


@dataclass(frozen=True)
class Trace:
    """Seconds by kind of operator: of one layer, and of what is outside of it."""

    layer: Mapping[tuple[str, Part], float]
    outside: Mapping[tuple[str, Part], float]
    suspect: bool = False

    def whole(self, layers: int) -> dict[tuple[str, Part], float]:
        keys = dict.fromkeys((*self.layer, *self.outside))
        return {key: layers * self.layer.get(key, 0.0) + self.outside.get(key, 0.0) for key in keys}


CaseKey = tuple[str, str, str, int, int]  # device, model, mode, sequence, batch


@dataclass(frozen=True)
class Compared:
    """One kind of operator in one part, over all traced cases of a GPU and mode: seconds measured
    and predicted, and the mean absolute error of the cases in percent."""

    target: str
    mode: str
    part: Part
    kind: str
    suspect: bool
    cases: int
    measured_s: float
    predicted_s: float
    mean: float

    @property
    def error(self) -> float:
        return 100 * (self.predicted_s / self.measured_s - 1)


def kind_of(node: Node) -> tuple[str, Part]:
    """The kind of operator that a kernel is of, and whether forward or backward."""
    part: Part = "backward" if phase_of(node) else "forward"
    names = (node.locs[0] if node.locs else "").replace(":", "/").split("/")
    name = names[-2] if phase_of(node) and len(names) > 1 else names[-1]
    name = name.partition(".")[0].rstrip("_0123456789")
    if isinstance(node.op, k.Gemm):
        is_batch = node.op.space().dims["b"] > 1 or name in ("bmm", "matmul")
        return ("matmul" if is_batch else "linear"), part
    if isinstance(node.op, k.Copy) and name not in READERS:
        return "copy", part
    return READERS.get(name, POINTWISE), part


def by_kind(nodes: Iterable[Node]) -> dict[tuple[str, str], float]:
    """Seconds of costed kernels by kind."""
    seconds: dict[tuple[str, str], float] = {}
    for node in nodes:
        if node.cost is not None and node.cost.time_s:
            key = kind_of(node)
            seconds[key] = seconds.get(key, 0.0) + node.cost.time_s
    return seconds


def read_traces(path: str) -> dict[CaseKey, Trace]:
    """The traces of a table. UsageError where a column is missing."""
    file = TableFile(Path(path))
    if missing := [name for name in (*COLUMNS, *TIMES) if name not in file.names]:
        raise UsageError(
            "not a table of operators of models", where=path, found=f"no {', '.join(missing)}"
        )
    columns = file.read((*COLUMNS, *TIMES))
    words = {n: columns.words(n) for n in ("device", "model", "mode", "kind", "target", "module")}
    sizes = {n: columns.numbers(n) for n in ("seqlen", "batch", "in_layer", *TIMES)}
    rows: dict[CaseKey, list[int]] = {}

    def cell(name: str, i: int) -> str:
        return words[name].names[int(words[name].codes[i])]

    for i in range(columns.count):
        size = int(sizes["seqlen"][i]), int(sizes["batch"][i])
        key = cell("device", i), cell("model", i), cell("mode", i), *size
        rows.setdefault(key, []).append(i)

    def name(i: int) -> str:
        return cell("module" if cell("kind", i) == "call_module" else "target", i)

    return {
        key: _trace([name(i) for i in some], {n: v[some] for n, v in sizes.items()}, key)
        for key, some in rows.items()
    }


def _trace(names: Sequence[str], columns: Mapping[str, Floats], key: CaseKey) -> Trace:
    launches = np.array([n not in VIEWS for n in names])
    if key[2] != "train":
        launches &= np.array([n.lower() != "dropout" for n in names])
    idle = columns["fw_us"][~launches]
    empty = float(np.median(idle)) if len(idle) else 0.0
    sums: tuple[dict[tuple[str, Part], float], dict[tuple[str, Part], float]] = ({}, {})
    for i in np.flatnonzero(launches).tolist():
        into = sums[0 if columns["in_layer"][i] else 1]
        kind = READERS.get(names[i], POINTWISE)
        times: tuple[tuple[str, Part, float], ...] = (
            (kind, "forward", columns["fw_us"][i] - empty),
            (kind, "backward", columns["bw_us"][i]),
            ("accumulate", "backward", columns["acc_us"][i]),
        )
        for kind, part, time in times:
            if time > 0:
                into[kind, part] = into.get((kind, part), 0.0) + time * 1e-6
    return Trace(*sums, suspect=(key[0], key[1]) in SUSPECT)


def key_of(case: Case) -> CaseKey:
    p = case.program
    return case.device, p.model, p.mode, p.seq, p.batch


def compared(results: Iterable[Result], traces: Mapping[CaseKey, Trace]) -> list[Compared]:
    """Each kind of operator, by GPU and mode, over the eager cases that have a trace."""
    pairs: dict[tuple[str, str, Part, str, bool], list[tuple[float, float]]] = {}
    for r in results:
        trace = traces.get(key_of(r.case))
        if trace is None or not r.case.layers or r.case.option != "none":
            continue
        for (kind, part), measured in trace.whole(r.case.layers).items():
            place = (r.case.target.name, r.case.program.mode, part, kind, trace.suspect)
            predicted = r.predicted.kinds.get((kind, part), 0.0)
            pairs.setdefault(place, []).append((measured, predicted))

    def order(place: tuple[str, str, Part, str, bool]) -> tuple[bool, str, str, int, float]:
        target, mode, part, _, suspect = place
        return suspect, target, mode, PARTS.index(part), -sum(m for m, _ in pairs[place])

    return [
        Compared(
            *place,
            cases=len(pairs[place]),
            measured_s=sum(m for m, _ in pairs[place]),
            predicted_s=sum(p for _, p in pairs[place]),
            mean=float(np.mean([100 * abs(p / m - 1) for m, p in pairs[place]])),
        )
        for place in sorted(pairs, key=order)
    ]
