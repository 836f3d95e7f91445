"""What training found: the factors of each family, a small bounded network, and how far off they
were on devices and shapes they had not seen.

Everything is in `weights/tile2.json`, written by `gpuir fit` and described by the card beside it.
It is evaluated with numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import compress
from typing import Any, Literal, cast

import numpy as np

from gpuir.cost.family import Family
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.uncertainty import is_unfitted
from gpuir.cost.work import Lookup, Work
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable, Multiplier, Target

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Net:
    """A network of one hidden layer: tanh(out · tanh(hidden · x + bias)), x scaled to unit size.

    The hidden layer is the same everywhere; `own` has the output weights of architectures, by
    `Target.isa`, that there were measurements of. It was shown inputs from `least` to `most`: what
    lies beyond is as its end.
    """

    shift: Array
    scale: Array
    hidden: Array
    bias: Array
    out: Array
    own: Mapping[str, Array] = field(default_factory=dict[str, Array])
    least: Array | float = -np.inf
    most: Array | float = np.inf

    def says(self, isa: str) -> bool:
        """Whether it says anything of an architecture; "" is any without weights of its own."""
        return bool(self.own.get(isa, self.out).any())

    def __call__(self, features: list[Number], isa: str) -> Number:
        """Between -1 and 1, for features in the order it was trained with."""
        out = self.own.get(isa, self.out)
        plain = [float(f) if np.ndim(f) == 0 else f for f in features]
        x = np.clip(np.stack(np.broadcast_arrays(*plain), axis=-1), self.least, self.most)
        scaled = (x - self.shift) / self.scale
        output = np.tanh(np.tanh(scaled @ self.hidden.T + self.bias) @ out)
        return output if np.ndim(output) else float(output)


_interpolate: Callable[..., Number] = np.interp


# Of a GPU, to a family of kernels: in its measurements; calibrated on some of one's own; neither.
Familiar = Literal["known", "calibrated", "unseen"]


@dataclass(frozen=True)
class Interval:
    """Logarithms of measured over predicted between which 80 % of the rows are expected, by
    predicted device time: piecewise linear in its logarithm."""

    log_time: Array
    low: Array
    high: Array

    def holding(self, low: float, high: float) -> Interval:
        """The least that holds this one and two more ends."""
        return replace(self, low=np.minimum(self.low, low), high=np.maximum(self.high, high))

    def at(
        self, time_s: Number, stretch: Number = 1.0, beside: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[Number, Number]:
        """Its ends, `stretch` times as far away, and errors `beside` that have nothing to do with
        these: their squares add up."""
        x = np.log(np.maximum(time_s, 1e-9))
        low, high = (_interpolate(x, self.log_time, side) for side in (self.low, self.high))
        down, up = beside
        low = -np.hypot(stretch * low, down) if down else stretch * low
        high = np.hypot(stretch * high, up) if up else stretch * high
        return time_s * np.exp(low), time_s * np.exp(high)


@dataclass(frozen=True)
class Trained:
    """What training found for one family.

    `devices` are the GPUs it had measurements of. `architectures` hold, by `Target.isa`, how the
    logarithms of factors deviate there: what was found of a GPU is its architecture's, so that of
    two of one architecture that with more of everything is no slower. `kinds` hold, by
    `Target.isa`, the `Work.sort` of the kernels that were measured there; `sizes` are their least
    and most flop ("flops") and bytes ("bytes"). `intervals` are by how familiar the GPU is, and by
    dtype where it has its own.
    """

    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    devices: tuple[str, ...] = ()
    architectures: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )
    dtypes: tuple[str, ...] = ()
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    sizes: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    net: Net | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])

    def outside(self, work: Work, familiar: Familiar, measured: bool) -> list[tuple[str, ...]]:
        """What of each of many kernels the model has not been fitted on: "kind", "gpu", "dtype",
        "size", "indices"; of kernels that no table has, their kind says all."""
        count = np.size(work.points)
        if is_unfitted(work, "any") or not (self.intervals or measured):
            return [() if measured else ("kind",)] * count
        new = {
            "kind": not measured,
            "gpu": familiar == "unseen",
            "dtype": self.is_novel(work) and familiar != "calibrated",
            "size": self.beyond(work),
            "indices": is_uneven(work),
        }
        columns = (np.broadcast_to(flags, (count,)).tolist() for flags in new.values())
        return [tuple(compress(new, row)) for row in zip(*columns, strict=True)]

    def has_kind(self, work: Work) -> bool:
        """Whether kernels of this kind were measured, on whichever GPU."""
        return any(work.sort in some for some in self.kinds.values())

    def is_novel(self, work: Work) -> bool:
        """Whether kernels compute in, or on, a dtype that was not measured."""
        return work.novel or work.dtype.name not in self.dtypes

    def beyond(self, work: Work) -> Number:
        """Whether kernels are larger or smaller than any that were measured."""
        found: Number = np.zeros(np.shape(work.points), bool)
        for name, (least, most) in self.sizes.items():
            size = work.flops if name == "flops" else work.nbytes
            found = found | (size < least) | (size > most)
        return found

    def backtest(self, work: Work, familiar: Familiar) -> str:
        """Which of the intervals a kernel gets, or an empty text. After a calibration on a family
        that no backtest could calibrate, that of a known GPU."""
        places = (familiar, "known") if familiar == "calibrated" else (familiar,)
        keys = (key for place in places for key in (f"{place} {work.dtype.name}", place))
        return next((key for key in keys if key in self.intervals), "")


def is_uneven(work: Work) -> Number:
    """Whether lookups name some rows more often than others: indices were measured drawn evenly."""
    return np.not_equal(work.detail.fewer, 0.0) if isinstance(work.detail, Lookup) else False


Model = Mapping[str, Trained]
_UNTRAINED = Trained()


@lru_cache(maxsize=1)
def shipped() -> Model:
    """The model that comes with gpuir."""
    place = files("gpuir.cost").joinpath("weights", "tile2.json")
    return read(place.read_text()) if place.is_file() else {}


def read(text: str) -> dict[str, Trained]:
    """The model that a weights file states."""
    return {name: _entry(entry) for name, entry in json.loads(text)["families"].items()}


def _entry(entry: Mapping[str, Any]) -> Trained:
    net = entry.get("net")
    return Trained(
        factors=entry["factors"],
        devices=tuple(entry["devices"]),
        architectures=entry["architectures"],
        dtypes=tuple(entry["dtypes"]),
        kinds={isa: tuple(some) for isa, some in dict(entry["kinds"]).items()},
        sizes={name: (least, most) for name, (least, most) in entry["sizes"].items()},
        net=_net(net) if net else None,
        intervals={
            key: Interval(**{side: np.array(v) for side, v in rows.items()})
            for key, rows in entry["intervals"].items()
        },
    )


def _net(entry: Mapping[str, Any]) -> Net:
    own = {isa: np.array(out) for isa, out in entry["own"].items()}
    return Net(**{name: np.array(v) for name, v in entry.items() if name != "own"}, own=own)


def written(model: Model) -> str:
    """The weights file of a model: JSON, so that training again shows as a readable difference."""
    families = {
        name: {
            "factors": _rounded(t.factors),
            "devices": list(t.devices),
            "architectures": {isa: _rounded(found) for isa, found in t.architectures.items()},
            "dtypes": list(t.dtypes),
            "kinds": {isa: list(some) for isa, some in t.kinds.items()},
            "sizes": _rounded(t.sizes),
            "intervals": {key: _rounded(vars(i)) for key, i in t.intervals.items()},
            **({"net": _rounded(vars(t.net))} if t.net else {}),
        }
        for name, t in model.items()
    }
    return json.dumps({"families": families}, indent=1) + "\n"


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Six significant digits: more than measurements have."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: plain(y) for key, y in cast(Mapping[str, Any], x).items()}
        return [plain(y) for y in x] if np.ndim(x) else float(f"{float(x):.6g}")

    return {name: plain(v) for name, v in values.items()}


def factors(family: Family, target: Target, model: Model) -> dict[str, Number]:
    """The family's factors on a target: as trained, times what is known of its architecture, times
    the target's own calibration, within their bounds."""
    if model is shipped():
        return _shipped_factors(family, target.isa, target.factors)
    return _factors(family, target.isa, target.factors, model)


