"""The ONNX backend node tests, every one, through gpuir: what is read, and read right.

    python tools/conformance.py [--jobs N] [--filter SUBSTR] [--write docs/reference/conformance.md]

Each case is loaded from memory, verified, printed and parsed back, evaluated by `gpuir.interp`
against the expected outputs, and evaluated again after each pass. A shape that depends on an
input's value needs that value at load: the frontend's message says `--value name=...`, and it is
given from the case's data. Exit code 1 if a case fails.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuir.interp import run
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph
from gpuir.ir.verify import verify

PASSES = {"canonicalize": "Canonicalize", "fuse": "Fuse", "legalize": "Legalize"}
STAGES = ("imported", "static", "text", "evaluated", *PASSES)
SAYS = {
    "imported": "gpuir reads and verifies the model; every shape is static",
    "static": "gpuir assumes no size: none depends on the data",
    "text": "the text prints, parses, and prints the same again",
    "evaluated": "evaluated; the outputs are as expected",
    "canonicalize": "the same outputs after the pass canonicalize",
    "fuse": "the same outputs after the pass fuse",
    "legalize": "the same outputs after the pass legalize",
}
NOT_BUILT = "not built"
SECONDS = 60  # for one case

# What gpuir does not analyse: it must refuse these clearly.
OUTSIDE_OPS = (
    *("Sequence", "SplitToSequence", "ConcatFromSequence", "Optional", "String", "Regex"),
    *("TfIdfVectorizer", "LabelEncoder", "ImageDecoder"),
)
RANDOM_OPS = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"),
    *("RandomUniform", "RandomUniformLike"),
}
STRING = 8  # TensorProto.STRING
# Assumptions that are no guess at a size: a value given at load, the mode of a dropout, a trip
# count that the model itself fixes.
GIVEN = re.compile(
    r"^input .* holds |training_mode|trips, the length|from the model, unrolled|^weights take "
)


def is_random(case: Any, ops: tuple[str, ...]) -> bool:
    """Whether the expected numbers were drawn: by a random operator, or dropout in training."""
    dropout = "test_training_dropout" in case.name and "zero_ratio" not in case.name
    return dropout or bool(RANDOM_OPS & set(ops))


@dataclass
class Outcome:
    """What became of a case: for each stage it reached "" or the reason why it failed."""

    case: str
    ops: tuple[str, ...]
    stages: dict[str, str] = field(default_factory=dict[str, str])
    refused: str = ""
    values: tuple[str, ...] = ()  # inputs whose values were given at load
    random: bool = False  # only types and shapes are compared
    known: bool = False  # everything is known at load: nothing is left to run

    @property
    def failures(self) -> dict[str, str]:
        """The stages that went wrong. A size that depends on the data is no fault."""
        return {s: r for s, r in self.stages.items() if r not in ("", NOT_BUILT) and s != "static"}

    def passed(self, stage: str) -> bool:
        return self.stages.get(stage) == ""


@cache
def cases() -> tuple[Any, ...]:
    """The node tests of the installed onnx, by name."""
    import warnings

    from onnx.backend.test.loader import load_node_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(sorted(load_node_model_tests(), key=lambda case: case.name))


def operators(model: Any) -> tuple[str, ...]:
    return tuple(
        sorted({f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in nodes(model.graph)})
    )


def nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a model's graph, those of its subgraphs included."""
    for node in graph.node:
        yield node
        for a in node.attribute:
            for g in (*([a.g] if a.HasField("g") else []), *a.graphs):
                yield from nodes(g)


def is_outside(model: Any) -> bool:
    """Whether the model holds what gpuir does not analyse: text, sequences, optionals, maps,
    training steps."""
    infos = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    for info in infos:
        kind = info.type.WhichOneof("value")
        if kind not in (None, "tensor_type") or info.type.tensor_type.elem_type == STRING:
            return True
    if any(t.data_type == STRING for t in model.graph.initializer):
        return True
    return any(
        n.op_type.startswith(OUTSIDE_OPS)
        or "training" in n.domain
        or any(a.name == "to" and a.i == STRING for a in n.attribute)
        for n in nodes(model.graph)
    )


def array(x: Any) -> np.ndarray:
    """An entry of a data set as an array."""
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(x) if isinstance(x, TensorProto) else np.asarray(x)


def reason(error: BaseException) -> str:
    """An error as one line."""
    if not isinstance(error, GpuirError):
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
    text = error.what
    if error.expected:
        text += f"; expected {error.expected}"
    if error.found:
        text += f"; found {error.found}"
    return " ".join(text.split())[:200]


def spacing(x: np.ndarray) -> np.ndarray:
    """The unit in the last place of each number, f16 or bf16, as f64."""
    import ml_dtypes

    info = ml_dtypes.finfo(x.dtype)
    return np.ldexp(float(info.eps), np.frexp(np.abs(x.astype(np.float64)))[1] - 1)


