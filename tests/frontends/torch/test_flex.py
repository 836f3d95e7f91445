"""FlexAttention costs the blocks that its mask leaves, each of them whole, whatever the mask is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.nn.attention.flex_attention import (  # noqa: E402
    BlockMask,
    create_block_mask,
    flex_attention,
)

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ops import kernel as k  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

HEAD = 16
ENDS = torch.tensor([100, 130, 300, 333, 640, 700, 1001, 5000])  # of documents in a row
ANY = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.4


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.bucketize(i, ENDS) == torch.bucketize(j, ENDS)


def numbered(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 192 == j // 192) & (i >= j)


def prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j < 100) | (i >= j)


def dilated(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i - j) % 256 == 0) | (i == j)


def both_ways(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j).abs() <= 70


def at_random(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ANY[i // 128, j // 128]


def by_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= 64 * (h + 1))


def by_sequence(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j < 200 * (b + 1)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def nothing(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j < 0


class Attend(torch.nn.Module):
    def __init__(self, mask: Any, scored: bool) -> None:
        super().__init__()
        self.mask, self.scored = mask, scored
        self.scale = torch.nn.Parameter(torch.ones(HEAD))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        mod = (lambda s, b, h, i, j: s + (i - j) * 0.5) if self.scored else None
        return flex_attention(q * self.scale, k, v, mod, self.mask, enable_gqa=True)


def visits(mask: BlockMask, batch: int, heads: int) -> int:
    """Blocks that a kernel computes: those listed, for all sequences and heads."""
    many = mask.kv_num_blocks
    if mask.full_kv_num_blocks is not None:
        many = many + mask.full_kv_num_blocks
    return int(many.expand(batch, heads, -1).sum())


def made(
    rule: Callable[..., Any],
    lead: tuple[int | None, int | None] = (None, None),
    s: int = 512,
    d: int | None = None,
    size: int | tuple[int, int] = 128,
) -> BlockMask:
    return create_block_mask(rule, *lead, s, d or s, device="cpu", BLOCK_SIZE=size)


def queries(s: int, d: int, batch: int = 2, heads: int = 4, groups: int = 2) -> tuple[Any, ...]:
    shape = (batch, groups, d, HEAD)
    return torch.zeros(batch, heads, s, HEAD), torch.zeros(shape), torch.zeros(shape)


CASES: dict[str, tuple[Any, ...]] = {
    "documents": (documents,),
    "documents by number": (numbered,),
    "prefix": (prefix,),
    "dilated": (dilated, (None, None), 1024),
    "both ways": (both_ways,),
    "at random": (at_random, (None, None), 1152),
    "causal": (causal,),
    "heads": (by_head, (None, 4)),
    "sequences": (by_sequence, (2, None)),
    "ragged": (documents, (None, None), 500, 700),
    "short": (causal, (None, None), 70),
    "small blocks": (documents, (None, None), 512, 512, 64),
    "unequal blocks": (documents, (None, None), 512, 768, (64, 256)),
    "a query": (by_sequence, (2, None), 1, 900),
    "nothing": (nothing,),
}


@pytest.mark.parametrize(
    ("case", "scored"),
    [(case, False) for case in CASES]
    + [(case, True) for case in ("documents", "heads", "nothing")],
)
def test_flops_are_those_of_the_blocks_visited(case: str, scored: bool):
    mask = made(*CASES[case])
    s, d = mask.seq_lengths
    model = Attend(mask, scored).eval()
    graph = gpuir.analyze(model, queries(s, d), target="a100").graph
    (node,) = (n for n in graph.nodes if isinstance(n.op, k.Attention))
    rows, keys = (min(n, m) for n, m in zip(mask.BLOCK_SIZE, (s, d), strict=True))
    cells = visits(mask, 2, 4) * rows * keys
    assert node.op.flops() == cells * (4 * HEAD + 5)  # two products, and the softmax
    # for the block lists of the backward pass as well
    step = gpuir.analyze(model, queries(s, d), target="a100", train=True).graph
    (back,) = (n for n in step.nodes if isinstance(n.op, k.AttentionGradient))
    assert back.op.flops() == 5 * node.op.flops() // 2


def test_two_documents():
    mask = made(lambda b, h, i, j: i // 512 == j // 512, s=1024)
    q = torch.zeros(1, 4, 1024, 64)

    class Documents(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return flex_attention(q, k, v, block_mask=mask)

    for profile in ("eager", "compiled"):
        graph = gpuir.analyze(Documents().eval(), (q, q, q), target="a100", profile=profile).graph
        (op,) = (n.op for n in graph.nodes if isinstance(n.op, k.Attention))
        assert op.product.computed * 4 * 64 == 32 * 128 * 128 * 4 * 64 * 4 == 536_870_912
        said = " ".join(graph.assumed)
        assert "50.0% of the blocks are computed (128 of 256, each 128 x 128 scores)" in said


def blocks_of(model: Any, args: tuple[Any, ...], kwargs: Any = None) -> t.Attention:
    graph = load(model.eval(), args=args, kwargs=kwargs, strict=True).graph
    (op,) = (n.op for n in graph.nodes if isinstance(n.op, t.Attention))
    return op


def test_a_mask_may_be_made_anywhere():
    """Held, made in `forward`, an argument (alone or in a dictionary), made on meta; of a function
    that reads tensors."""

    class Inside(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            mask = create_block_mask(numbered, None, None, 512, 512, device=q.device)
            return flex_attention(q, k, v, block_mask=mask)

    class Given(torch.nn.Module):
        def forward(self, q: Any, mask: Any, k: Any, v: Any) -> Any:
            mask = mask["sliding"] if isinstance(mask, dict) else mask
            return flex_attention(q, k, v, block_mask=mask)

    q, k_, v = queries(512, 512, groups=4)
    mask, number = made(numbered), torch.arange(512) // 192
    reading = made(lambda b, h, i, j: (number[i] == number[j]) & (i >= j))
    with torch.device("meta"):
        on_meta = create_block_mask(numbered, None, None, 512, 512, device="meta")
        metas = queries(512, 512)
    found = [
        blocks_of(Attend(mask, False), (q, k_, v)),
        blocks_of(Inside(), (q, k_, v)),
        blocks_of(Given(), (q, mask, k_, v)),
        blocks_of(Given(), (q,), {"k": k_, "v": v, "mask": {"sliding": mask}}),
        blocks_of(Given(), (q, reading, k_, v)),
        blocks_of(Attend(on_meta, False).to("meta"), metas),
    ]
    want = visits(mask, 2, 4)
    assert [(op.block, op.visited[0]) for op in found] == [((128, 128), want)] * len(found)


def test_documents_that_are_an_input():
    """What the function of a mask gives is not known then: the blocks are those that are listed,
    and all of them where the lists are made by the model itself."""
    lists = made(numbered)

    class Numbered(torch.nn.Module):
        def forward(self, q: Any, number: Any, more: Any = None) -> Any:
            counts = lists.kv_num_blocks if more is None else lists.kv_num_blocks + more
            mask = BlockMask.from_kv_blocks(
                *(counts, lists.kv_indices, None, None, 128),
                mask_mod=lambda b, h, i, j: number[i] == number[j],
            )
            return flex_attention(q, q, q, block_mask=mask)

    q, number = torch.zeros(2, 4, 512, HEAD), torch.arange(512) // 192
    op = blocks_of(Numbered(), (q, number))
    assert op.visited[0] == int(lists.kv_num_blocks.sum()) * 8
    op = blocks_of(Numbered(), (q, number, torch.zeros(4, dtype=torch.int32)))
    assert op.visited[0] == 16 * 8


def test_keys_that_no_query_sees_are_not_read():
    far = made(lambda b, h, i, j: j >= 7 * 1024, s=1, d=8192)
    graph = gpuir.analyze(Attend(far, False).eval(), queries(1, 8192), target="a100").graph
    (node,) = (n for n in graph.nodes if isinstance(n.op, k.Attention))
    every = Attend(None, False).eval()
    whole = gpuir.analyze(every, queries(1, 8192), target="a100").graph
    (other,) = (n for n in whole.nodes if isinstance(n.op, k.Attention))
    assert node.op.product.visited == (2 * 4 * 8, 8, 2 * 2 * 8)
    assert node.cost is not None and other.cost is not None
    ratio = bytes_of(node) / bytes_of(other)
    assert ratio == pytest.approx(1 / 8, rel=0.05)
    assert node.cost.time_s < other.cost.time_s


def bytes_of(node: Any) -> float:
    from gpuir.cost.reading import work_of

    return sum(float(o.nbytes) for o in work_of(node.op).operands)


def test_time_follows_the_blocks():
    """Of masks with more and more blocks, up to the call without a mask, none is faster."""
    times: list[float] = []
    for many in (1, 2, 4, 8, 16):
        mask = made(lambda b, h, i, j, n=many: j // 256 < n, s=4096)
        args = queries(4096, 4096)
        graph = gpuir.analyze(Attend(mask, False).half().eval(), halves(args), target="a100").graph
        (node,) = (n for n in graph.nodes if isinstance(n.op, k.Attention))
        assert node.cost is not None
        times.append(node.cost.time_s)
    assert times == sorted(times) and times[-1] > 6 * times[0]
    graph = gpuir.analyze(Attend(None, False).half().eval(), halves(args), target="a100").graph
    (node,) = (n for n in graph.nodes if isinstance(n.op, k.Attention))
    assert node.cost is not None and times[-1] == pytest.approx(node.cost.time_s, rel=0.01)


def halves(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.half() for x in args)


def test_the_longest_row_of_blocks_sets_the_end():
    """Documents of unequal length take longer than as many blocks in equal rows."""
    unequal = made(lambda b, h, i, j: (i >= 4096 - 128) | (j < 128), s=4096)
    equal = made(lambda b, h, i, j: (i - j).abs() < 70, s=4096)
    found: list[tuple[int, float]] = []
    for mask in (unequal, equal):
        args = halves(queries(4096, 4096, 1, 2, 2))
        graph = gpuir.analyze(Attend(mask, False).half().eval(), args, target="h100-sxm").graph
        (node,) = (n for n in graph.nodes if isinstance(n.op, k.Attention))
        assert node.cost is not None
        found.append((node.op.product.visited[0], node.cost.time_s))
    assert found[0][0] < found[1][0] and found[0][1] > 1.5 * found[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("autodiff", ["torch", "gpuir"])
def test_the_gradients_are_those_of_attention(autodiff: str):
    """Numbers of a causal mask's backward pass, which torch itself has no CPU kernel of."""
    model = Attend(made(causal, s=256), False).train()
    args = tuple(torch.randn(2, n, 256, HEAD) for n in (4, 2, 2))
    if autodiff == "torch":
        found = load(model, args=args, train=True, joint=True)
        graph = found.graph
        weights = {v.name: found.weights[v.name] for v in graph.params}
    else:
        graph = gpuir.load(model, args=args, train=True, autodiff=autodiff)
        weights = {v.name: np.ones(v.type.shape, np.float32) for v in graph.params}
    values = {v.name: x.numpy() for v, x in zip(graph.inputs, args, strict=True)} | weights
    (gradient,) = (v for v in graph.outputs if v.name.startswith("scale.grad"))
    got = run(graph, values)[gradient.name]
    q, keys, v = args
    with torch.enable_grad():
        y = torch.nn.functional.scaled_dot_product_attention(
            q * model.scale, keys, v, is_causal=True, enable_gqa=True
        )
        (want,) = torch.autograd.grad(y.sum(), model.scale)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-3)


