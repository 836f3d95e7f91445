"""torch's operators through gpuir, on the samples of torch's own OpInfo database.

    python tools/operators.py [NAME ...] [--dtypes f32,i64] [--samples N] [--write FILE]

Each sample is exported, loaded strictly (which compares the type of every result with torch's) and
evaluated by `gpuir.interp` beside torch; then once more in core ATen operators, where that is
another program. What OpInfo calls under no name of its own, backward operators above all, has a
case in `DIRECT`. The exit code is 1 if a core ATen operator fails.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpuir
from gpuir.frontends.torch.load import load
from gpuir.frontends.torch.table import CONVERTERS
from gpuir.frontends.torch.walk import numbers
from gpuir.interp import run
from gpuir.ir.errors import ModelError

DTYPES = {
    "f32": torch.float32,
    "i64": torch.int64,
    "bool": torch.bool,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
USUAL = ("f32", "i64", "bool", "f16", "bf16", "c64")
LOOSE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # a few units in the last place
SECONDS = 60  # for one sample

# Their numbers are drawn, or are whatever the memory held.
RANDOM = {
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"),
    *(
        "normal",
        "normal_functional",
        "uniform",
        "bernoulli",
        "multinomial",
        "cauchy",
        "exponential",
    ),
    *("geometric", "log_normal", "dropout", "native_dropout", "alpha_dropout", "feature_dropout"),
    *("feature_alpha_dropout", "rrelu", "rrelu_with_noise", "rrelu_with_noise_functional"),
    *("empty", "empty_like", "empty_strided", "empty_permuted"),
    *("new_empty", "new_empty_strided", "resize", "_unsafe_resize"),
}
# The first result alone says it: which of equals comes first, and the signs of vectors, are free.
TIED = {
    "sort",
    "topk",
    "kthvalue",
    "mode",
    "median",
    "nanmedian",
    "_linalg_eigh",
    "linalg_eigh",
    "linalg_eig",
}
# Nothing to translate: what they give is a Python number, sparse, or for a GPU alone.
OUTSIDE = ("jiterator_", "sparse.", "to_sparse", "allclose", "equal", "item", "chalf")


@dataclass(frozen=True)
class Case:
    """A call to check: of an OpInfo's sample, or written here."""

    operator: str
    dtype: torch.dtype
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Outcome:
    """How far a case came: "no program" where torch does not export it, "refused", "typed" where
    values were not, or wrongly, computed, and "valued". `calls` are ATen operators by name and
    overload."""

    case: Case
    stage: str
    calls: frozenset[str] = frozenset()
    note: str = ""


class Call(nn.Module):
    """A call with its tensors as inputs; the tensors that it gives, laid flat."""

    def __init__(self, case: Case):
        super().__init__()
        self.fn = case.call
        flat, self.spec = tree_flatten((case.args, case.kwargs))
        self.flat = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(x for x in self.flat if isinstance(x, torch.Tensor))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = iter(given)
        flat = [next(tensors) if isinstance(x, torch.Tensor) else x for x in self.flat]
        args, kwargs = tree_unflatten(flat, self.spec)
        found = tree_flatten(self.fn(*args, **kwargs))[0]
        return tuple(x for x in found if isinstance(x, torch.Tensor))


