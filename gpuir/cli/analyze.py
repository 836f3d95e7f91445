"""`gpuir analyze`: the cost report of a model on one GPU, or several compared."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import crossover, options
from gpuir.cli.lowering import Kernels
from gpuir.cli.modules import Loaded, load_modules
from gpuir.cli.output import emit, note, warn

if TYPE_CHECKING:
    from gpuir.backends.terminal import Layout
    from gpuir.ir.errors import GpuirError
    from gpuir.ir.graph import Graph
    from gpuir.passes.manager import Pass
    from gpuir.targets.target import Target

PIPED_WIDTH = 120


@click.command()
@options.model
@options.targets
@options.loading
@options.costing
@click.option(
    "--format",
    default="table",
    show_default=True,
    help="table, html, json, csv, roofline, trace, ir, schedule.",
)
@click.option(
    "--top", type=click.IntRange(0), default=15, show_default=True, help="Kernels listed."
)
@options.width
@click.option(
    "--group-by",
    type=click.Choice(["kernel", "module", "phase"]),
    default="kernel",
    show_default=True,
    help="What the table of totals adds up: kinds of kernels, modules, phases of training.",
)
@click.option("--memory", is_flag=True, help="List who holds memory at the peak.")
@click.option(
    "--crossover",
    metavar="DIM",
    help="In place of the report: from which size of this dimension on the host does not hold the "
    "device up.",
)
@options.output
@options.load_modules
@options.verbose
def command(**given: Any) -> None:
    """How long MODEL takes on a GPU, and why: a report of its kernels.

    MODEL is an ONNX file, a PyTorch program (.pt2, or my.module:build), a Hugging Face config
    (hf:config.json), or IR text (.gir) of any level. Weights are not read.

    \b
    gpuir analyze model.onnx --target a100 --dims batch=8
    gpuir analyze model.onnx --target a100,h100-sxm,l4
    gpuir analyze model.pt2 --target a100 --profile eager,compiled,cudagraph
    gpuir analyze hf:config.json --target a100 --dims batch=8,seq=512 --train --optimizer adamw
    gpuir analyze model.onnx --target a100 --dims seq=128 --crossover batch
    gpuir analyze model.onnx --target a100 --format schedule -o model.sched
    gpuir analyze model.onnx --target a100 --schedule model.sched
    """
    import gpuir
    from gpuir.backends.table import find_backend
    from gpuir.ir.errors import PluginError
    from gpuir.plugins import blamed

    loaded = load_modules(given["modules"])
    if given["crossover"]:
        emit(crossover.text_of(given, loaded), given["output"])
        return
    backend = find_backend(given["format"], loaded.backends)
    warnings: list[str] = []
    graphs = analyze(given, loaded, warnings)
    size = batch(given["dims"])
    shape = replace(
        layout(given["width"], given["output"]),
        top=given["top"],
        memory=given["memory"],
        group=given["group_by"],
        file=given["output"] or "",
    )
    summaries = [gpuir.summary(g, warnings=warnings, batch=size) for g in graphs]
    with blamed(backend, f"the format {given['format']!r}"):
        text = backend(summaries, shape)
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(f"the format {given['format']!r} gives no text", found=repr(text))
    if given["format"] != "table" or given["output"]:
        for warning in warnings:
            warn(warning)
    emit(text, given["output"])


def analyze(
    given: dict[str, Any], loaded: Loaded, warnings: list[str], model: Graph | None = None
) -> list[Graph]:
    """The costed graph for each target and profile; the model is loaded once, unless it is given,
    and lowered once for each profile."""
    import gpuir
    from gpuir.cost.table import find_predictor
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level
    from gpuir.targets.support import reason, refusal

    targets = [
        options.with_settings(loaded.target(name), given) for name in split_targets(given["target"])
    ]
    for name in targets:  # what is misspelt is said before the work is done
        gpuir.load_target(name)
    profiles = list(dict.fromkeys(map(loaded.profile, split_names(given["profile"]))))
    for name in profiles:
        gpuir.load_profile(name)
    if given["settings"] and not targets:
        raise UsageError("--set changes a target, and none is given", fix="--target NAME")
    predictor = given["predictor"]
    own = find_predictor(predictor, loaded.predictors)
    if predictor.partition("@")[0] in loaded.predictors:
        predictor = own
    progress = Progress(given["verbose"])

    def read(profile: str | None) -> Graph:
        how = options.load_options(given, loaded)
        say = unsaid(warnings)
        g = model or gpuir.load(
            given["model"], warn=say, profile=profile, tf32=given["tf32"], **how
        )
        progress.loaded(g)
        if given["strict"]:
            refuse_opaque(g)
        return g

    passes = options.pipeline_of(given, loaded)
    kernels_of = Kernels(read, given["tf32"], passes, loaded, progress.made)
    lowered = [kernels_of.under(name) for name in profiles or [None]]
    costed: list[Graph] = []
    refused: list[GpuirError] = []
    for name in targets or [None]:
        for kernels in lowered:
            on = gpuir.load_target(name or str(kernels.target)) if name or kernels.target else None
            error = refusal(kernels, on) if on and kernels.level < Level.costed else None
            if error is not None and on is not None:
                refused.append(error)
                warnings.append(f"not supported: {kernels.profile} on {on.name}: {reason(error)}")
                continue
            costed.append(
                gpuir.analyze(
                    kernels,
                    name,
                    predictor=predictor,
                    schedule=given["schedule"],
                    tf32=given["tf32"],
                    watch=progress.made,
                )
            )
    if refused and not costed:
        raise refused[0]
    return costed


def unsaid(said: list[str]) -> Callable[[str], None]:
    """Keeps a text that was not said before."""

    def say(text: str) -> None:
        if text not in said:
            said.append(text)

    return say


def split_targets(text: str | None) -> list[str]:
    """`a100+sms=60,l4` → `a100+sms=60`, `l4`; `all` is every one there is."""
    if text == "all":
        from gpuir.cli.targets import everything

        return list(everything())
    return split_names(text)


def targets_of(given: dict[str, Any], loaded: Loaded) -> list[Target]:
    """The targets, each once."""
    import gpuir
    from gpuir.ir.errors import UsageError

    names = [loaded.target(name) for name in split_targets(given["target"])]
    if not names:
        raise UsageError("no target given", fix="--target a100; `gpuir targets` lists them")
    found = [gpuir.load_target(options.with_settings(name, given)) for name in names]
    return list({target.name: target for target in found}.values())


def split_names(text: str | None) -> list[str]:
    """`a, b` → `a`, `b`."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def batch(dims: tuple[tuple[tuple[str, int], ...], ...]) -> int | None:
    """The extent of the one dimension that is called a batch."""
    merged = dict(pair for pairs in dims for pair in pairs)
    found = [n for name, n in merged.items() if re.search("batch", name, re.IGNORECASE)]
    return found[0] if len(found) == 1 else None


