"""`gpuir explain`: every quantity that leads to one kernel's time, or what fusing saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.lowering import analyze
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, layout, show, warn
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.backends.terminal import Terminal
    from gpuir.report.table import Report


@dataclass(frozen=True)
class Explain(options.Runs):
    model: str = ask(options.model)
    node: str | None = ask(click.argument("node", required=False))
    target: str | None = ask(options.target("A GPU, like a100. `gpuir targets` lists them."))
    fusions: bool = option("What each fusion saves, in bytes and time.")
    top: int | None = option("Kernels or fusions listed.  [15]", type=click.IntRange(0))
    format: str = ask(options.formats())
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing)
    width: int | None = option("Columns of the text.  [the terminal's]", type=click.IntRange(40))
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)
    verbose: bool = ask(options.verbose)


@request(Explain)
def command(asked: Explain) -> None:
    """Show every term of one kernel's predicted time.

    NODE is a kernel's result, as `gpuir analyze --format ir` names it, or a node of the model: its
    name, or the last part of it. For a node that runs as several kernels, or for a loop, gpuir
    lists them. With --fusions: what each fused launch saves.

    \b
    gpuir explain model.onnx MatMul_3 --target a100
    gpuir explain model.onnx --target a100 --fusions
    """
    from gpuir.ir.errors import UsageError

    warnings: list[str] = []
    node = asked.node
    if asked.fusions and node is not None:
        raise UsageError("--fusions is about the whole model", found=node, fix="leave NODE out")
    if not asked.fusions and node is None:
        raise UsageError(
            "no node given", fix="name a kernel's result or a node of the model, or add --fusions"
        )
    if not asked.fusions and asked.format != "text":
        raise UsageError(
            f"--format {asked.format} works only with --fusions",
            fix="leave --format out; gpuir analyze --format json has the terms of every kernel",
        )
    found = fusions(asked, warnings) if node is None else one(node, asked, warnings)
    for warning in warnings:
        warn(warning)
    if isinstance(found, str):
        emit(found, asked.output)
    else:
        show(found, asked.format, asked.width, asked.output)


def one(node: str, asked: Explain, warnings: list[str]) -> str:
    """All about one kernel, or what each kernel of a node or loop takes."""
    import gpuir
    from gpuir.backends.explanation import explanation, several
    from gpuir.ir.errors import UsageError
    from gpuir.report.find import find_kernels

    answers = analyze(asked.run, warnings)
    if len(answers) > 1:
        raise UsageError(
            "explain takes one target and one profile", found=f"{len(answers)} of them"
        )
    (a,) = answers
    found, shape = find_kernels(a.graph, node), listing(asked)
    if len(found) > 1:
        return several(a, node, found, shape)
    (kernel,) = found
    if asked.top is not None and not kernel.node.op.control:
        raise UsageError(f"--top is of a list, and {node} is one kernel", fix="leave --top out")
    return explanation(a, kernel, gpuir.explain(a.graph, node), shape)


def listing(asked: Explain) -> Terminal:
    """The layout, with as many rows as `--top` says."""
    shape = layout(asked.width, asked.output)
    return shape if asked.top is None else replace(shape, top=asked.top)


MERGES = ("basic", "nbits", "recognize", "sink", "split")  # of a stack's passes, besides fuse


def op_by_op(passes: str) -> str:
    """A stack's passes without those that make one launch of several nodes."""
    import gpuir

    kept = (p for p in gpuir.pipeline(passes).passes if p.name not in MERGES)
    return ",".join("fuse{rules=none}" if p.name == "fuse" else str(p) for p in kept)


def fusions(asked: Explain, warnings: list[str]) -> Report:
    """The model fused as the profile does, beside itself with each node's own launches."""
    import gpuir
    from gpuir.backends.fusions import fusions_report
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level
    from gpuir.targets.profile import default_profile

    stack = asked.costing.stack(asked.loaded)
    model = asked.loading.load(asked.model, asked.loaded, warnings.append, **stack)
    if model.level > Level.graph:
        raise UsageError(
            f"@{model.name} is {model.level.name}: what it fused is no longer told",
            fix="start from a graph of level graph, or a model",
        )
    answers = analyze(asked.run, warnings, model)
    if len(answers) > 1:
        raise UsageError("--fusions takes one target and one profile", found=f"{len(answers)}")
    usual = gpuir.load_profile(default_profile(model))
    passes, profile = op_by_op(usual.passes), answers[0].graph.profile
    apart = replace(asked.costing, pipeline=passes, profile=profile, schedule="")
    unfused = analyze(replace(asked.run, costing=apart), warnings, model)
    return fusions_report(answers[0], unfused[0], 15 if asked.top is None else asked.top)
