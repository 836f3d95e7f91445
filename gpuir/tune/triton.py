"""Triton's autotuner, with gpuir in front of it: what cannot run is dropped, the rest ranked.

@triton.autotune(configs, key=["M", "N", "K"], prune_configs_by=pruner("matmul", "h100-sxm"))
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles, copies_asynchronously
from gpuir.ir.door import NUMBER, TEXT, ArgumentKind, many, named, of_type, takes, whole
from gpuir.ir.errors import UsageError, nearest, reason
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.keep import keep, worst_loss
from gpuir.tune.kernels import KERNEL, TARGET, Kernel
from gpuir.tune.space import Predictions, device_of, predict
from gpuir.tune.templates import Template
from gpuir.tune.tutorials import ADD, ATTENTION, LAYER_NORM, MATMUL, SOFTMAX, TEMPLATES

# What triton.Config writes into every launch (Triton 3.9, runtime/autotuner.py), whether the kernel
# is tuned by it or not.
OF_CONFIG = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
ANY = ArgumentKind("anything", lambda x: True)
NAMED = of_type((str, Template), "the name of a template, or one", "template='matmul'")
KINDS = {"gemm": MATMUL, "map": ADD, "attention": ATTENTION}


@dataclass(frozen=True)
class Pruned:
    """What is kept of some configurations, fastest predicted first, and why others cannot run."""

    kept: tuple[Any, ...]
    found: Predictions  # of all that were judged, in their order
    judged: tuple[Any, ...]
    worst_loss: float  # times: `keep.worst_loss`

    @property
    def dropped(self) -> list[tuple[Any, str]]:
        """The configurations that cannot run, each with what does not fit."""
        return [(c, why) for c, why in zip(self.judged, self.found.reasons, strict=True) if why]


@takes(configs=many(ANY), args=named(ANY), template=NAMED, target=TARGET, top=NUMBER)
def prune(
    configs: Sequence[Any],
    args: Mapping[str, Any],
    template: str | Template,
    target: str | Target,
    *,
    top: int | float = 8,
) -> Pruned:
    """The configurations worth measuring for a launch with these arguments: see `pruner`.

    A configuration that clusters blocks, limits registers or replaces the code (`num_ctas` above 1,
    `maxnreg`, `ir_override`) is kept, as its effect is not predicted. UsageError where an argument
    or a meta-parameter is not understood.
    """
    known = _template(template)
    kernel = known.kernel(args)
    judged = tuple(c for c in configs if _is_plain(c))
    if not judged:
        raise UsageError("gpuir can judge none of the configurations")
    meta = _meta(judged, args, known)
    device = load_target(target) if isinstance(target, str) else target
    tiles = _pipelined(known.tiles(meta), device)
    found = predict(kernel, tiles, device)
    found = _only(found, known.allows(kernel, meta))
    most = _most(top, len(configs))
    places = keep(found.time_s, most)
    rest = tuple(c for c in configs if not _is_plain(c))
    return Pruned((*(judged[i] for i in places), *rest), found, judged, worst_loss(found, places))


@takes(template=NAMED, target=TARGET, top=NUMBER, dtype=TEXT)
def pruner(
    template: str | Template,
    target: str | Target,
    *,
    top: int | float = 8,
    dtype: str | None = None,
) -> dict[str, Any]:
    """`prune_configs_by` of `triton.autotune`: at most `top` configurations are measured (or a
    share of them, for a float up to 1).

    `template` is a kernel of Triton's tutorials ("add", "softmax", "matmul", "layer norm",
    "attention"), or one's own. `dtype` is only needed where the first pointer has none.

    Dropped is what cannot run on the target; of the rest the fastest predicted are kept, and beside
    them, as one in four of `top`, a safety set (`gpuir.tune.keep`): the first configuration of the
    list that can run, and others spread over the order of prediction down to the slowest. What a
    wrong prediction can cost is bounded so:

    - Triton still measures all that is kept, so the result is never slower than the first
      configuration that can run, the one without tuning, whatever was predicted.
    - While measured times lie within a factor e of the predicted ones, the result takes at most e²
      of the time of the best, and less where predictions differ much: `prune(...).worst_loss` says
      how much less. Of gpuir's intervals, e is 1.6 and e² 2.6; they hold 80 % of measurements.

    A filter must not break a kernel: where nothing would be left, and where an argument or a
    meta-parameter is not understood, the configurations stay as they are, with one warning.
    Triton's `top_k` is left at 1.0, since it would cut those too.
    """
    known, device = _template(template), load_target(target) if isinstance(target, str) else target
    _most(top, 1)
    said = set[str]()
    more = {} if dtype is None else {"dtype": dtype}

    def untouched(why: str) -> None:
        if why not in said:
            said.add(why)
            text = f"gpuir leaves the configurations of {known.name} unchanged: {why}"
            warnings.warn(text, stacklevel=4)

    def early(configs: list[Any], named_args: Mapping[str, Any], **launch: Any) -> list[Any]:
        try:
            kept = prune(configs, {**named_args, **launch, **more}, known, device, top=top).kept
        except (UsageError, LookupError, TypeError, ValueError, AttributeError) as error:
            untouched(reason(error))
            return configs
        if not kept:
            untouched(f"none of them can run on {device.name}")
            return configs
        return list(kept)

    def perf_model(**launch: Any) -> float:
        """Seconds of one configuration, for who calls it; Triton does not, with `top_k` at 1."""
        tiles = _pipelined(known.tiles({p: launch[p] for p in known.parameters}), device)
        return float(predict(known.kernel({**launch, **more}), tiles, device).time_s[0])

    return {"early_config_prune": early, "perf_model": perf_model, "top_k": 1.0}


@takes(kernel=KERNEL, top=whole(1), template=NAMED, target=TARGET)
def to_configs(
    kernel: Kernel,
    top: int = 16,
    *,
    template: str | Template | None = None,
    target: str | Target = "",
    **held: int,
) -> list[Any]:
    """The `top` configurations of a kernel that are predicted to be fastest, as `triton.Config`s,
    the safety set of `pruner` among them; fewer where not as many can run.

    The template is the tutorials' own for this kind of kernel, where none is given; `held` are
    meta-parameters that keep one value. `target` may be left out where the kernel was made for one.
    """
    triton = _triton()
    known = _template(template) if template is not None else _kind(kernel)
    device = device_of(kernel, target)
    meta = known.space(kernel, **held)
    tiles = _pipelined(known.tiles(meta), device)
    configs: list[Any] = []
    for place in keep(predict(kernel, tiles, device).time_s, top):
        values = {p: int(column[place]) for p, column in meta.items()}
        launch = {p: values.pop(p) for p in OF_CONFIG if p in values}
        configs.append(triton.Config(values, **launch))
    return configs


def _triton() -> Any:
    # by name, for pyright, which would find this file
    try:
        return import_module("triton")
    except ModuleNotFoundError as error:
        raise UsageError(
            "configurations need Triton", found=str(error), fix="pip install 'gpuir[triton]'"
        ) from error


def _most(top: int | float, count: int) -> int:
    """How many of `count` are kept: a number of them, or a share."""
    if isinstance(top, int) and top >= 1:
        return top
    if not isinstance(top, int) and 0 < top <= 1:
        return max(1, int(count * top))
    raise UsageError(
        "top would leave no configuration, or more than there are",
        expected="a whole number of at least 1, or a share of at most 1.0",
        found=f"top={top}",
        fix="top=8",
    )


def _template(template: str | Template) -> Template:
    if isinstance(template, Template):
        return template
    if template not in TEMPLATES:
        raise UsageError(
            f"no template {template!r}",
            expected=", ".join(TEMPLATES),
            fix=f"{nearest(template, TEMPLATES)}; or give a gpuir.tune.templates.Template",
        )
    return TEMPLATES[template]


def _kind(kernel: Kernel) -> Template:
    if kernel.name == "rows":
        return SOFTMAX if kernel.work.kind == "softmax" else LAYER_NORM
    if kernel.name not in KINDS:
        raise UsageError(
            f"there is no template for the kernel {kernel.name!r}",
            expected=", ".join([*KINDS, "rows"]),
            fix="give a template: to_configs(kernel, template=Template(...))",
        )
    return KINDS[kernel.name]


def _pipelined(tiles: Tiles, target: Target) -> Tiles:
    """The tiles as Triton compiles them: without asynchronous copies `num_stages` has no effect
    (Triton 3.9, backends/nvidia/compiler.py: loops are pipelined from sm_80 on)."""
    if target.isa.startswith("sm_") and not copies_asynchronously(target):
        return replace(tiles, stages=np.minimum(tiles.stages, 1.0))
    return tiles


def _only(found: Predictions, allowed: Any) -> Predictions:
    """The predictions, infinite where the kernel cannot take the values."""
    takes = np.broadcast_to(allowed, found.time_s.shape)
    time_s, low_s, high_s = (
        np.where(takes, t, np.inf) for t in (found.time_s, found.low_s, found.high_s)
    )
    return Predictions(time_s, low_s, high_s, found.legal)


def _is_plain(config: Any) -> bool:
    return config.num_ctas in (1, None) and not (config.maxnreg or config.ir_override)


def _meta(configs: Sequence[Any], args: Mapping[str, Any], template: Template) -> dict[str, Any]:
    """The meta-parameters of configurations as arrays; what they leave out the launch may say."""
    rows = [config.all_kwargs() for config in configs]
    names = {n for row in rows for n in row if n in template.parameters or n not in OF_CONFIG}
    names |= {p for p in template.parameters if p in args}
    found: dict[str, Any] = {}
    for name in sorted(names):
        column = [row.get(name, args.get(name)) for row in rows]
        if any(value is None for value in column):
            raise UsageError(f"{name!r} is missing in some configurations", fix=f"give {name}=")
        found[name] = np.array(column, np.float64)
    return found
