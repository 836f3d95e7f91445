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
@options.output
@options.load_modules
@options.verbose
def command(text: str, print_after: tuple[str, ...], verify_each: bool, **given: Any) -> None:
    """Run passes on MODEL and print the graph they make.

    MODEL is whatever `gpuir analyze` takes, or - for IR text on stdin. Without a pipeline the graph
    comes out as it was read, checked.

    \b
    gpuir opt model.onnx --pipeline canonicalize,fuse,legalize
    gpuir opt model.gir --pipeline "fuse{max_ops=4},legalize" --print-after all -o out.gir
    """
    import gpuir
    from gpuir.cli.analyze import Progress

    loaded = load_modules(given["modules"])
    pipeline = None
    if text.strip():
        pipeline = gpuir.pipeline(text, loaded.passes, loaded.predictors, loaded.targets)
    check_names(print_after, pipeline)
    progress = Progress(given["verbose"])
    g = gpuir.load(given["model"], warn=warn, **options.load_options(given))
    progress.loaded(g)

    def watch(p: Pass, g: Graph) -> None:
        progress.made(p, g)
        if p.name in print_after or "all" in print_after:
            note(f"# after {p}\n{gpuir.show(g)}")

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
