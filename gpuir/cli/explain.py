"""`gpuir explain`: every quantity that leads to one kernel's time, or what fusing saves."""

from __future__ import annotations

from typing import Any

import click

from gpuir.cli import options
from gpuir.cli.analyze import analyze, layout
from gpuir.cli.modules import Loaded, load_modules
from gpuir.cli.output import emit, warn


@click.command()
@options.model
@click.argument("node", required=False)
@click.option("--target", help="A GPU, like a100. `gpuir targets` lists them.")
@click.option("--fusions", is_flag=True, help="What each fusion saves, in bytes and time.")
@click.option(
    "--top", type=click.IntRange(0), default=15, show_default=True, help="Fusions listed."
)
@click.option("--format", type=click.Choice(["table", "json"]), default="table", help="[table]")
@options.loading
@options.costing
@click.option("--width", type=click.IntRange(40), help="Columns of the text.  [the terminal's]")
@options.output
@options.load_modules
@options.verbose
def command(node: str | None, **given: Any) -> None:
    """Why NODE takes the time it does: each quantity, its formula with numbers, its source.

    NODE is a kernel's result, as `analyze --format ir` names it, or a node of the model: its name,
    or the end of it. With --fusions, what each launch that stands for several saves.

    \b
    gpuir explain model.onnx MatMul_3 --target a100
    gpuir explain model.onnx --target a100 --fusions
    """
    from gpuir.ir.errors import UsageError

    loaded = load_modules(given["modules"])
    warnings: list[str] = []
    if given["fusions"] and node is not None:
        raise UsageError("--fusions is of the whole model", found=node, fix="leave NODE out")
    if not given["fusions"] and (node is None or given["format"] != "table"):
        raise UsageError(
            "explain takes a node" if node is None else "a node is explained as a table",
            fix="name a kernel's result or a model node, or say --fusions",
        )
    text = fusions(given, loaded, warnings) if node is None else one(node, given, loaded, warnings)
    for warning in warnings:
        warn(warning)
    emit(text, given["output"])


def one(node: str, given: dict[str, Any], loaded: Loaded, warnings: list[str]) -> str:
    """All about one kernel."""
    import gpuir
    from gpuir.backends.explanation import explanation
    from gpuir.backends.report import find_kernel
    from gpuir.ir.errors import UsageError

    graphs = analyze(given, loaded, warnings)
    if len(graphs) > 1:
        raise UsageError("explain takes one target and one profile", found=f"{len(graphs)} of them")
    g = graphs[0]
    lines = gpuir.explain(g, node)
    shape = layout(given["width"], given["output"])
    return explanation(gpuir.summary(g), find_kernel(g, node), lines, shape)


def fusions(given: dict[str, Any], loaded: Loaded, warnings: list[str]) -> str:
    """The model fused as the profile does, beside itself with each node's own launches."""
    from dataclasses import replace

    import gpuir
    from gpuir.backends.fusions import fusions_json, fusions_text
    from gpuir.ir.errors import UsageError
    from gpuir.ir.graph import Level

    model = gpuir.load(given["model"], warn=warnings.append, **options.load_options(given))
    if model.level > Level.graph:
        raise UsageError(
            f"@{model.name} is {model.level.name}: what it fused is no longer told",
            fix="start from a graph of level graph, or a model",
        )
    graphs = analyze(given, loaded, warnings, model)
    if len(graphs) > 1:
        raise UsageError("--fusions takes one target and one profile", found=f"{len(graphs)}")
    apart = {"pipeline": gpuir.load_profile("eager").passes, "profile": graphs[0].profile}
    unfused = analyze({**given, **apart, "schedule": ""}, loaded, warnings, model)
    both = gpuir.summary(graphs[0]), gpuir.summary(unfused[0])
    if given["format"] == "json":
        return fusions_json(*both)
    shape = replace(layout(given["width"], given["output"]), top=given["top"])
    return fusions_text(*both, shape)
