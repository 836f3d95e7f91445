"""`gpuir analyze`: the cost report of a model on one GPU, or several compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import click

from gpuir.backends.table import listed
from gpuir.cli import crossover, options
from gpuir.cli.lowering import analyze
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, layout, show, warn
from gpuir.cli.request import ask, held, option, request
from gpuir.run.terms import MOST_STEPS, RunTerm, terms


@dataclass(frozen=True)
class Analyze(options.Runs):
    model: str = ask(options.model)
    target: str | None = ask(options.targets)
    sizes: options.Pairs[tuple[int, ...]] = option(
        "Symbolic dimensions: batch=8,seq=128. Of several sizes, batch=1,2,4..256, a table.",
        "--dims",
        type=options.SIZES,
        multiple=True,
    )
    loading: options.LoadingOptions = held(options.LoadingOptions, without="dims")
    costing: options.Costing = held(options.Costing)
    format: str = option(f"{listed()}.", default="text", callback=options.renamed)
    top: int = option("Kernels listed.", type=click.IntRange(0), default=15)
    width: int | None = ask(options.width)
    group_by: str = option(
        "What the table of totals adds up: kinds of kernels, modules, phases of training.",
        type=click.Choice(["kernel", "module", "phase"]),
        default="kernel",
    )
    memory: bool = option("List who holds memory at the peak.")
    generate: int | None = option(
        "The whole generation of N tokens by a config's model: the prompt, of --dims seq=... "
        "tokens, and a step for each token after the first.",
        type=click.IntRange(1, MOST_STEPS),
        metavar="N",
    )
    crossover: str | None = option(
        "In place of the report: from which size of this dimension on the host does not hold "
        "the device up.",
        metavar="DIM",
    )
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)
    verbose: bool = ask(options.verbose)

    @property
    def axes(self) -> dict[str, tuple[int, ...]]:
        """Dimensions of which several sizes are asked for."""
        return {name: n for name, n in options.merged(self.sizes).items() if len(n) > 1}

    @property
    def run(self) -> options.ModelRun:
        """With the sizes that do not change."""
        one = {name: n[0] for name, n in options.merged(self.sizes).items() if len(n) == 1}
        past = one.pop("past", None) if self.loading.phase else None
        loading = replace(self.loading.sized(*one.items()), past=past or self.loading.past)
        return replace(super().run, loading=loading)


@request(Analyze)
def command(asked: Analyze) -> None:
    """Predict how long MODEL takes on a GPU, and show why.

    MODEL is an ONNX file, a PyTorch program (model.pt2, or my.module:build), a Hugging Face config
    (hf:config.json), or gpuir's IR as text (.gir). gpuir does not read weights. Several models
    that run one after another are one run: each as often as it says, with sizes and options of its
    own behind colons.

    The exit status is 1 if the model fits none of the targets.

    \b
    gpuir analyze model.onnx --target a100 --dims batch=8
    gpuir analyze model.onnx --target a100 --dims batch=1..256
    gpuir analyze model.onnx --target a100,h100-sxm,l4
    gpuir analyze model.pt2 --target a100 --profile eager,compiled,cudagraph
    gpuir analyze hf:config.json --target a100 --dims batch=8,seq=512 --train --optimizer adamw
    gpuir analyze model.onnx --target a100 --dims seq=128 --crossover batch
    gpuir analyze '50*unet.onnx:batch=2 + vae.onnx:batch=1' --target a100
    gpuir analyze hf:config.json --target a100 --dims batch=16,seq=1024 --generate 128
    gpuir analyze model.onnx --target a100 --format schedule -o model.sched
    gpuir analyze model.onnx --target a100 --schedule model.sched
    """
    from gpuir.backends.table import find_backend
    from gpuir.cli.fitting import with_fixes
    from gpuir.files import Folder
    from gpuir.ir.errors import PluginError
    from gpuir.plugins import blamed

    if several := terms(asked.model, asked.generate):
        show_runs(asked, several)
        return
    if asked.crossover:
        found = crossover.report(asked.run, asked.crossover, asked.format)
        show(found, asked.format, asked.width, asked.output)
        return
    if asked.axes:
        tabulate(asked)
        return
    backend = find_backend(asked.format, asked.loaded.backends)
    warnings: list[str] = []
    answers = analyze(asked.run, warnings)
    shape = replace(
        layout(asked.width, asked.output),
        top=asked.top,
        memory=asked.memory,
        group=asked.group_by,
        file=asked.output or "",
    )
    answers = with_fixes(asked.run, answers)
    with blamed(backend, f"the format {asked.format!r}"):
        text = backend(answers, shape)
    if not isinstance(text, str | bytes | Folder):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(f"the format {asked.format!r} returns no text", found=repr(text))
    if asked.format != "text" or asked.output:
        for warning in warnings:
            warn(warning)
    emit(text, asked.output)
    if all(s.fits is False for s in answers):
        raise click.exceptions.Exit(1)


def show_runs(asked: Analyze, several: Sequence[RunTerm]) -> None:
    """A run of several models."""
    from gpuir.backends.runs import runs_report
    from gpuir.backends.table import FORMATS
    from gpuir.cli.runs import answers
    from gpuir.ir.errors import UsageError

    if asked.format not in FORMATS:
        raise UsageError(
            f"of several models there is no format {asked.format}", expected=", ".join(FORMATS)
        )
    one = {
        "--crossover": asked.crossover,
        "--memory": asked.memory,
        "--group-by": asked.group_by != "kernel",
    }
    for name in (name for name, given in one.items() if given):
        raise UsageError(f"{name} is for one model", fix="analyze one of the parts")
    if asked.axes:
        tabulate(asked, several)
        return
    warnings: list[str] = []
    found = answers(asked.run, several, warnings)
    for text in warnings:
        warn(text)
    show(runs_report(found), asked.format, asked.width, asked.output)
    if not any(s.fits for s in found):
        raise click.exceptions.Exit(1)


def tabulate(asked: Analyze, several: Sequence[RunTerm] = ()) -> None:
    """A table of all sizes in place of the report of one."""
    from gpuir.backends.sweep import sizes_report
    from gpuir.backends.table import FORMATS
    from gpuir.cli.sweep import run, run_several
    from gpuir.ir.errors import UsageError

    if asked.format not in FORMATS:
        raise UsageError(
            f"of several sizes there is no format {asked.format}", expected=", ".join(FORMATS)
        )
    for name in ("schedule", "cluster"):
        if getattr(asked.costing, name):
            raise UsageError(f"--{name} is for one size", fix="give each dimension one size")
    axes = asked.axes
    found = run_several(asked.run, several, axes) if several else run(asked.run, axes)
    show(sizes_report(found), asked.format, asked.width, asked.output)
    if not any(p.fits for p in found.points):
        raise click.exceptions.Exit(1)
