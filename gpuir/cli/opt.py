"""`gpuir opt`: passes on a model, IR text out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuir.cli import options
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, note, warn
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.passes.manager import Pass, Pipeline


@dataclass(frozen=True)
class Opt:
    model: str = ask(options.model)
    text: str = option(
        'Like "canonicalize,fuse{max_ops=8},legalize".',
        "--pipeline",
        default="",
        show_default=False,
    )
    print_after: tuple[str, ...] = option("Also show this, or all.", multiple=True, metavar="PASS")
    verify_each: bool = option(
        "Check every result.  [verify]", "--verify-each/--no-verify-each", default=True
    )
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(
        options.Costing, without="settings predictor schedule pipeline cluster"
    )
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)
    verbose: bool = ask(options.verbose)


@request(Opt)
def command(asked: Opt) -> None:
    """Run passes on MODEL and print the resulting graph.

    MODEL is anything that `gpuir analyze` reads, or `-` for IR text from stdin. Without --pipeline
    gpuir checks the graph and prints it unchanged. What passes make says for which profile.

    \b
    gpuir opt model.onnx --pipeline canonicalize,fuse,legalize
    gpuir opt model.gir --pipeline "fuse{max_ops=4},legalize" --print-after all -o out.gir
    """
    import gpuir
    from gpuir.passes.math import run_under

    pipeline = options.pipeline_of(asked.text, asked.loaded)
    stack, after = asked.costing.stack(asked.loaded), asked.print_after
    check_names(after, pipeline)
    g = asked.loading.load(asked.model, asked.loaded, warn, **stack)

    def watch(p: Pass, g: Graph) -> None:
        if p.name in after or "all" in after:
            note(f"# after {p}\n{gpuir.show(g)}")

    if pipeline is not None or any(x is not None for x in stack.values()):
        g = run_under(g, **stack)
    if pipeline is not None:
        g = pipeline.run(g, asked.verify_each, watch)
    emit(gpuir.show(g), asked.output)


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
