"""torch's FlexAttention: attention with functions of scores, and a mask that goes by blocks.

The kernel that torch.compile makes visits the blocks of scores that the mask leaves, and computes
each of them whole, whatever it hides inside (torch 2.13, _inductor/kernel/flex/templates:
flex_attention.py.jinja, flex_decode.py.jinja, flex_backwards.py.jinja).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast
from gpuir.frontends.torch.higher import HigherOrderWalk, Values
from gpuir.frontends.torch.pointwise import mapped
from gpuir.ir.graph import Value
from gpuir.ops import tensor as t

SCORES = 2**22  # of one head, that the form of a mask is looked for in: so many rows of it
BLOCK_SCORES = 2**26  # of all heads, that blocks are looked for in: so many rows of blocks
BASE_2 = 1 / math.log(2)  # of which the kernels' logarithms are, times natural ones
LEAST, MOST = -1e4, 1e4  # scores that a function of scores is tried on


def attention(
    walk: HigherOrderWalk,
    node: fx.Node,
    q: Value,
    k: Value,
    v: Value,
    score_mod: fx.GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    options: Any = None,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Values:
    """One kernel, as torch.compile makes it, of the blocks that its mask leaves. What its functions
    say of scores is found by running them: a causal mask, a window, a soft cap. What is none of
    these is said, and left out of the numbers."""
    e = walk.emit
    e.assume(f"{node.name}: one kernel, as torch.compile makes for flex_attention")
    score_buffers, mask_buffers = known(e, score_buffers), known(e, mask_buffers)
    cap = softcap(score_mod, score_buffers)
    if cap is None:
        work = sum(n.op == "call_function" for n in score_mod.graph.nodes)
        e.assume(
            f"{node.name}: score_mod is not applied; its {work} operations "
            "for each score are counted as free"
        )
    seen = visible(block_mask[-1], mask_buffers, q.type.shape, k.type.shape)
    blocks = visited(e, block_mask, mask_buffers, q, k)
    said = blocks.text if seen else f"the form of its mask is unknown: {blocks.text}"
    if said:
        e.assume(f"{node.name}: {said}")
    seen = seen or SeenKeys()
    op = t.Attention(
        *(q, k, v),
        scale=float(scale),
        causal=seen.causal,
        window=seen.window,
        softcap=cap or 0.0,
        stats=True,
        block=blocks.block,
        visited=blocks.visited,
    )
    y, stats = e.add(op)
    result, sums, largest = node.meta["val"]
    stats = mapped(e, "mul", stats, BASE_2, dtype=stats.type.dtype)
    found = [cast(e, y, walk.dims.type(result).dtype), cast(e, stats, walk.dims.type(sums).dtype)]
    return *found, e.fill(0, walk.dims.type(largest))


def backward(
    walk: HigherOrderWalk,
    node: fx.Node,
    q: Value,
    k: Value,
    v: Value,
    y: Value,
    stats: Value,
    dy: Value | None,
    dstats: Value | None,
    score_mod: fx.GraphModule,
    joint: fx.GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    options: Any = None,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Values:
    """The gradients of queries, keys and values, by the blocks that the attention visits; and of
    what `score_mod` reads, which take no time."""
    e = walk.emit
    score_buffers, mask_buffers = known(e, score_buffers), known(e, mask_buffers)
    seen = visible(block_mask[-1], mask_buffers, q.type.shape, k.type.shape) or SeenKeys()
    blocks = visited(e, block_mask, mask_buffers, q, k)
    if dstats is not None:
        e.assume(f"{node.name}: the gradient of its logarithms of sums is not applied")
    op = t.AttentionGradient(
        *(q, k, v),
        y=y,
        stats=natural(e, stats),
        dy=e.fill(0, y.type) if dy is None else dy,
        scale=float(scale),
        causal=seen.causal,
        window=seen.window,
        softcap=softcap(score_mod, score_buffers) or 0.0,
        block=blocks.block,
        visited=blocks.visited,
    )
    made = e.add(op)
    *types, captured = node.meta["val"]
    found = [cast(e, x, walk.dims.type(w).dtype) for x, w in zip(made, types, strict=True)]
    if any(x is not None for x in captured):
        e.assume(f"{node.name}: gradients of what score_mod reads are counted as free")
    return *found, tuple(None if x is None else e.fill(0, walk.dims.type(x)) for x in captured)


def natural(e: Emitter, stats: Value) -> Value:
    """Logarithms of base 2 as natural ones: those that `attention` made them of, where they are its
    own, since the kernels pass them on as they are."""
    match e.builder.producer(stats):
        case t.Map("mul", (x,), (factor,)) if factor == BASE_2:
            return x
        case _:
            return mapped(e, "mul", stats, 1 / BASE_2, dtype=stats.type.dtype)


# ---------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class BlockMask:
    """The blocks that a kernel visits, as `t.attention` has them, and what to say of them."""

    block: tuple[int, ...]
    visited: tuple[int, ...]
    text: str = ""


def visited(
    e: Emitter, block_mask: Sequence[Any], buffers: Sequence[Any], q: Value, k: Value
) -> BlockMask:
    """The blocks that a mask leaves: those that it lists where its numbers are known, else those
    that hold a score its function shows; all of them where neither is known. Where there is no
    mask, torch makes one of a single block. None is larger than all scores."""
    *_, heads, rows, _ = q.type.shape
    *_, groups, keys, _ = k.type.shape
    batch = math.prod(q.type.shape[:-3])
    block = tuple(max(min(int(size), n), 1) for size, n in zip(block_mask[-3:-1], (rows, keys)))
    lines, columns = -(-rows // block[0]), -(-keys // block[1])
    every = batch * heads * lines * columns
    among = ""
    grid: Any = listed(e, block_mask, lines, columns)
    if grid is None:
        grid = looked_at(block_mask[-1], buffers, lead(block_mask), (rows, keys), block)
        if grid is not None and grid.shape[-2] < lines:
            among = f", by {grid.shape[-2]} of {lines} rows of them"
    text = ""
    if grid is None:
        grid, text = np.ones((1, 1, lines, columns), bool), "all blocks are computed"
    sequences = np.arange(batch) % grid.shape[0]
    each = np.ix_(sequences, np.arange(heads) % grid.shape[1])
    share = lines / max(grid.shape[-2], 1)
    count = round(float(grid.sum(axis=(2, 3))[each].sum()) * share)
    longest = int(grid.sum(axis=-1).max(initial=0))
    read = grid.any(axis=-2)[each].reshape(batch, groups, heads // max(groups, 1), columns)
    shared = read.any(axis=2)
    shared = shared.any(axis=0)[None] if math.prod(k.type.shape[:-3]) < batch else shared
    if every > batch * heads and not text:
        size = f"each {block[0]} x {block[1]} scores"
        text = f"{count / every:.1%} of the blocks are computed ({count} of {every}, {size}{among})"
    return BlockMask(block, (count, longest, int(shared.sum())), text)


def lead(block_mask: Sequence[Any]) -> tuple[int, ...]:
    """For how many sequences and heads a mask has blocks of their own."""
    counts = block_mask[2]
    return counts.type.shape[:2] if isinstance(counts, Value) else tuple(counts.shape[:2])


def listed(e: Emitter, block_mask: Sequence[Any], lines: int, columns: int) -> np.ndarray | None:
    """[sequences, heads, lines, columns]: which blocks a mask lists, those that it hides nothing of
    among them; None where its numbers are not known."""
    grid: np.ndarray | None = None
    for counts, places in (block_mask[2:4], block_mask[4:6]):
        if counts is None:
            continue
        many = e.numbers_of(counts) if isinstance(counts, Value) else None
        where = e.numbers_of(places) if isinstance(places, Value) else None
        if many is None or where is None:
            return None
        listed = np.arange(where.shape[-1]) < many[..., None]
        found = np.zeros((*where.shape[:-1], columns + 1), bool)
        np.put_along_axis(found, np.where(listed, where, columns).astype(int), listed, axis=-1)
        found = found[..., :lines, :columns]
        grid = found if grid is None else grid | found
    return grid


def looked_at(
    mask_mod: fx.GraphModule,
    buffers: Sequence[Any],
    lead: tuple[int, ...],
    extents: tuple[int, int],
    block: tuple[int, ...],
) -> np.ndarray | None:
    """[sequences, heads, lines, columns]: which blocks hold a score that the function of a mask
    shows, of some of the rows of blocks where they are many; None where it is not known."""
    rows, keys = extents
    lines, columns = -(-rows // block[0]), -(-keys // block[1])
    count = BLOCK_SCORES // max(math.prod(lead) * block[0] * keys, 1)
    chosen = np.linspace(0, lines - 1, min(max(count, 1), lines)).round().astype(int)
    grid: Any = np.zeros((*lead, len(chosen), columns * block[1]), bool)
    behind = torch.arange(keys)[None, :]
    for z, h, i in np.ndindex(*grid.shape[:-1]):
        first = int(chosen[i]) * block[0]
        at = torch.arange(first, min(first + block[0], rows))[:, None]
        shown = answer(mask_mod, (torch.tensor(z), torch.tensor(h), at, behind, *buffers))
        if shown is None:
            return None
        grid[z, h, i, :keys] = torch.broadcast_to(shown, (len(at), keys)).any(dim=0).numpy()
    return grid.reshape(*lead, len(chosen), columns, block[1]).any(axis=-1)


# ---------------------------------------------------------------------------- functions of scores


def known(e: Emitter, buffers: Sequence[Any]) -> tuple[Any, ...]:
    """What a function reads besides, as tensors where their numbers are known."""
    arrays = (e.numbers_of(x) if isinstance(x, Value) else None for x in buffers)
    pairs = zip(buffers, arrays, strict=True)
    return tuple(x if a is None else torch.from_numpy(np.array(a)) for x, a in pairs)


class SeenKeys:
    """Which keys a query sees: all, those up to itself, or those within a window behind it."""

    def __init__(self, causal: bool = False, window: int | None = None):
        self.causal, self.window = causal, window


def visible(
    mask_mod: fx.GraphModule, buffers: Sequence[Any], q: Sequence[int], k: Sequence[int]
) -> SeenKeys | None:
    """What a mask leaves, by its rows, few of them where there are many; None where it is none of
    the forms known, or differs from head to head, or depends on numbers that are not known."""
    rows, keys = q[-2], k[-2]
    count = max(1, min(rows, SCORES // max(keys, 1)))
    at = torch.linspace(0, rows - 1, count).round().long()[:, None]
    behind = torch.arange(keys)[None, :]
    shown = [
        answer(mask_mod, (*(torch.tensor(i) for i in ends), at, behind, *buffers))
        for ends in {(0, 0), (q[0] - 1, q[1] - 1)}
    ]
    if any(x is None or not torch.equal(x, shown[0]) for x in shown):
        return None
    mask = torch.broadcast_to(shown[0], (count, keys))
    apart = at - behind
    if bool(mask.all()):
        return SeenKeys()
    if torch.equal(mask, apart >= 0):
        return SeenKeys(causal=True)
    window = int(apart[mask].max()) if bool(mask.any()) else -1
    if window >= 0 and torch.equal(mask, (apart >= 0) & (apart <= window)):
        return SeenKeys(causal=True, window=window)
    return None


def answer(module: fx.GraphModule, args: Sequence[Any]) -> Any:
    """What the function gives for real numbers; None where they are not known, or where it does
    more than compute with what it is given: it may come from a file."""
    if not all(map(is_arithmetic, module.graph.nodes)):
        return None
    try:
        found = module(*args)
        found = found[0] if isinstance(found, list | tuple) else found
        return found.cpu() if isinstance(found, torch.Tensor) and not found.is_meta else None
    except Exception:  # whatever a function of the user's stumbles over
        return None


def is_arithmetic(node: fx.Node) -> bool:
    """Whether a node of such a function computes each cell from the same cells of others, looks
    numbers up, or makes a single one."""
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    value = node.meta.get("val")
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target is torch.ops.aten.index.Tensor or single


def softcap(score_mod: fx.GraphModule, buffers: Sequence[Any]) -> float | None:
    """0 for a function that leaves scores alone, c for c tanh(score / c); None for any other."""
    scores = torch.linspace(LEAST, MOST, 4097, dtype=torch.float64)
    indices = (torch.arange(4097) % n for n in (2, 3, 7, 11))  # no two alike
    found = answer(score_mod, (scores, *indices, *buffers))
    if found is None:
        return None
    if torch.equal(found, scores):
        return 0.0
    cap = float(found[-1])
    bent = torch.broadcast_to(found, scores.shape)
    fits = cap > 0 and torch.allclose(bent, cap * torch.tanh(scores / cap), rtol=1e-6)
    return cap if fits else None


FLEX: dict[str, Callable[..., Values]] = {
    "flex_attention": attention,
    "flex_attention_backward": backward,
}