def compare(
    found: list[np.ndarray], expected: list[np.ndarray], rtol: float, atol: float, random: bool
) -> str:
    """Why the arrays differ, or "". Floats to the case's tolerance, all else exactly.

    The expected numbers of f16 and bf16 cases were rounded at each step of numpy's, gpuir's in its
    own order: two units in the last place are allowed.
    """
    if len(found) != len(expected):
        return f"{len(found)} outputs, expected {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {i} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
        if random or not a.size:
            continue
        if a.dtype.kind in "biu" or a.dtype.name in ("int4", "uint4", "int2", "uint2"):
            wrong = a != b
            rtol_ = "exactly"
        else:
            slack = 2 * spacing(b) if b.dtype.name in ("float16", "bfloat16") else 0.0
            a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
            wrong = ~np.isclose(a, b, rtol=rtol, atol=np.maximum(atol, slack), equal_nan=True)
            rtol_ = f"to rtol {rtol:g}, atol {atol:g}"
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            return (
                f"output {i} differs in {int(wrong.sum())} of {a.size} cells {rtol_}: "
                f"at {list(at)} {a[at]!s}, expected {b[at]!s}"
            )
    return ""


@cache
def get_pass(name: str) -> Any:
    """An instance of a pass, or None while it is not written."""
    try:
        return getattr(importlib.import_module(f"gpuir.passes.{name}"), PASSES[name])()
    except (ImportError, AttributeError):
        return None


def check(case: Any) -> Outcome:
    """One case through every stage."""
    from gpuir.frontends.onnx.load import load

    model = case.model
    ops = operators(model)
    outcome = Outcome(case.name, ops, random=is_random(case, ops))
    if is_outside(model):
        try:
            load(model)
        except GpuirError as error:
            outcome.refused = reason(error)
            return outcome
        except Exception as error:
            outcome.stages["imported"] = reason(error)
            return outcome

    def named() -> Iterable[tuple[dict[str, np.ndarray], list[np.ndarray]]]:
        for inputs, outputs in case.data_sets:
            arrays = {i.name: array(x) for i, x in zip(model.graph.input, inputs, strict=False)}
            yield arrays, [array(x) for x in outputs]

    sets = list(named())
    given: dict[str, np.ndarray] = {}
    while True:
        try:
            loaded = load(model, values=given)
            verify(loaded.graph, "onnx")
            break
        except GpuirError as error:
            asked = set(re.findall(r"--value (\S+?)=", str(error))) & set(sets[0][0])
            if not asked - set(given):
                outcome.stages["imported"] = reason(error)
                return outcome
            given.update((n, sets[0][0][n]) for n in asked)
        except Exception as error:
            outcome.stages["imported"] = reason(error)
            return outcome
    outcome.values = tuple(sorted(given))
    outcome.stages["imported"] = ""
    sizes = [a for a in loaded.graph.assumed if not GIVEN.search(a)]
    outcome.stages["static"] = "; ".join(sizes)

    def stage(name: str, what: Callable[[], str]) -> bool:
        try:
            outcome.stages[name] = what()
        except Exception as error:
            outcome.stages[name] = reason(error)
        return not outcome.stages[name]

    def evaluated(graph: Graph) -> str:
        weights = {v.name: loaded.weights[v.name] for v in graph.params}
        for arrays, expected in sets:
            inputs = {v.name: arrays[v.name] for v in graph.inputs}
            found = run(graph, {**inputs, **weights})
            outputs = [found[v.name] for v in graph.outputs]
            if wrong := compare(outputs, expected, case.rtol, case.atol, outcome.random):
                return wrong
        return ""

    def same_text(graph: Graph) -> str:
        from gpuir.text import parse, show

        text = show(graph)
        return "" if show(parse(text)) == text else "the text changes"

    graph = loaded.graph
    outcome.known = all(n.op.name == "t.constant" for n in graph.nodes)
    stage("text", lambda: same_text(graph))
    if not stage("evaluated", lambda: evaluated(graph)):
        return outcome
    for name in PASSES:
        step = get_pass(name)
        if step is None:
            outcome.stages[name] = NOT_BUILT
            break

        def passed(step: Any = step, name: str = name) -> str:
            nonlocal graph
            graph = step.run(graph)
            verify(graph, name)
            return same_text(graph) or evaluated(graph)

        if not stage(name, passed):
            break
    return outcome


