"""One scale for what several products of a module read, as serving engines load static scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.ir.build import begin
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.stacks.serving.pack_products import around


@dataclass(frozen=True)
class ShareScales(Pass):
    """Divides an input of several layers of one module, queries, keys and values or a gate and what
    it gates, by the scale of the first of them: then it is quantised once, and their products can
    be one. Engines take the largest of the scales that a file has.

    (vLLM: vllm/model_executor/layers/quantization/modelopt.py, ModelOptFp8LinearMethod,
    process_weights_after_loading; SGLang: the same in sglang/srt/layers/quantization; TensorRT-LLM:
    tensorrt_llm/_torch/modules/linear.py, load_weights_fused_qkv_linear.)
    """

    name = "share_scales"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        params = frozenset(g.params)
        first: dict[object, Value] = {}
        same: dict[Value, Value] = {}
        for node in g.nodes:
            match node.op:
                case t.Map("div", (x, scale)) if scale in params and scale.type.size == 1:
                    kept = first.setdefault((x, around(node.locs)), scale)
                    if kept != scale:
                        same[scale] = kept
                case _:
                    pass
        if not same:
            return g
        b = begin(replace(g, params=tuple(v for v in g.params if v not in same)), g.level)
        b.reserve(v.name for n in g.nodes for v in n.results)
        for node in g.nodes:
            read = {v: same[v] for v in node.op.operands if v in same}
            b.put(replace(node, op=node.op.substitute(read)) if read else node)
        return b.finish(g.outputs, g.over)