@lru_cache(maxsize=1024)
def _shipped_factors(family: Family, isa: str, own: FrozenTable[Multiplier]) -> dict[str, Number]:
    return _factors(family, isa, own, shipped())


def _factors(
    family: Family, isa: str, own: FrozenTable[Multiplier], model: Model
) -> dict[str, Number]:
    trained = model.get(family.name, _UNTRAINED)
    deviations = trained.architectures.get(isa, {})
    found: dict[str, Number] = {}
    for f in family.factors:
        value = trained.factors.get(f.name, f.value) * np.exp(deviations.get(f.name, 0.0))
        value *= own.get(f"{family.name}.{f.name}", 1.0)
        found[f.name] = float(min(max(value, f.low), f.high))
    return found


def stands_for(trained: Trained, target: Target) -> Target:
    """The GPU as which the network sees a kernel on a target: of those of its architecture that
    were measured the first; itself where none was."""
    if target.name in trained.devices[:1]:
        return target
    return _measured(tuple(trained.devices), target.isa) or target


@lru_cache(maxsize=256)
def _measured(devices: tuple[str, ...], isa: str) -> Target | None:
    """The first of the devices that has this architecture."""
    return next((t for t in map(load_target, devices) if t.isa == isa), None)


def seen(work: Work, tiles: Tiles, family: Family, target: Target, model: Model) -> list[Number]:
    """What the network is told of kernels under tiles."""
    there = stands_for(model.get(family.name, _UNTRAINED), target)
    s = Sheet()
    family.seconds(s, work, tiles, there, factors(family, there, model))
    return [s.values[name] for name in family.features]


def correction(work: Work, family: Family, target: Target, model: Model) -> Number:
    """What the network multiplies the time by.

    It is told of a kernel as a library would cut it on the GPU that `stands_for` the target's
    architecture. So whatever the tile, and whatever a target has of SMs and of L2, a kernel is
    corrected alike on all GPUs of an architecture, and their order is that of the formulas. What it
    was shown of one kind of kernel there it does not say of another.
    """
    trained = model.get(family.name, _UNTRAINED)
    own = _own(work, target, trained)
    if trained.net is None or not family.features or not trained.net.says(own):
        return 1.0
    many = work.each(lambda n: np.atleast_1d(np.asarray(n, float)))
    there = stands_for(trained, target)
    tiles = family.choose(many, there, factors(family, there, model))
    inputs = seen(many, tiles, family, there, model)
    found: Array = np.exp(family.bound * trained.net(inputs, own))
    return found if np.ndim(work.points) else float(np.ravel(found)[0])


def _own(work: Work, target: Target, trained: Trained) -> str:
    """The architecture whose own weights the network has for a kernel: the target's, where that
    kind was measured on it, else none's. What products were off by on matrix units at their full
    rate says nothing of units that are held to a half."""
    if work.sort not in trained.kinds.get(target.isa, ()):
        return ""
    there = stands_for(trained, target).sm.tensor_flops_per_clock
    return "" if work.pipe == "tensor" and there != target.sm.tensor_flops_per_clock else target.isa
