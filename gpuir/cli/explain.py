"""`gpuir explain`: every quantity that leads to one kernel's time, or what fusing saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.lowering import analyze
from gpuir.cli.modules import Loaded, load_modules
from gpuir.cli.output import emit, layout, show, warn

if TYPE_CHECKING:
    from gpuir.backends.terminal import Layout
    from gpuir.report.table import Report


@click.command()
@options.model
@click.argument("node", required=False)
@options.target("A GPU, like a100. `gpuir targets` lists them.")
@click.option("--fusions", is_flag=True, help="What each fusion saves, in bytes and time.")
@click.option("--top", type=click.IntRange(0), help="Kernels or fusions listed.  [15]")
@options.formats()
@options.loading
@options.costing
@click.option("--width", type=click.IntRange(40), help="Columns of the text.  [the terminal's]")
@options.output
@options.load_modules
@options.verbose
def command(node: str | None, **given: Any) -> None:
    """Show every term of one kernel's predicted time.

    NODE is a kernel's result, as `gpuir analyze --format ir` names it, or a node of the model: its
    name, or the last part of it. For a node that runs as several kernels, or for a loop, gpuir
    lists them. With --fusions: what each fused launch saves.

    \b
    gpuir explain model.onnx MatMul_3 --target a100
    gpuir explain model.onnx --target a100 --fusions
    """
    from gpuir.ir.errors import UsageError

    loaded = load_modules(given["modules"])
    warnings: list[str] = []
    if given["fusions"] and node is not None:
        raise UsageError("--fusions is about the whole model", found=node, fix="leave NODE out")
    if not given["fusions"] and node is None:
        raise UsageError(
            "no node given", fix="name a kernel's result or a node of the model, or add --fusions"
        )
    if not given["fusions"] and given["format"] != "text":
        raise UsageError(
            f"--format {given['format']} works only with --fusions",
            fix="leave --format out; gpuir analyze --format json has the terms of every kernel",
        )
    found = fusions(given, loaded, warnings) if node is None else one(node, given, loaded, warnings)
    for warning in warnings:
        warn(warning)
    if isinstance(found, str):
        emit(found, given["output"])
    else:
        show(found, given)


def one(node: str, given: dict[str, Any], loaded: Loaded, warnings: list[str]) -> str:
    """All about one kernel, or what each kernel of a node or loop takes."""
    import gpuir
    from gpuir.backends.explanation import explanation, several
    from gpuir.ir.errors import UsageError
    from gpuir.report.find import find_kernels

    answers = analyze(given, loaded, warnings)
    if len(answers) > 1:
        raise UsageError(
            "explain takes one target and one profile", found=f"{len(answers)} of them"
        )
    (a,) = answers
    found, shape = find_kernels(a.graph, node), listing(given)
    if len(found) > 1:
        return several(a, node, found, shape)
    (kernel,) = found
    if given["top"] is not None and not kernel.node.op.control:
        raise UsageError(f"--top is of a list, and {node} is one kernel", fix="leave --top out")
    return explanation(a, kernel, gpuir.explain(a.graph, node), shape)


def listing(given: dict[str, Any]) -> Layout:
    """The layout, with as many rows as `--top` says."""
    from dataclasses import replace

    shape = layout(given["width"], given["output"])
    return shape if given["top"] is None else replace(shape, top=given["top"])


MERGES = ("basic", "nbits", "recognize", "sink", "split")  # of a stack's passes, besides fuse


def op_by_op(passes: str) -> str:
    """A stack's passes without those that make one launch of several nodes."""
    import gpuir

    kept = (p for p in gpuir.pipeline(passes).passes if p.name not in MERGES)
    return ",".join("fuse{rules=none}" if p.name == "fuse" else str(p) for p in kept)


def fusions(given: dict[str, Any], loaded: Loaded, warnings: list[str]) -> Report:
    """The model fused as the profile does, beside itself with each node's own launches."""
    import gpuir
    from gpuir.backends.fusions import fusions_report
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level
    from gpuir.targets.profile import default_profile

    profile = loaded.profile(given["profile"]) if given["profile"] else None
    how = options.load_options(given, loaded)
    model = gpuir.load(
        given["model"], warn=warnings.append, profile=profile, tf32=given["tf32"], **how
    )
    if model.level > Level.graph:
        raise UsageError(
            f"@{model.name} is {model.level.name}: what it fused is no longer told",
            fix="start from a graph of level graph, or a model",
        )
    answers = analyze(given, loaded, warnings, model)
    if len(answers) > 1:
        raise UsageError("--fusions takes one target and one profile", found=f"{len(answers)}")
    stack = gpuir.load_profile(default_profile(model))
    apart = {"pipeline": op_by_op(stack.passes), "profile": answers[0].graph.profile}
    unfused = analyze({**given, **apart, "schedule": ""}, loaded, warnings, model)
    top = 15 if given["top"] is None else given["top"]
    return fusions_report(answers[0], unfused[0], top)
