"""How long a model takes on a GPU you don't have, why, and what to change.

    g = gpuir.analyze("model.onnx", "a100", dims={"batch": 8})
    print(g.latency_s)

Every name here is imported when it is first used: `import gpuir` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuir.cost.collective import collective
    from gpuir.cost.nest import Tiles
    from gpuir.ir.errors import GpuirError
    from gpuir.ir.graph import Graph
    from gpuir.ir.notes import Cost, Schedule, Tile
    from gpuir.passes.manager import Pass, Pipeline
    from gpuir.plan.space.points import PointTimes
    from gpuir.report.answer import Answer
    from gpuir.run.analysis import explain, lower
    from gpuir.run.loading import LoadOptions, load, load_text
    from gpuir.run.program import ModelProgram, program
    from gpuir.run.ranks import simulate_ranks
    from gpuir.run.runs import analyze
    from gpuir.schedule import apply, extract, strip
    from gpuir.simulate.memory import Memory, memory
    from gpuir.simulate.parallel import Parallel
    from gpuir.simulate.step import Step
    from gpuir.simulate.timeline import Timeline, timeline
    from gpuir.stacks.table import pipeline
    from gpuir.targets.cluster import Cluster, cluster_names, load_cluster
    from gpuir.targets.host import HostMachine, host_names, load_host
    from gpuir.targets.load import load_target, target_names
    from gpuir.targets.profile import Profile, load_profile, profile_names
    from gpuir.targets.target import Target
    from gpuir.text import parse, parse_schedule, show
    from gpuir.tune.kernels import Kernel, kernel
    from gpuir.tune.observe import Observed
    from gpuir.tune.search import search
    from gpuir.tune.space import Predictions, candidates, heuristics, predict

__all__ = [
    "Answer",
    "Cluster",
    "Cost",
    "GpuirError",
    "Graph",
    "HostMachine",
    "Kernel",
    "LoadOptions",
    "Memory",
    "ModelProgram",
    "Observed",
    "Parallel",
    "Pass",
    "Pipeline",
    "PointTimes",
    "Predictions",
    "Profile",
    "Schedule",
    "Step",
    "Target",
    "Tile",
    "Tiles",
    "Timeline",
    "analyze",
    "apply",
    "candidates",
    "cluster_names",
    "collective",
    "explain",
    "extract",
    "heuristics",
    "host_names",
    "kernel",
    "load",
    "load_cluster",
    "load_host",
    "load_profile",
    "load_target",
    "load_text",
    "lower",
    "memory",
    "parse",
    "parse_schedule",
    "pipeline",
    "predict",
    "profile_names",
    "program",
    "search",
    "show",
    "simulate_ranks",
    "strip",
    "target_names",
    "timeline",
]

_HOMES = {
    "gpuir.run.analysis": ("explain", "lower"),
    "gpuir.plan.space.points": ("PointTimes",),
    "gpuir.run.program": ("ModelProgram", "program"),
    "gpuir.run.ranks": ("simulate_ranks",),
    "gpuir.run.runs": ("analyze",),
    "gpuir.run.loading": ("LoadOptions", "load", "load_text"),
    "gpuir.report.answer": ("Answer",),
    "gpuir.ir.errors": ("GpuirError",),
    "gpuir.ir.graph": ("Graph",),
    "gpuir.ir.notes": ("Cost", "Schedule", "Tile"),
    "gpuir.passes.manager": ("Pass", "Pipeline"),
    "gpuir.stacks.table": ("pipeline",),
    "gpuir.schedule": ("apply", "extract", "strip"),
    "gpuir.simulate.memory": ("Memory", "memory"),
    "gpuir.simulate.parallel": ("Parallel",),
    "gpuir.simulate.step": ("Step",),
    "gpuir.simulate.timeline": ("Timeline", "timeline"),
    "gpuir.targets.cluster": ("Cluster", "cluster_names", "load_cluster"),
    "gpuir.targets.load": ("load_target", "target_names"),
    "gpuir.targets.host": ("HostMachine", "host_names", "load_host"),
    "gpuir.targets.profile": ("Profile", "load_profile", "profile_names"),
    "gpuir.targets.target": ("Target",),
    "gpuir.text": ("parse", "parse_schedule", "show"),
    "gpuir.cost.collective": ("collective",),
    "gpuir.cost.nest": ("Tiles",),
    "gpuir.tune.kernels": ("Kernel", "kernel"),
    "gpuir.tune.observe": ("Observed",),
    "gpuir.tune.search": ("search",),
    "gpuir.tune.space": ("Predictions", "candidates", "heuristics", "predict"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    if name == "torch":  # the room for PyTorch sessions
        return import_module("gpuir.torch")
    if name == "__version__":
        from importlib.metadata import version

        return version("gpuir")
    raise AttributeError(f"module 'gpuir' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