def test_what_it_does_beside_is_said():
    mask = made(lambda b, h, i, j: i // 128 == j // 128)
    with torch.no_grad():
        graph = load(Attend(mask, True).eval(), args=queries(512, 512), strict=True).graph
    said = " ".join(graph.assumed)
    assert "score_mod is not applied; its 3 operations" in said
    assert "the form of its mask is unknown: 25.0% of the blocks are computed" in said
    (op,) = (n.op for n in graph.nodes if isinstance(n.op, t.Attention))
    assert (op.window, op.block, op.visited) == (None, (128, 128), (32, 1, 16))


def test_blocks_are_printed_parsed_and_verified():
    mask = made(numbered)
    graph = load(Attend(mask, False).eval(), args=queries(512, 512), strict=True).graph
    assert gpuir.parse(gpuir.show(graph)) == graph
    (op,) = (n.op for n in graph.nodes if isinstance(n.op, t.Attention))
    for wrong in ({"visited": (999, 4, 16)}, {"visited": (8, 5, 16)}, {"block": (0, 128)}):
        with pytest.raises(gpuir.GpuirError, match="no mask has such blocks"):
            replace(op, **wrong).types()
    with pytest.raises(gpuir.GpuirError, match="no mask has such blocks"):
        replace(op, block=()).types()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = made(numbered)

    def forward(self, x: Any) -> Any:
        heads = x.unflatten(-1, (4, HEAD)).transpose(1, 2)
        y = flex_attention(heads, heads, heads, block_mask=self.mask)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "how", ["by=context,attention=heads", "by=context,attention=keys", "by=data"]
)
def test_ranks_share_the_blocks(how: str):
    """Over heads, rows or sequences: two ranks compute all blocks between them."""
    graph = load(Block().eval(), args=(torch.zeros(2, 512, 4 * HEAD),), strict=True).graph
    (op,) = (n.op for n in graph.nodes if isinstance(n.op, t.Attention))
    cut = gpuir.pipeline(f"shard{{ranks=2,{how}}}").run(graph)
    parts = [n.op for n in cut.walk() if isinstance(n.op, t.Attention)]
    assert sum(p.computed for p in parts) * 2 == op.computed


def test_blocks_do_not_go_round_a_ring():
    graph = load(Block().eval(), args=(torch.zeros(2, 512, 4 * HEAD),), strict=True).graph
    cut = gpuir.pipeline("shard{ranks=2,by=context,attention=ring}").run(graph)
    assert any(n.op.name == "t.collective" for n in cut.walk())
