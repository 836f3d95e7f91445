"""torch.compile with gpuir in front of its autotuning: few Triton configurations are compiled.

    with enabled("h100-sxm") as seen:
        torch.compile(model, mode="max-autotune")(x)
    print(seen)

Written for PyTorch 2.13: its InductorChoices (torch/_inductor/choices.py) is subclassed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuir.cost import generated
from gpuir.cost.nest import Tiles
from gpuir.ir.errors import GpuirError, UsageError, reason
from gpuir.ir.types import f32, tf32
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.keep import keep
from gpuir.tune.kernels import Kernel, kernel
from gpuir.tune.space import predict
from gpuir.tune.tutorials import dtype_named

TEMPLATES = ("mm", "bmm")  # names of Inductor's templates that are plain blocked products
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
CONV_WARPS = 4  # at most, of a window of several cells: torch/_inductor/kernel/conv.py, triton#1254
# Rows and cells of a block, and warps, that are tried for a reduction: 8 to 256 bytes a thread.
ROWS = np.array(
    [
        (rows, cells, warps)
        for rows in (1, 2, 4, 8, 16)
        for cells in (256, 512, 1024, 2048)
        for warps in (2, 4, 8, 16)
        if 64 * warps <= rows * cells <= 2048 * warps
    ],
    float,
)
# What a reduction's kernel may be made with for its blocks to be fixed.
PLAIN = {"features", "tiling_scores"}


@dataclass(frozen=True)
class SeenConfigurations:
    """How many configurations Inductor came with, and how many were left to compile, by operation;
    and why some were left as they were."""

    target: Target
    top: int
    reductions: bool
    offered: Counter[str] = field(default_factory=Counter[str])
    kept: Counter[str] = field(default_factory=Counter[str])
    untouched: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        lines = [f"{op}: {self.kept[op]} of {n}" for op, n in sorted(self.offered.items())]
        lines += [f"unchanged: {why} ({n} times)" for why, n in sorted(self.untouched.items())]
        return "\n".join(lines) or "nothing was tuned"


def enable(target: str | Target, *, top: int = 8, reductions: bool = False) -> SeenConfigurations:
    """From now on, of the Triton configurations that Inductor would tune a matrix product, a
    convolution or flexible attention with, at most `top` are left: those gpuir predicts to be the
    fastest on `target`, and a safety set (`gpuir.tune.keep`). `disable` undoes it.

    ATen's and other libraries' kernels always stay in the race, and so does every configuration
    where gpuir does not know the template, the shapes, or says that it has seen nothing like it
    (`Cost.unseen`). Of attention, which no library has, the one that Inductor takes without tuning
    is among what is left.

    `reductions` also fixes the blocks of reductions, where max-autotune is on. Inductor has no list
    of these to filter: one prediction decides, and nothing is measured. Off unless asked for.

    What was set before stays in force (a class of choices of one's own is subclassed), and the key
    of Inductor's cache says that gpuir was on. All of it holds for this thread, as PyTorch's own
    settings do, and for those with a copy of its context.
    """
    import torch._inductor.config as config
    from torch._inductor.virtualized import V

    if top < 1:
        raise UsageError("top must be at least 1", found=f"top={top}", fix="top=8")
    device = load_target(target) if isinstance(target, str) else target
    seen = SeenConfigurations(device, top, reductions)
    before: Any = V.choices
    factory: Any = config.inductor_choices_class
    context: Any = V.set_choices_handler(_filtering(before, seen))
    _ENABLED.append((context, factory))
    config.inductor_choices_class = lambda: _filtering(factory() if factory else _plain(), seen)
    return seen


def disable() -> None:
    """Inductor chooses as it did before the last `enable`; nothing, where gpuir is off."""
    import torch._inductor.config as config

    if _ENABLED:
        context, factory = _ENABLED.pop()
        with context:
            pass  # its end restores the handler
        config.inductor_choices_class = factory


@contextmanager
def enabled(
    target: str | Target, *, top: int = 8, reductions: bool = False
) -> Generator[SeenConfigurations]:
    """`enable`, for as long as the block runs."""
    seen = enable(target, top=top, reductions=reductions)
    try:
        yield seen
    finally:
        disable()


_ENABLED: list[tuple[Any, Any]] = []  # what was there before each `enable`


def _plain() -> Any:
    from torch._inductor.choices import InductorChoices

    return InductorChoices()


def _filtering(before: Any, seen: SeenConfigurations) -> Any:
    """An object of a class under that of `before`, with its state, whose lists are shorter."""
    base: Any = before.__class__

    def finalize(self: Any, templates: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        found = base._finalize_template_configs(self, templates, inputs, *args, **more)
        op = args[1] if len(args) > 1 else more["op_name"]
        return products(found, inputs, op, seen)

    def conv(self: Any, device_type: str | None = "cuda") -> Any:
        configs = base.get_conv_configs(self, device_type)

        def shorter(*sizes: Any, **more: Any) -> list[Any]:
            return convolutions([*configs(*sizes, **more)], device_type, seen)

        return shorter

    def flex(self: Any, head_dim: int, dtype: Any, device_type: str | None = "cuda") -> Any:
        import torch._inductor.config as config

        configs = base.get_flex_attention_fwd_configs(self, head_dim, dtype, device_type)
        settings: Any = config
        with settings.patch(max_autotune=False):
            usual = base.get_flex_attention_fwd_configs(self, head_dim, dtype, device_type)
        return attentions(configs, usual, device_type, seen)

    def kernel_kwargs(self: Any, cls: Any, features: Any, groups: Any, given: Any) -> Any:
        given = base.triton_kernel_kwargs(self, cls, features, groups, given)
        return fixed_rows(features, groups, given, seen) if seen.reductions else given

    def uuid(self: Any) -> str:
        inner = base.uuid(self) if hasattr(base, "uuid") else base.__qualname__
        return f"gpuir {seen.target.name} {seen.top} {seen.reductions} {inner}"

    methods = {
        "_finalize_template_configs": finalize,
        "get_conv_configs": conv,
        "get_flex_attention_fwd_configs": flex,
        "triton_kernel_kwargs": kernel_kwargs,
        "uuid": uuid,
    }
    made: Any = type("GpuirChoices", (base,), methods)
    found = copy(before)
    found.__class__ = made
    return found


# ---------------------------------------------------------------------------- a kind each


def products(choices: Sequence[Any], inputs: Any, op: str, seen: SeenConfigurations) -> list[Any]:
    """Of the templates' choices for a product, those to compile; others stay."""
    known = [c for c in choices if _is_plain_product(c)]
    if inputs.device_type != "cuda" or not known:
        return list(choices)

    def judged() -> tuple[Kernel, Tiles]:
        rows = [c.params.to_kwargs() for c in known]
        in_tf32 = all(row.get("ALLOW_TF32", False) for row in rows)
        return _product(inputs, in_tf32), _blocks(_columns(rows, (*BLOCKS, "GROUP_M")))

    kept = set(map(id, _kept(known, op, seen, judged)))
    return [c for c in choices if id(c) in kept or not _is_plain_product(c)]


def convolutions(
    configs: list[Any], device_type: str | None, seen: SeenConfigurations
) -> list[Any]:
    """The configurations to compile of a convolution."""
    if device_type != "cuda":
        return configs

    def judged() -> tuple[Kernel, Tiles]:
        work, window = _convolution()
        rows = [{**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages} for c in configs]
        columns = _columns(rows, BLOCKS)
        if window > 1:
            columns["num_warps"] = np.minimum(columns["num_warps"], CONV_WARPS)
        return work, _blocks(columns)

    return _kept(configs, "convolution", seen, judged)


def attentions(
    configs: list[Any], usual: list[Any], device_type: str | None, seen: SeenConfigurations
) -> list[Any]:
    """The configurations to compile of flexible attention, forward, the usual ones among them."""
    if device_type != "cuda":
        return configs

    def judged() -> tuple[Kernel, Tiles]:
        names = ("block_m", "block_n", "num_warps", "num_stages")
        columns = _columns([{n: getattr(c, n) for n in names} for c in configs], names)
        dims = {"b": 1.0, "h": 1.0, "s": columns["block_m"], "d": columns["block_n"]}
        return _attention(), Tiles(dims, stages=columns["num_stages"], warps=columns["num_warps"])

    places = [i for i, c in enumerate(configs) if c in usual]
    return _kept(configs, "flex_attention", seen, judged, places)


def fixed_rows(
    features: Any, groups: Any, given: dict[str, Any], seen: SeenConfigurations
) -> dict[str, Any]:
    """What a reduction's kernel is made with: the blocks that are predicted to be the fastest,
    where Inductor would try several. Only of rows whose cells lie side by side, of known sizes,
    taken in steps; all else is as it was."""
    import torch._inductor.config as config
    from torch._inductor.codegen.triton import FixedTritonConfig
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    tunes = config.max_autotune or config.max_autotune_pointwise
    special = config.triton.multi_kernel or config.triton.force_cooperative_reductions
    plain = features.is_reduction() and list(groups[0]) == ["x", "r0_"] and set(given) <= PLAIN
    if not (tunes and plain) or special or given.get("fixed_config"):
        return given
    if features.get_reduction_hint() != ReductionHint.INNER:
        return given
    rows, columns = _number(features.numel), _number(features.reduction_numel)
    if (
        rows is None
        or columns is None
        or V.choices.should_use_persistent_reduction(features, False)
    ):
        return given
    tiles = Tiles({"o": ROWS[:, 0], "r": ROWS[:, 1]}, warps=ROWS[:, 2])
    found = predict(
        kernel("rows", rows=rows, columns=columns, of="sum", dtype="f32"), tiles, seen.target
    )
    best = int(found.order[0])
    if not np.isfinite(found.time_s[best]):
        return given
    seen.offered["reduction"] += len(ROWS)
    seen.kept["reduction"] += 1
    x, r, warps = map(int, ROWS[best])
    blocks = {"XBLOCK": x, "R0_BLOCK": r, "num_warps": warps, "num_stages": 1}
    return {**given, "fixed_config": FixedTritonConfig(blocks)}


def _kept(
    configs: Sequence[Any],
    op: str,
    seen: SeenConfigurations,
    judged: Any,
    usual: Sequence[int] = (),
) -> list[Any]:
    """The configurations that are left, in their order; all, where gpuir cannot say."""
    seen.offered[op] += len(configs)
    found = list(configs)
    try:
        work, tiles = judged()
        cost = generated.cost_of(work.work, tiles.note(0), seen.target)
        if cost.unseen:
            raise UsageError(f"unseen {' '.join(cost.unseen)}")
        places = keep(predict(work, tiles, seen.target).time_s, seen.top, usual)
        if not places:
            raise UsageError(f"none can run on {seen.target.name}")
        found = [configs[i] for i in sorted(places)]
    except (GpuirError, LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{op}: {reason(error)}"
        if not seen.untouched[why]:
            warnings.warn(f"gpuir leaves the configurations unchanged: {why}", stacklevel=2)
        seen.untouched[why] += 1
    seen.kept[op] += len(found)
    return found


# ---------------------------------------------------------------------------- Inductor's own


def _is_plain_product(choice: Any) -> bool:
    """Whether a choice is a configuration of a template that gpuir knows."""
    return getattr(choice.template, "name", "") in TEMPLATES and all(
        name in choice.params.to_kwargs() for name in BLOCKS
    )


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    return {n: np.array([row.get(n, 1) for row in rows], float) for n in names}


def _blocks(columns: Mapping[str, Any]) -> Tiles:
    return Tiles(
        {"b": 1.0, "m": columns["BLOCK_M"], "n": columns["BLOCK_N"], "k": columns["BLOCK_K"]},
        stages=columns["num_stages"],
        warps=columns["num_warps"],
        group=columns.get("GROUP_M", 1.0),
    )


def _product(inputs: Any, in_tf32: bool = False) -> Kernel:
    """The product of Inductor's kernel inputs, the bias of addmm aside; of f32 `in_tf32` or not."""
    m, n, k = inputs.mnk_hinted()
    places = inputs._mat1_idx, inputs._mat2_idx
    shapes, strides = inputs.shapes_hinted(), inputs.strides_hinted()
    turned = ["t" if strides[i][-2] == 1 and shapes[i][-2] > 1 else "n" for i in places]
    a, b = (dtype_named(inputs.dtype(i)) for i in places)
    math: dict[str, Any] = {"math": tf32} if in_tf32 and a == f32 else {}
    return kernel(
        "gemm", m=m, n=n, k=k, b=inputs.batch_hinted(), dtype=a, weight=b, **math,
        out=dtype_named(inputs.out_dtype()), layout="".join(turned),
    )  # fmt: skip


def _convolution() -> tuple[Kernel, int]:
    """The convolution that is being lowered, and how many cells its window has."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = _arguments("convolution")
    steps = {"stride": stride, "padding": padding, "dilation": dilation}
    if transposed or any(len(set(step)) > 1 for step in steps.values()):
        raise UsageError("a convolution that is transposed, or that differs along its axes")
    (batch, channels, *size), (filters, _, *window) = x.shape, weight.shape
    found = kernel(
        "conv",
        batch=int(batch),
        channels=int(channels),
        size=tuple(map(int, size)),
        filters=int(filters),
        window=tuple(map(int, window)),
        groups=groups,
        dtype=dtype_named(x.dtype),
        **{name: step[0] for name, step in steps.items()},
    )
    return found, int(np.prod(window))


def _attention() -> Kernel:
    """The attention that is being lowered."""
    query, key, value, *_ = _arguments("flex_attention")
    batch, heads, queries, head = map(int, query.shape)
    return kernel(
        "attention", batch=batch, heads=heads, queries=queries, keys=int(key.shape[2]), head=head,
        kv_heads=int(key.shape[1]), value=int(value.shape[3]), dtype=dtype_named(query.dtype),
    )  # fmt: skip


def _arguments(name: str) -> list[Any]:
    """What the node that Inductor is lowering is given, tensors as what they look like; UsageError
    where it is of another operator."""
    from torch._inductor.virtualized import V

    node: Any = V.graph.current_node
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet.__name__ != name:
        raise UsageError(f"there is no template for {packet.__name__}")
    return [getattr(a, "meta", {}).get("val", a) for a in node.args]


def _number(size: Any) -> int | None:
    """A size that is a plain number."""
    return int(size) if getattr(size, "is_number", isinstance(size, int)) else None
