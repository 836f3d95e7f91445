"""`gpuir opt`: passes on a model, IR text out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit, note, warn

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.passes.manager import Pass, Pipeline


@click.command()
@options.model
@click.option(
    "--pipeline", "text", default="", help='Like "canonicalize,fuse{max_ops=8},legalize".'
)
@click.option("--print-after", multiple=True, metavar="PASS", help="Also show this, or all.")
@click.option("--verify-each/--no-verify-each", default=True, help="Check every result.  [verify]")
@options.loading
@options.profile
@options.tf32
@options.output
@options.load_modules
@options.verbose
def command(text: str, print_after: tuple[str, ...], verify_each: bool, **given: Any) -> None:
    """Run passes on MODEL and print the resulting graph.

    MODEL is anything that `gpuir analyze` reads, or `-` for IR text from stdin. Without --pipeline
    gpuir checks the graph and prints it unchanged. What passes make says for which profile.

    \b
    gpuir opt model.onnx --pipeline canonicalize,fuse,legalize
    gpuir opt model.gir --pipeline "fuse{max_ops=4},legalize" --print-after all -o out.gir
    """
    import gpuir
    from gpuir.passes.math import run_under

    loaded = load_modules(given["modules"])
    pipeline = options.pipeline_of({"pipeline": text}, loaded)
    profile = loaded.profile(given["profile"]) if given["profile"] else None
    stack: Any = {"profile": profile, "tf32": given["tf32"]}
    check_names(print_after, pipeline)
    g = gpuir.load(given["model"], warn=warn, **stack, **options.load_options(given, loaded))

    def watch(p: Pass, g: Graph) -> None:
        if p.name in print_after or "all" in print_after:
            note(f"# after {p}\n{gpuir.show(g)}")

    if pipeline is not None or any(x is not None for x in stack.values()):
        g = run_under(g, **stack)
    if pipeline is not None:
        g = pipeline.run(g, verify_each, watch)
    emit(gpuir.show(g), given["output"])


def check_names(print_after: tuple[str, ...], pipeline: Pipeline | None) -> None:
    """UsageError when a pass to print after does not run."""
    from gpuir.ir.errors import UsageError, nearest

    names = [p.name for p in pipeline.passes] if pipeline else []
    for name in print_after:
        if name not in (*names, "all"):
            raise UsageError(
                f"--print-after {name}: the pipeline has no such pass",
                expected=", ".join((*names, "all")),
                fix=nearest(name, [*names, "all"]),
            )
