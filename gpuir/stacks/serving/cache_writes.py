"""Keys and values written to their caches in one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.fusion.flow import Flow
from gpuir.fusion.launch import together
from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Node
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class CacheWrites(Pass):
    """Joins the launches that write new keys and new values into the caches of a layer, which come
    in as they are: serving engines have a kernel for both. (vLLM: csrc/cache_kernels.cu,
    reshape_and_cache_flash; SGLang: sglang/srt/mem_cache/memory_pool.py, set_kv_buffer; TensorRT-
    LLM: cpp/tensorrt_llm/kernels/unfusedAttentionKernels, applyBiasRopeUpdateKVCache.)"""

    name = "cache_writes"
    takes = gives = Level.fused

    def run(self, g: Graph) -> Graph:
        flow = Flow(g)
        layers: dict[tuple[str, TensorType], list[int]] = {}
        for i, node in enumerate(g.nodes):
            if (place := _place(node, flow)) is not None:
                layers.setdefault(place, []).append(i)
        pairs = [pair for pair in layers.values() if _may_join(pair, flow)]
        first = {pair[0] for pair in pairs}
        joined = {last: _together(g.nodes[i], g.nodes[last]) for i, last in pairs}
        b = begin(g, Level.fused)
        for i, node in enumerate(g.nodes):
            if i in first:
                continue
            if node.op.control:
                node = replace(node, op=within(node.op, self.run, b.folded))
            b.put(joined.get(i, node))
        return b.finish(g.outputs)


def _place(node: Node, flow: Flow) -> tuple[str, TensorType] | None:
    """The module whose cache a launch writes into, and what that is; None for another launch."""
    if not isinstance(node.op, t.Fused) or len(node.results) != 1:
        return None
    outer = dict(zip(node.op.body.inputs, node.op.args, strict=True))
    last = node.op.body.nodes[-1]
    if not isinstance(last.op, t.Scattering):
        return None
    if outer.get(last.op.operands[0]) not in flow.graph.inputs:
        return None
    return (last.locs[0].rpartition("/")[0] if last.locs else ""), node.results[0].type


def _may_join(places: list[int], flow: Flow) -> bool:
    """Whether there are two, and nothing up to the second reads what the first writes."""
    if len(places) != 2:
        return False
    first, last = places
    return all(u > last for v in flow.nodes[first].results for u in flow.readers.get(v, ()))


def _together(first: Node, last: Node) -> Node:
    return together((first, last), (*first.results, *last.results))
