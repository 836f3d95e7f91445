"""What training found: the factors of each family, a small bounded network, and how far off they
were on devices and shapes they had not seen.

Everything is in `weights/tile2.json`, written by `gpuir train` and described by the card beside it.
It is evaluated with numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, cast

import numpy as np

from gpuir.cost.sheet import Family, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Net:
    """A network of one hidden layer: tanh(out · tanh(hidden · x + bias)), x scaled to unit size.

    The hidden layer is the same everywhere; `own` has the output weights of GPUs that there were
    measurements of.
    """

    shift: Array
    scale: Array
    hidden: Array
    bias: Array
    out: Array
    own: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def __call__(self, features: list[Number], device: str) -> Number:
        """Between -1 and 1, for features in the order it was trained with."""
        out = self.own.get(device, self.out)
        if not out.any():
            return 0.0
        plain = [float(f) if np.ndim(f) == 0 else f for f in features]
        x: Array = np.stack(np.broadcast_arrays(*plain), axis=-1)
        said = np.tanh(np.tanh((x - self.shift) / self.scale @ self.hidden.T + self.bias) @ out)
        return said if np.ndim(said) else float(said)


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

    def at(self, time_s: Number, stretch: Number = 1.0) -> tuple[Number, Number]:
        """Its ends, `stretch` times as far away."""
        x = np.log(np.maximum(time_s, 1e-9))
        low, high = (_interpolate(x, self.log_time, side) for side in (self.low, self.high))
        return time_s * np.exp(stretch * low), time_s * np.exp(stretch * high)


@dataclass(frozen=True)
class Trained:
    """What training found for one family.

    `devices` holds, for each GPU it had measurements of, how the logarithms of factors deviate
    there. `sizes` are the least and most flop ("flops") and bytes ("bytes") of the kernels that
    were measured. `intervals` are by how familiar the GPU is, and by dtype where it has its own.
    """

    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    devices: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict[str, Mapping[str, float]]
    )
    dtypes: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    net: Net | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict[str, Interval])

    def outside(self, work: Work, familiar: Familiar) -> tuple[str, ...]:
        """What of one kernel the model has not been fitted on: "gpu", "dtype", "size"."""
        new = {
            "gpu": familiar == "unseen",
            "dtype": self.is_novel(work) and familiar != "calibrated",
            "size": bool(np.any(self.beyond(work))),
        }
        return tuple(name for name, is_new in new.items() if is_new)

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
        devices=entry["devices"],
        dtypes=tuple(entry["dtypes"]),
        sizes={name: (least, most) for name, (least, most) in entry["sizes"].items()},
        net=_net(net) if net else None,
        intervals={
            key: Interval(**{side: np.array(v) for side, v in rows.items()})
            for key, rows in entry["intervals"].items()
        },
    )


def _net(entry: Mapping[str, Any]) -> Net:
    own = {device: np.array(out) for device, out in entry["own"].items()}
    return Net(**{name: np.array(v) for name, v in entry.items() if name != "own"}, own=own)


def written(model: Model) -> str:
    """The weights file of a model: JSON, so that training again shows as a readable difference."""
    families = {
        name: {
            "factors": _rounded(t.factors),
            "devices": {d: _rounded(found) for d, found in t.devices.items()},
            "dtypes": list(t.dtypes),
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
    """The family's factors on a target: as trained, times what is known of this GPU, times the
    target's own calibration, within their bounds. Of the shipped model found once a target."""
    if model is not shipped():
        return _factors(family, target, model)
    known: dict[str, dict[str, Number]] = target.__dict__.setdefault("_factors", {})
    if family.name not in known:
        known[family.name] = _factors(family, target, model)
    return known[family.name]


def known_as(family: Family, target: Target, trained: Trained) -> str:
    """The GPU whose measurements tell of this one: itself or, where the family goes by dies, the
    first that was measured of the same instruction set, which all but tells the die.

    Where the measurements of a die are of several campaigns, whose ways of measuring differ by more
    than its boards do, this makes no better predictions: of A100's streams and rows, of H200's
    products by H100's (left out one at a time). Products on the lanes are of one campaign.
    """
    if target.device in trained.devices or not family.by_die:
        return target.device
    same = (d for d in trained.devices if load_target(d).isa == target.isa)
    return next(same, target.device)


def _factors(family: Family, target: Target, model: Model) -> dict[str, Number]:
    trained = model.get(family.name, _UNTRAINED)
    deviations = trained.devices.get(known_as(family, target, trained), {})
    found: dict[str, Number] = {}
    for f in family.factors:
        value = trained.factors.get(f.name, f.value) * np.exp(deviations.get(f.name, 0.0))
        value *= target.factors.get(f"{family.name}.{f.name}", 1.0)
        found[f.name] = float(min(max(value, f.low), f.high))
    return found


def correction(s: Sheet, family: Family, target: Target, model: Model) -> Number:
    """What the network multiplies the time by, from the quantities on the sheet."""
    trained = model.get(family.name, _UNTRAINED)
    if trained.net is None or not family.features:
        return 1.0
    features = [s.values[name] for name in family.features]
    return s.xp.exp(family.bound * trained.net(features, known_as(family, target, trained)))
