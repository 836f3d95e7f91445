"""What a library call does besides its product, as Inductor has its libraries do it."""

from __future__ import annotations

from collections.abc import Container

from gpuir.fusion.flow import Flow
from gpuir.ir.graph import Node, Value
from gpuir.ir.strides import Strided
from gpuir.ops import tensor as t
from gpuir.ops.strides import packed, viewed


def is_bag(flow: Flow, node: Node) -> bool:
    """Whether a node sums the rows that a gather of its own model node picks: a bag of embeddings,
    which is a call."""
    match node.op:
        case t.Reduce(x=x) | t.ScatterND(updates=x):
            pass
        case _:
            return False
    while made := flow.maker(x):
        if made.locs != node.locs or not isinstance(made.op, t.Layout | t.Gather):
            return False
        if isinstance(made.op, t.Gather):
            return True
        x = made.op.operands[0]
    return False


def inside_bags(flow: Flow) -> frozenset[int]:
    """The places of nodes that bags alone read, through others or not: what says which rows are of
    which bag, which their calls read off the offsets."""
    bags = {i for i, node in enumerate(flow.nodes) if is_bag(flow, node)}
    found = set[int]()
    for i in range(len(flow.nodes) - 1, -1, -1) if bags else ():
        results = flow.nodes[i].results
        readers = {u for v in results for u in flow.readers.get(v, ())}
        if i not in bags and readers and readers <= bags | found:
            found |= {i} if flow.outputs.isdisjoint(results) else set()
    return frozenset(found)


def is_factor(flow: Flow, v: Value) -> bool:
    """Whether a product reads a value, through views or not: then it lies in the order of its
    cells, as aten's matmul asks."""
    return any(
        isinstance(n.op, t.Matmul) or (isinstance(n.op, t.Layout) and is_factor(flow, n.results[0]))
        for n in flow.read_by(v)
    )


def bias_of(flow: Flow, product: Node, stored: Container[Value]) -> int | None:
    """The place of the addition of a bias that the call of a product does itself: in 16 bits
    always, so that nothing is rounded in between, else unless pointwise ops alone read the sum. Not
    of one that the product's own model node computes. (torch 2.13: config.py,
    keep_addmm_fused_for_half_dtypes.)"""
    made = product.results[0]
    users = flow.readers.get(made, ())
    if not isinstance(product.op, t.Matmul) or len(users) != 1 or made in flow.outputs:
        return None
    node = flow.nodes[users[0]]
    match node.op:
        case t.Map("add", (a, b)) if node.locs == product.locs:
            bias = b if a == made else a
        case _:
            return None
    summed = node.results[0]
    maker = flow.maker(bias)
    own = maker is not None and maker.locs == product.locs and not isinstance(maker.op, t.Cast)
    if bias.type.rank != 1 or (own and bias not in stored):
        return None
    if summed.type.dtype.bits == 16:
        return users[0]
    return None if is_read_pointwise(flow, summed, packed(summed.type)) else users[0]


def rescaling(flow: Flow, product: Node) -> list[int]:
    """The places of what the call of a product of 8-bit numbers does to its sums, as far as it
    belongs to the product's own model node: it scales them, and writes 16 bits, with a bias or not.
    (torch: aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm with scale_a, scale_b, bias and
    out_dtype. vLLM: csrc/quantization/w8a8/cutlass, cutlass_scaled_mm. TensorRT-LLM:
    cpp/tensorrt_llm/thop, cublas_scaled_mm, fp8_rowwise_gemm.)"""
    if not isinstance(product.op, t.Matmul) or product.op.a.type.dtype.bits != 8:
        return []
    found, last = list[int](), product
    while (v := last.results[0]) not in flow.outputs and len(flow.readers.get(v, ())) == 1:
        (i,) = flow.readers[v]
        last = flow.nodes[i]
        same = last.locs == product.locs and last.results[0].type.shape == v.type.shape
        if not (same and isinstance(last.op, t.Map | t.Cast)):
            break
        found += [i, *(flow.makers[x] for x in last.op.operands if is_own_view(flow, x, product))]
    return found


def is_own_view(flow: Flow, v: Value, product: Node) -> bool:
    """Whether a product's own model node alone reads a view of a weight's scales, which a library
    takes as they are."""
    maker = flow.maker(v)
    if maker is None or not isinstance(maker.op, t.Reshape) or maker.locs != product.locs:
        return False
    return maker.op.x in flow.graph.params and len(flow.readers[v]) == 1


def is_read_pointwise(flow: Flow, v: Value, x: Strided) -> bool:
    """Whether pointwise ops alone read a value that lies like `x`, through views or not."""
    if v in flow.outputs:
        return False
    for node in flow.read_by(v):
        if isinstance(node.op, t.Layout):
            y = viewed(x, node.op)  # None is a copy
            if y is not None and not is_read_pointwise(flow, node.results[0], y):
                return False
        elif not isinstance(node.op, t.Pointwise):
            return False
    return True