def refuse_opaque(g: Graph) -> None:
    """ModelError when a graph, perhaps from IR text, holds an op that nobody knows."""
    from gpuir.ir.errors import ModelError
    from gpuir.ops.tensor import Opaque

    for node in g.walk():
        inside = [node.op, *(n.op for r in node.op.regions for n in r.nodes)]
        for op in inside:
            if isinstance(op, Opaque):
                raise ModelError(
                    f"{op.kind} is not modelled, and --strict refuses it",
                    where=" + ".join(node.locs),
                    fix="leave --strict out: its operands and results are then counted, its "
                    "arithmetic is not",
                )


def layout(width: int | None, output: str | None = None) -> Layout:
    """The terminal's width and colour; in a pipe or a file, a fixed width and none."""
    from gpuir.backends.terminal import Layout

    terminal = bool(sys.stdout) and sys.stdout.isatty() and not output
    if width is None:
        width = shutil.get_terminal_size((PIPED_WIDTH, 0)).columns
        width = max(width, 40) if terminal or "COLUMNS" in os.environ else PIPED_WIDTH
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Layout(width, color)


class Progress:
    """Says on stderr what each step made and how long it took, if asked to."""

    def __init__(self, wanted: bool):
        self.wanted, self.since, self.nodes = wanted, perf_counter(), 0

    def loaded(self, g: Graph) -> None:
        self._say("load", g, "")

    def made(self, p: Pass, g: Graph) -> None:
        self._say(str(p), g, f"{self.nodes:,} nodes to ")

    def _say(self, step: str, g: Graph, before: str) -> None:
        now, self.nodes = perf_counter(), sum(1 for _ in g.walk()) if self.wanted else 0
        if self.wanted:
            note(f"{now - self.since:8.3f} s  {step}: {before}{self.nodes:,}")
        self.since = now
