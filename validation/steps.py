"""Steps of a decoder: the kernels of its graph, where in a layer they are, at any number of tokens.

A graph is of one size. But for attention, all that a kernel of a decoder counts (extents, bytes,
operations) is a + b · tokens, so two graphs say what it is at every size, and a table of thousands
of sizes is costed from them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Node
from gpuir.ops import kernel as k

SIZES = 256, 768  # tokens of the two graphs: fewer than any vocabulary, more than a window

# A Hugging Face config, tokens, profile → the kernels of a prompt of so many tokens.
Build = Callable[[Mapping[str, Any], int, str], Graph]

PLACE = re.compile(r".*?:(?:model\.)?(?:layers\.(?P<layer>\d+)\.?)?(?P<module>[^/]*)")
# The parts of a layer as vidur calls them (microsoft/vidur, profiling of mlp), by the modules of
# transformers that compute them; a part that begins with no such word is none of vidur's.
PARTS: tuple[tuple[str, str], ...] = (
    (r"embed_tokens", "emb"),
    (r"input_layernorm", "input_layernorm"),
    (r"self_attn\.[qkv]_proj", "attn_pre_proj"),
    (r"self_attn\.(o_proj|dense)", "attn_post_proj"),
    (r"self_attn\.[qk]_norm", "query and key norms"),
    (r"self_attn", "attn_rope"),
    (r"post_attention_layernorm", "post_attention_layernorm"),
    (r"mlp\.(gate|router)", "router"),
    (r"mlp\.experts", "experts"),
    (r"mlp\.(gate_proj|up_proj|fc1)", "mlp_up_proj"),
    (r"mlp\.(down_proj|fc2)", "mlp_down_proj"),
    (r"mlp(\.act_fn|\.activation_fn)?", "mlp_act"),
    (r"lm_head", "lm_head"),
)
ATTENTION = "attention"
ADD = "add"
OUTSIDE = "outside of layers"


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step: the layer it is in, the part of it, and its work at the two sizes."""

    part: str
    layer: int | None
    op: k.KernelOp
    works: tuple[Work, Work]

    def at(self, tokens: Number) -> Work:
        """Its work with so many tokens; one entry each, of an array. Not for attention."""
        rows: list[Number] = []
        self.works[0].each(lambda n: _kept(rows, n))
        more: list[Number] = []
        self.works[1].each(lambda n: _kept(more, n))
        slopes = iter((b - a) / (SIZES[1] - SIZES[0]) for a, b in zip(rows, more, strict=True))
        return self.works[0].each(lambda n: n + next(slopes) * (tokens - SIZES[0]))


def _kept(found: list[Number], n: Number) -> Number:
    found.append(n)
    return n


def steps(build: Build, config: Mapping[str, Any], profile: str) -> tuple[Kernel, ...]:
    """The kernels of a prompt of one sequence, under a profile."""
    small, large = (build(config, tokens, profile) for tokens in SIZES)
    pairs = list(zip(_launched(small), _launched(large), strict=True))
    if any(type(a.op) is not type(b.op) for a, b in pairs):
        raise ModelError(
            "a decoder with other kernels for longer prompts",
            where=small.name,
            expected=f"the same at {SIZES[0]} and at {SIZES[1]} tokens",
        )
    return tuple(_kernel(a, b) for a, b in pairs)


def _launched(g: Graph) -> list[Node]:
    return [n for n in g.nodes if isinstance(n.op, k.KernelOp) and not isinstance(n.op, k.View)]


def _kernel(small: Node, large: Node) -> Kernel:
    assert isinstance(small.op, k.KernelOp) and isinstance(large.op, k.KernelOp)
    part, layer = placed(small)
    return Kernel(part, layer, small.op, (work_of(small.op), work_of(large.op)))


def placed(node: Node) -> tuple[str, int | None]:
    """The part and the layer that a kernel belongs to: those of most of its model nodes, of the
    first where as many are of others; only what is in no layer alone belongs to none."""
    places = [_place(str(loc), node) for loc in node.locs]
    within = Counter(p for p in places if p[1] is not None) or Counter(places)
    return max(within, key=within.__getitem__, default=(OUTSIDE, None))


def _place(loc: str, node: Node) -> tuple[str, int | None]:
    found = PLACE.match(loc)
    if found is None:
        return OUTSIDE, None
    module, layer = found["module"], found["layer"]
    if isinstance(node.op, k.Attention | k.Scatter):
        part = ATTENTION
    elif layer is not None and not module:
        part = ADD
    else:
        named = (name for pattern, name in PARTS if re.fullmatch(pattern, module))
        part = next(named, OUTSIDE)
    return part, int(layer) if layer is not None else None
