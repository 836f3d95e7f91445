"""A plan as a Python module for PyTorch 2.13: a DeviceMesh, and functions that spread a model over
it, by the public names of `torch.distributed`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuir.backends.plans.cuts import CutKind
from gpuir.backends.plans.record import AXES, TrainingPlan
from gpuir.simulate.parallel import Parallel, PipelineSchedule

BATCHED = ("dp", "ep", "cp")  # gradients are summed over their ranks, which have data of their own
SCHEDULES: Mapping[PipelineSchedule, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
STYLES: Mapping[CutKind, str] = {
    "column": "ColwiseParallel()",
    "row": "RowwiseParallel()",
    "words": "RowwiseParallel(input_layouts=Replicate())",
    "features": "ColwiseParallel(output_layouts=Replicate())",
}
SEVERAL = ("interleaved", "zero-bubble")  # schedules that take a list of stages


@dataclass
class _Module:
    """What the module imports and does, and what of the plan it does not."""

    imports: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


def pytorch(plan: TrainingPlan) -> str:
    """The text of the module."""
    p, made = plan.parallel, _Module()
    sizes = {a: getattr(p, a) for a in reversed(AXES)}  # a DeviceMesh has neighbours last
    axes: dict[str, int] = {a: n for a, n in sizes.items() if n > 1} or {"dp": 1}
    _cut(made, plan)
    _spread(made, p, [a for a in axes if a in BATCHED])
    _pipeline(made, p)
    _left_out(made, p)
    if plan.recompute:
        made.notes.append("recompute: each block is to run under torch.utils.checkpoint.checkpoint")
    title = plan.title.replace("\\", "/").replace('"', "'")
    doc = [f'"""{title}', *(f"- not as planned: {x}" for x in made.notes)]
    return "\n".join(
        (
            *(doc if len(doc) == 1 else (doc[0], "", *doc[1:])),
            '"""',
            "",
            *sorted(("from torch.distributed.device_mesh import init_device_mesh", *made.imports)),
            "",
            'DEVICE = "cuda"',
            f"MICROBATCHES = {p.microbatches}  # of {plan.microbatch} sequences each, on a rank",
            f"mesh = init_device_mesh(DEVICE, {_tuple(axes.values())}, "
            f"mesh_dim_names={_tuple(map(_string, axes))})",
            *made.lines,
            "",
        )
    )


def _cut(made: _Module, plan: TrainingPlan) -> None:
    """Tensor parallelism."""
    p = plan.parallel
    if p.tp == 1:
        return
    if plan.cuts:
        _known_cuts(made, plan)
        return
    styles = ["ColwiseParallel", "RowwiseParallel", *["SequenceParallel"] * p.sequence]
    words = ", ".join(f"parallel.{x}()" for x in styles)
    made.imports.append("from torch.distributed.tensor import parallel")
    made.lines += (
        "",
        "",
        "def cut(model, styles):",
        '    """`styles`: what becomes of each module, by its name, of',
        f'    {words}."""',
        '    return parallel.parallelize_module(model, mesh["tp"], styles)',
    )


def _known_cuts(made: _Module, plan: TrainingPlan) -> None:
    made.imports.append("from torch.distributed.tensor import Replicate, parallel")
    made.lines += (
        "",
        "STYLES = {",
        *(f"    {_string(module)}: parallel.{STYLES[kind]}," for module, kind in plan.cuts),
        "}",
        "",
        "",
        "def cut(model):",
        '    return parallel.parallelize_module(model, mesh["tp"], STYLES)',
    )
    if plan.parallel.sequence:
        made.notes.append(
            "sequence: styles of norms (SequenceParallel) and layouts between modules are to be "
            "added"
        )
    if plan.parallel.overlap:
        made.notes.append("overlap: torch.compile with torch._inductor.config._micro_pipeline_tp")


def _spread(made: _Module, p: Parallel, data: list[str]) -> None:
    """Data parallelism, over the axes whose ranks have data of their own."""
    if not data:
        return
    names = ", ".join(map(_string, data))
    made.lines += ("", "", f"data = mesh[{names}]" + '._flatten("data")' * (len(data) > 1))
    if p.zero and data != ["dp"]:
        made.notes.append(f"ZeRO over dp={p.dp} alone: it is over {' and '.join(data)} here")
    if p.zero > 1:
        made.imports.append("from torch.distributed.fsdp import fully_shard")
        made.lines += (
            "",
            "",
            "def spread(model, blocks):",
            f'    """{_after(p)}`blocks`: modules whose weights are gathered together."""',
            "    for block in blocks:",
            f"        fully_shard(block, mesh=data, reshard_after_forward={p.zero == 3})",
            f"    return fully_shard(model, mesh=data, reshard_after_forward={p.zero == 3})",
        )
        return
    made.imports.append("from torch.nn.parallel import DistributedDataParallel")
    made.lines += (
        "",
        "",
        "def spread(model):",
        f'    """{_after(p)}Gradients are summed in buckets, beside the backward pass."""',
        "    return DistributedDataParallel(model, device_mesh=data)",
    )
    if p.zero:
        made.imports.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
        made.lines += (
            "",
            "",
            "def optimizer(model, kind, **options):",
            '    """`kind` of torch.optim, AdamW say: each rank has a part of its states."""',
            "    group = data.get_group()",
            "    return ZeroRedundancyOptimizer(",
            "        model.parameters(), kind, process_group=group, **options",
            "    )",
        )


def _after(p: Parallel) -> str:
    return "After `cut`. " if p.tp > 1 else ""


def _pipeline(made: _Module, p: Parallel) -> None:
    if p.pp == 1:
        return
    kind, several = SCHEDULES[p.schedule], p.schedule in SEVERAL
    chunks = p.chunks if several else 1
    made.imports.append(f"from torch.distributed.pipelining import PipelineStage, {kind}")
    made.lines += (
        "",
        "",
        "def stage(module, chunk=0):",
        f'    """This rank\'s stage of the model, one of {chunks} (`chunk`)."""',
        f'    index = chunk * {p.pp} + mesh.get_local_rank("pp")',
        '    group = mesh["pp"].get_group()',
        f"    return PipelineStage(module, index, {p.pp * chunks}, DEVICE, group=group)",
        "",
        "",
        "def schedule(stages, loss):",
        '    """`stages`: a list of this rank\'s; its `step` runs a batch."""',
        f"    return {kind}({'stages' if several else 'stages[0]'}, MICROBATCHES, loss_fn=loss)",
    )


def _left_out(made: _Module, p: Parallel) -> None:
    """What PyTorch has no public way to say in a module of its own."""
    if p.cp > 1:
        made.notes.append(
            "cp: forward and backward pass are to run under the prototype "
            'torch.distributed.tensor.experimental.context_parallel(mesh["cp"], ...)'
        )
    if p.ep > 1:
        made.notes.append('ep: the model itself is to lay its experts over mesh["ep"]')
    if p.pp == 1 and p.microbatches > 1:
        made.notes.append("microbatches: the training loop is to accumulate their gradients")


def _string(name: str) -> str:
    return json.dumps(name)


def _tuple(values: Iterable[object]) -> str:
    shown = [str(x) for x in values]
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"