def check(case: Case, core: bool = False, profiles: Sequence[str] = ()) -> Outcome:
    """One case, as torch exports it or, with `core`, in core ATen operators; then its kernels as
    each of the profiles makes them, whose numbers must be those of the graph."""
    module = Call(case)
    given = module.tensors()
    try:
        with torch.no_grad():
            torch.manual_seed(0)
            wanted = module(*(x.clone() for x in given))
            program = torch.export.export(module, given, strict=False)
        program = program.run_decompositions() if core else program
    except Timeout:
        raise
    except Exception as error:  # whatever torch says
        return Outcome(case, "no program", note=first_line(error))
    calls = frozenset(
        str(n.target).removeprefix("aten.")
        for n in program.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
    )
    try:
        model = load(program, dims=sizes(program, wanted), strict=True)
    except ModelError as error:
        return Outcome(case, "refused", calls, first_line(error))
    graph = model.graph
    values = {v.name: numbers(x) for v, x in zip(graph.inputs, given, strict=True)}
    values |= {p.name: model.weights[p.name] for p in graph.params}
    if is_random(calls):
        return Outcome(case, "valued", calls, "random: types alone")
    try:
        found = run(graph, values)
        ties = any(call.partition(".")[0] in TIED for call in calls)
        count = 1 if ties else len(wanted)
        for value, want in list(zip(graph.outputs[-len(wanted) :], wanted, strict=True))[:count]:
            compare(found[value.name], want, LOOSE.get(case.dtype, 1e-4))
        for profile in profiles:
            kernels = run(gpuir.lower(graph, profile=profile), values)
            for here, there in list(zip(found.values(), kernels.values(), strict=True))[:count]:
                compare_arrays(there, here, LOOSE.get(case.dtype, 1e-4))
    except Timeout:
        raise
    except Exception as error:
        return Outcome(case, "typed", calls, first_line(error))
    return Outcome(case, "valued", calls)


def sizes(program: torch.export.ExportedProgram, wanted: Sequence[torch.Tensor]) -> dict[str, int]:
    """The numbers of symbolic sizes that results have: those that depend on the data."""
    found: dict[str, int] = {}
    (results,) = next(n for n in program.graph.nodes if n.op == "output").args
    for node, want in zip(results[-len(wanted) :], wanted, strict=True):
        for symbol, size in zip(node.meta["val"].shape, want.shape, strict=True):
            if isinstance(symbol, torch.SymInt):
                found[str(symbol)] = size
    return found


def is_random(calls: Iterable[str]) -> bool:
    return any(call.partition(".")[0].rstrip("_") in RANDOM for call in calls)


def compare(found: Any, wanted: torch.Tensor, loose: float) -> None:
    """AssertionError where they differ in shape, dtype or numbers."""
    compare_arrays(found, numbers(wanted), loose)


def compare_arrays(found: Any, want: Any, loose: float) -> None:
    assert found.shape == want.shape, f"shape {found.shape}, expected {want.shape}"
    assert found.dtype == want.dtype, f"dtype {found.dtype}, expected {want.dtype}"
    wide = {"b": bool, "c": np.complex128}.get(want.dtype.kind, np.float64)
    np.testing.assert_allclose(
        found.astype(wide), want.astype(wide), rtol=loose, atol=loose / 10, equal_nan=True
    )


def first_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:160]


# ---------------------------------------------------------------------------- cases