def _check_index(i: int) -> Outcome:
    def late(*_: object) -> None:
        raise TimeoutError(f"over {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    case = cases()[i]
    try:
        return check(case)
    except Exception as error:  # a bug outside the stages
        return Outcome(case.name, operators(case.model), {"imported": reason(error)})
    finally:
        signal.alarm(0)


def check_all(part: str = "", jobs: int = 1) -> list[Outcome]:
    """The outcomes of the cases whose name holds `part`, in order of name."""
    chosen = [i for i, case in enumerate(cases()) if part in case.name]
    if jobs == 1:
        return [_check_index(i) for i in chosen]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return pool.map(_check_index, chosen, chunksize=8)


# ---------------------------------------------------------------------------- reporting


def totals(outcomes: list[Outcome]) -> dict[str, int]:
    counts = {"cases": len(outcomes), "refused": sum(bool(o.refused) for o in outcomes)}
    counts |= {s: sum(o.passed(s) for o in outcomes) for s in STAGES}
    counts["values given"] = sum(bool(o.values) for o in outcomes)
    counts["nothing to run"] = sum(o.known for o in outcomes)
    counts["random"] = sum(o.random and o.passed("evaluated") for o in outcomes)
    return counts


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def report(outcomes: list[Outcome], version: str) -> str:
    """The page conformance.md: totals, a row an operator, every case that is refused or fails."""
    n = totals(outcomes)
    built = [s for s in STAGES if not any(o.stages.get(s) == NOT_BUILT for o in outcomes)]
    lines = [
        "# ONNX conformance",
        "",
        "Which ONNX operators does gpuir read, and does it read them right? This page has the "
        f"results of all backend node tests of onnx {version}. To make the page again:",
        "",
        "```sh",
        "python tools/conformance.py --write docs/reference/conformance.md",
        "```",
        "",
        "Each case goes through the stages below in this order.",
        "",
        "| stage | what passes | cases |",
        "|---|---|---|",
        f"| | all cases | {n['cases']} |",
        "| refused | gpuir refuses the model, and should: text, sequences, optionals, training "
        f"steps | {n['refused']} |",
        *(f"| {s} | {SAYS[s]} | {n[s] if s in built else NOT_BUILT} |" for s in STAGES),
        "",
        "A case counts for a stage if it passed this stage and the earlier stages that compute. "
        "Outputs are compared with the tolerance of the case, and dtypes, shapes and integers "
        "exactly. f16 and bf16 may differ by two units in the last place, if that is more.",
        "",
        f"- {n['random']} of the evaluated cases draw random numbers. Only the type and the shape "
        "of their outputs are compared.",
        f"- {n['values given']} cases need the value of an input at load, because a shape depends "
        "on it (`--value name=...`). The last table lists them.",
        f"- In {n['nothing to run']} cases gpuir knows everything at load, and nothing is left to "
        "run.",
        "",
        "## Operators",
        "",
        "How many cases use the operator, and how many of them pass each stage:",
        "",
        f"| operator | cases | refused | {' | '.join(STAGES)} |",
        "|---" * (3 + len(STAGES)) + "|",
    ]
    for op in sorted({op for o in outcomes for op in o.ops}):
        mine = [o for o in outcomes if op in o.ops]
        n = totals(mine)
        lines.append(
            f"| {op} | {n['cases']} | {n['refused']} | {' | '.join(str(n[s]) for s in STAGES)} |"
        )
    sections: list[tuple[str, str, str, Mapping[str, str]]] = [
        (
            "Refused",
            "gpuir does not analyse these models, and says why:",
            "message",
            {o.case: o.refused for o in outcomes if o.refused},
        ),
        *(
            (
                f"Failed: {s}",
                f"These cases should pass this stage: {SAYS[s]}.",
                "what went wrong",
                {o.case: o.failures[s] for o in outcomes if s in o.failures},
            )
            for s in STAGES
        ),
        (
            "Sizes that depend on the data",
            "gpuir takes the largest possible size, and the report says so under `assumed`:",
            "assumption",
            {o.case: o.stages["static"] for o in outcomes if o.stages.get("static")},
        ),
        (
            "Values given at load",
            "In these cases a shape depends on the value of an input. gpuir asks for it, and the "
            "test gives it:",
            "inputs",
            {o.case: ", ".join(o.values) for o in outcomes if o.values},
        ),
    ]
    for title, sentence, column, rows in sections:
        if rows:
            lines += ["", f"## {title}", "", sentence, "", f"| case | {column} |", "|---|---|"]
            lines += [f"| {case} | {cell(why)} |" for case, why in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--filter", default="", help="only cases whose name holds this")
    parser.add_argument("--write", type=Path, help="write the report to this file")
    options = parser.parse_args()
    start = time.time()
    outcomes = check_all(options.filter, options.jobs)
    import onnx

    if options.write:
        options.write.write_text(report(outcomes, onnx.__version__))
    for o in outcomes:
        for s, why in o.failures.items():
            print(f"{o.case}: {s}: {why}")
    for what, count in totals(outcomes).items():
        print(f"{count:6} {what}")
    by_reason = Counter(f"{s}: {why[:70]}" for o in outcomes for s, why in o.failures.items())
    print("commonest failures:")
    for why, count in by_reason.most_common(12):
        print(f"{count:6} {why}")
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    return int(any(o.failures for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
