"""Whose kernels an engine calls, once the GPU is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gpuir.cost.reading import is_of_blocks
from gpuir.ir.build import begin, within
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Op
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.stacks.serving.engines import (
    ENGINES,
    Generation,
    attention_of,
    experts_of,
    weights_of,
)
from gpuir.targets.target import Target

UNKNOWN = (
    "attention and experts use the kernels that {} calls on GPUs "
    "before Hopper, because no target was known"
)


@dataclass(frozen=True)
class EngineKernels(Pass):
    """Says of each attention and mixture of experts which library's kernel an `engine` (`vllm`,
    `sglang` or `trtllm`) calls on a GPU of the architecture `isa`: those of
    gpuir/stacks/serving/engines.py. Attention in f32 is left as it is: no engine has it. Ranks add
    up by the engine's own all-reduce, which takes NCCL's where that is quicker."""

    engine: str = "vllm"
    isa: str = ""

    name = "engine_kernels"
    takes = gives = Level.kernel

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UsageError(
                f"pass 'engine_kernels': no engine has the name {self.engine}",
                expected=", ".join(ENGINES),
                fix=nearest(self.engine, ENGINES),
            )

    def on(self, target: Target) -> Self:
        return replace(self, isa=target.isa or target.vendor)

    def run(self, g: Graph) -> Graph:
        if not any(isinstance(n.op, k.Attention | k.Experts | k.Collective) for n in g.walk()):
            return g
        named = self.named(g, Generation.of(self.isa))
        others = (Generation(is_hopper=True), Generation(is_blackwell=True))
        if self.isa or all(self.named(g, gpu) == named for gpu in others):
            return named
        return replace(named, assumed=(*named.assumed, UNKNOWN.format(self.engine)))

    def named(self, g: Graph, gpu: Generation) -> Graph:
        b = begin(g, Level.kernel)
        for node in g.nodes:
            op: Op = node.op
            match op:
                case k.Attention() if op.compute_dtype.bits <= 16:
                    op = replace(op, library=attention_of(self.engine, gpu))
                case k.Experts():
                    op = replace(op, library=experts_of(self.engine, _weights(op), gpu))
                case k.Collective() if _is_all_reduce(op.collective):
                    op = replace(op, library=self.engine)
                case _ if op.control:
                    op = within(op, lambda region: self.named(region, gpu), b.folded)
                case _:
                    pass
            b.put(replace(node, op=op))
        return b.finish(g.outputs)


def _is_all_reduce(op: t.Collective) -> bool:
    return op.fn == "all_reduce" and op.combine == "add"


def _weights(op: k.Experts) -> str:
    stored = max(op.stored, key=lambda v: v.type.size).type.dtype
    return weights_of(op.compute_dtype, stored, any(map(is_of_blocks, op.stored)))