def samples(names: Sequence[str], dtypes: Sequence[torch.dtype]) -> Iterator[list[Case]]:
    """For each of OpInfo's operators (or those named) and each dtype, all of its samples."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if (names and info.name not in names) or info.name.startswith(OUTSIDE):
            continue
        for dtype in dtypes:
            if dtype not in info.dtypes:
                continue
            try:
                torch.manual_seed(0)
                # not `sample_inputs`, which searches the stack for a test case at each sample
                made = list(info.sample_inputs_func(info, "cpu", dtype, requires_grad=False))
            except Exception:  # no samples of this dtype
                continue
            yield [
                Case(info.name, dtype, info.op, (s.input, *s.args), dict(s.kwargs)) for s in made
            ]


def direct(name: str, *args: Any, **kwargs: Any) -> Case:
    """A call of one overload, whatever OpInfo has."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return Case(packet, torch.float32, op, args, kwargs)


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def bag(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._embedding_bag(weight, indices, offsets)[0]


def layer_norm_and_back(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """The backward operator with the statistics of the forward one."""
    y, mean, scale = torch.ops.aten.native_layer_norm(x, (8,), weight, bias, 1e-5)
    back = torch.ops.aten.native_layer_norm_backward
    return back(y, x, (8,), mean, scale, weight, bias, (True, True, True))


def group_norm_and_back(x: torch.Tensor, weight: torch.Tensor) -> Any:
    y, mean, scale = torch.ops.aten.native_group_norm(x, weight, weight, 2, 4, 36, 2, 1e-5)
    back = torch.ops.aten.native_group_norm_backward
    return back(y, x, mean, scale, weight, 2, 4, 36, 2, (True, True, True))


def times_its_sum(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def directs() -> tuple[Case, ...]:
    """Core operators that OpInfo's programs do not call as they are exported."""
    x, grad, ids = some(2, 4, 6, 6), some(2, 4, 3, 3), torch.tensor([[1, 0], [2, 1]])
    rows, weight, bias = some(3, 8), some(8), some(8)
    two, none = (2, 2), (0, 0)
    _, at = torch.ops.aten.max_pool2d_with_indices(x, two, two)
    kernel = some(5, 4, 3, 3)
    conv = ((1, 1), (1, 1), (1, 1), False, none, 1)
    return (
        direct("_adaptive_avg_pool2d", x, (3, 4)),
        direct("_adaptive_avg_pool3d", some(2, 3, 4, 4, 4), (2, 3, 4)),
        direct("_adaptive_avg_pool2d_backward", grad, x),
        direct("_adaptive_avg_pool2d_backward", some(2, 4, 4, 5), x),
        direct("_cdist_forward", some(5, 4), some(3, 4), 2.0, None),
        direct("_pdist_forward", rows),
        Case(
            "_embedding_bag", torch.float32, bag, (some(5, 4), ids.reshape(4), ids[1].flip(0) - 1)
        ),
        direct("_log_softmax", rows, 1, False),
        direct("_softmax", rows, 1, False),
        direct("_native_batch_norm_legit.no_stats", x, None, None, True, 0.1, 1e-5),
        direct(
            "_native_batch_norm_legit_no_training",
            *(x, some(4), some(4), some(4), some(4).abs(), 0.1, 1e-5),
        ),
        direct("native_layer_norm", rows, (8,), weight, bias, 1e-5),
        Case(
            "native_layer_norm_backward", torch.float32, layer_norm_and_back, (rows, weight, bias)
        ),
        direct("native_group_norm", x, some(4), some(4), 2, 4, 36, 2, 1e-5),
        Case("native_group_norm_backward", torch.float32, group_norm_and_back, (x, some(4))),
        direct("native_dropout", rows, 0.5, True),
        direct("convolution", x, kernel, some(5), *conv),
        direct(
            "convolution_backward",
            *(some(2, 5, 6, 6), x, kernel, (5,), *conv, (True, True, True)),
        ),
        direct("avg_pool2d_backward", grad, x, two, two, none, False, True, None),
        direct("max_pool2d_with_indices", x, two, two),
        direct("max_pool3d_with_indices", some(1, 2, 4, 4, 4), (2, 2, 2)),
        direct("max_pool2d_with_indices_backward", grad, x, two, two, none, (1, 1), False, at),
        direct("embedding_dense_backward", some(2, 2, 4), ids, 5, -1, False),
        direct("embedding", some(5, 4), ids),
        direct("grid_sampler_2d", x, some(2, 3, 3, 2), 0, 0, False),
        direct("col2im", some(1, 16, 9), (6, 6), two, (1, 1), none, two),
        direct("_to_copy", rows, dtype=torch.float16),
        direct("_fft_r2c", rows, (1,), 0, True),
        direct("_fft_c2r", rows.to(torch.complex64), (1,), 0, 14),
        direct("_fft_c2c", rows.to(torch.complex64), (1,), 0, True),
        *(direct(f"reflection_pad{d}d", some(1, 2, *(4,) * d), (1, 2) * d) for d in (1, 2, 3)),
        *(direct(f"replication_pad{d}d", some(1, 2, *(4,) * d), (1, 2) * d) for d in (2, 3)),
        direct("upsample_nearest2d", x, (9, 8)),
        direct("upsample_bilinear2d", x, (9, 8), False),
        direct("empty_strided", (2, 3), (3, 1)),
        direct("scalar_tensor", 2.5),
        direct("alias", rows),
        direct("copy", rows, some(8)),
        direct("randperm", 7),
        direct("rand", (3, 4)),
        Case("_local_scalar_dense", torch.float32, times_its_sum, (rows,)),
    )


DIRECT = directs()


def chosen(cases: list[Case], count: int) -> list[Case]:
    """So many, far apart."""
    if not count or len(cases) <= count:
        return cases
    return [cases[i * len(cases) // count] for i in range(count)]


class Timeout(Exception):
    pass


def check_within(case: Case, core: bool = False, profiles: Sequence[str] = ()) -> Outcome:
    def stop(*_: Any) -> None:
        raise Timeout

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return check(case, core, profiles)
    except Timeout:
        return Outcome(case, "refused", note=f"took more than {SECONDS} s")
    except Exception as error:  # a bug of ours, and to be seen in the table
        return Outcome(case, "refused", note=f"{type(error).__name__}: {first_line(error)}")
    finally:
        signal.alarm(0)


# ---------------------------------------------------------------------------- the table


def core_operators() -> set[str]:
    """The names of core ATen's operators that compute."""
    found: set[str] = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or name.startswith("sym_"):
            continue
        if any(torch.Tag.core in getattr(packet, o).tags for o in packet.overloads()):
            found.add(name)
    return found


def how(call: str) -> str:
    name = call.partition(".")[0]
    return "converter" if call in CONVERTERS or name in CONVERTERS else "decomposed"


@dataclass
class Row:
    """What became of the cases of an operator, or of those that call one."""

    tried: int = 0
    typed: int = 0
    valued: int = 0
    how: set[str] = field(default_factory=set[str])
    dtypes: dict[str, None] = field(default_factory=dict[str, None])
    apart: dict[str, None] = field(default_factory=dict[str, None])  # dtypes that do not agree
    by: dict[str, None] = field(default_factory=dict[str, None])
    notes: Counter[str] = field(default_factory=Counter[str])

    def add(self, outcome: Outcome) -> None:
        self.tried += 1
        self.typed += outcome.stage in ("typed", "valued")
        self.valued += outcome.stage == "valued"
        dtype = str(outcome.case.dtype).removeprefix("torch.")
        self.dtypes[dtype] = None
        if outcome.stage != "valued":
            self.apart[dtype] = None
            self.notes[outcome.note] += 1


def rows(outcomes: Iterable[Outcome]) -> tuple[dict[str, Row], dict[str, Row]]:
    """By OpInfo's names, and by the ATen operators called."""
    named: dict[str, Row] = {}
    called: dict[str, Row] = {}
    for outcome in outcomes:
        if outcome.stage == "no program":
            continue
        named.setdefault(outcome.case.operator, Row()).add(outcome)
        for call in outcome.calls:
            row = called.setdefault(call.partition(".")[0], Row())
            row.add(outcome)
            row.how.add(how(call))
            row.by[outcome.case.operator] = None
    return named, called


HEAD = """# PyTorch operators: how they were checked

[PyTorch operators](../reference/torch-operators.md) lists the operators that gpuir reads.
This page says how that was checked, and where gpuir and torch differ.

`tools/operators.py` writes this page. It takes samples from torch's OpInfo database: {which}.
For each sample it does the following:

1. It exports a program that calls the operator.
2. It loads the program with gpuir, strictly. This compares the type of every result with torch's.
3. It computes the results with gpuir's interpreter and compares the numbers with torch's.
   For operators that give random numbers or uninitialised memory it compares only the types.

| | count |
|---|---:|
| samples | {samples} |
| samples whose types agree | {typed} |
| samples whose values agree | {valued} |
| operators of OpInfo | {named} |
| operators of which all samples agree | {whole} |
| operators of which some samples agree | {some} |
| core ATen operators | {core} |
| core ATen operators of which values agree | {good} |
| converters | {converters} |
"""


def why(notes: Counter[str]) -> str:
    """In a few words, why samples did not agree."""
    note = notes.most_common(1)[0][0].replace("|", "/")
    if "Not equal to tolerance" in note:
        cells = re.search(r"Mismatched elements: [^(]*\([\d.]+%\)", note)
        return f"values differ: {cells[0].lower()}" if cells else "values differ"
    if "a size depends on the data" in note:
        return "a size depends on the data; `--dims` gives it"
    return note.rpartition("numpy says: ")[2].partition(" found: ")[0][:110]


def table(outcomes: Sequence[Outcome], which: str) -> str:
    named, called = rows(outcomes)
    core = sorted(core_operators())
    good = [name for name in core if name in called and called[name].valued]
    whole = [name for name, row in named.items() if row.valued == row.tried]
    head = HEAD.format(
        which=which,
        samples=sum(row.tried for row in named.values()),
        typed=sum(row.typed for row in named.values()),
        valued=sum(row.valued for row in named.values()),
        named=len(named),
        whole=len(whole),
        some=sum(row.valued > 0 for row in named.values()) - len(whole),
        core=len(core),
        good=len(good),
        converters=len(CONVERTERS),
    )
    apart = {name: row for name, row in sorted(named.items()) if row.valued < row.tried}
    unread = [name for name, row in apart.items() if all("no converter" in n for n in row.notes)]
    lines = [
        head,
        "## Operators that differ",
        "",
        "| operator | samples | types agree | values agree | in dtype | the most common reason |",
        "|---|---:|---:|---:|---|---|",
    ]
    for name, row in apart.items():
        if name not in unread:
            counts = f"{row.tried} | {row.typed} | {row.valued}"
            lines.append(f"| {name} | {counts} | {', '.join(row.apart)} | {why(row.notes)} |")
    lines += [
        *("", "## Operators without a converter", ""),
        "gpuir has no converter for these, and torch does not decompose them.",
        "gpuir counts their bytes; `--strict` refuses them.",
        *("", ", ".join(unread) + "."),
        *("", "## Core ATen operators", ""),
        "A sample counts for every operator that its program calls. The column *how* says whether",
        "a converter of gpuir reads the operator, or torch decomposes it first.",
        "",
        "| operator | how | samples | types agree | values agree | dtypes | sampled by |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for name in core:
        row = called.get(name, Row())
        by = list(row.by)
        shown = ", ".join(by[:3]) + (f" and {len(by) - 3} more" if len(by) > 3 else "")
        ways = ", ".join(sorted(row.how)) or how(name)
        dtypes = ", ".join(row.dtypes)
        lines.append(
            f"| {name} | {ways} | {row.tried} | {row.typed} | {row.valued} | {dtypes} | {shown} |"
        )
    lines += ["", "## Operators of which all samples agree", "", ", ".join(sorted(whole)) + "."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtypes", default=",".join(USUAL))
    parser.add_argument("--samples", type=int, default=0, help="of an operator and dtype; 0: all")
    parser.add_argument("--core", action="store_true", help="in core ATen operators")
    parser.add_argument("--profiles", default="", help="whose kernels are compared too: eager,...")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dtypes = [DTYPES[name] for name in options.dtypes.split(",")]
    outcomes = [
        check_within(case, options.core, [*filter(None, options.profiles.split(","))])
        for cases in samples(options.names, dtypes)
        for case in chosen(cases, options.samples)
    ]
    outcomes += [check_within(case) for case in DIRECT if not options.names]
    for o in outcomes:
        if o.stage not in ("valued", "no program"):
            print(o.stage, o.case.operator, str(o.case.dtype)[6:], o.note)
    count = {0: "all samples", 1: "one sample"}.get(options.samples, f"{options.samples} samples")
    listed = ", ".join(options.dtypes.split(","))
    text = table(outcomes, f"{count} of each operator in each of the dtypes {listed}")
    if options.write:
        options.write.write_text(text)
    print(*(line for line in text.partition("## ")[0].splitlines() if "| " in line), sep="\n")
    _, called = rows(outcomes)
    return any(not called.get(name, Row()).valued for name in core_operators())


if __name__ == "__main__":
    sys.exit(main())
