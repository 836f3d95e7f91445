"""A GPU as numbers: rates, sizes, limits, and where each number comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from gpuir.ir.types import DType

Pipe = Literal["tensor", "vector"]
V = TypeVar("V")


@dataclass(frozen=True)
class Quantity:
    """The unit of a field, the range outside which a value is a slip of units, and a remark."""

    unit: str
    low: float
    high: float
    remark: str = ""


Hertz = Annotated[float, Quantity("Hz", 1e7, 1e11)]
FlopPerS = Annotated[float, Quantity("flop/s", 1e9, 1e18)]
BytesPerS = Annotated[float, Quantity("bytes/s", 1e8, 1e15)]
Watts = Annotated[float, Quantity("W", 1, 1e5)]
Seconds = Annotated[float, Quantity("s", 1e-8, 1e-2)]
OnChip = Annotated[int, Quantity("bytes", 1 << 10, 1 << 24)]
Cached = Annotated[int, Quantity("bytes", 1 << 14, 1 << 36)]
Count = Annotated[int, Quantity("", 1, 1 << 24)]
Multiplier = Annotated[float, Quantity("", 0.1, 10)]
Miss = Annotated[float, Quantity("", 1e-3, 1e3, "measured over predicted")]


class FrozenTable(Mapping[str, V]):
    """A mapping that cannot change and can be hashed; keeps its order."""

    def __init__(self, items: Mapping[str, V] | None = None):
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Table({self._items!r})"


Rates = FrozenTable[FlopPerS]
_NO_RATES: Rates = FrozenTable()
_NO_TEXT: FrozenTable[str] = FrozenTable()
_NO_FACTORS: FrozenTable[Multiplier] = FrozenTable()
_NO_MISSES: FrozenTable[Miss] = FrozenTable()


@dataclass(frozen=True)
class Flops:
    """Dense peaks by the dtype of the operands; `tf32` is f32 operands rounded to TF32.

    `vector` holds the rates of the SIMT lanes (with `i8`: dot products of four bytes), `tensor`
    those of the matrix units summing in f32 (i32 for integers), `tensor_f16_acc` those summing
    in f16 where that is faster.
    """

    vector: Rates
    tensor: Rates = _NO_RATES
    tensor_f16_acc: Rates = _NO_RATES


@dataclass(frozen=True)
class Dram:
    """The device memory. `clock_hz` is the driver's: half the data rate for HBM. `ecc`: error codes
    are on as the board ships, in band, and cost bandwidth; HBM has bits of its own for them."""

    kind: str
    bytes: Annotated[int, Quantity("bytes", 1 << 28, 1 << 44)]
    bytes_per_s: BytesPerS
    bus_bits: Count | None = None
    pin_bits_per_s: Annotated[float, Quantity("bit/s", 1e8, 1e12)] | None = None
    clock_hz: Hertz | None = None
    ecc: bool | None = None


@dataclass(frozen=True)
class Cache:
    """A cache that all SMs share, or on chiplets the sum over them; bandwidth of reads that hit."""

    bytes: Cached
    bytes_per_s: BytesPerS


@dataclass(frozen=True)
class Sm:
    """One streaming multiprocessor or compute unit.

    `l1_bytes` is the L1 data cache; with `l1_holds_smem` it is the one array that L1 and shared
    memory divide between them. `smem_bytes_per_block` is the most that one block can ask for.
    """

    fp32_lanes: Count
    registers: Annotated[int, Quantity("", 1 << 6, 1 << 24, "of 32 bits")]
    smem_bytes: OnChip
    smem_bytes_per_block: OnChip
    threads: Count
    blocks: Count
    warp: Annotated[int, Quantity("", 1, 1024, "threads")]
    l1_bytes: OnChip | None = None
    l1_holds_smem: bool = False
    tensor_flops_per_clock: Annotated[int, Quantity("", 1, 1 << 20, "f16, dense")] | None = None
    flops_per_lane_clock: Annotated[int, Quantity("", 1, 16)] = 2


@dataclass(frozen=True)
class Link:
    """The way to other GPUs: all links of one GPU together, one direction."""

    kind: str
    bytes_per_s: Annotated[float, Quantity("bytes/s", 1e8, 1e15, "one direction")]
    generation: Count | None = None


@dataclass(frozen=True)
class Pcie:
    """The way to the host, one direction, before packet overhead."""

    generation: Count
    lanes: Count
    bytes_per_s: Annotated[float, Quantity("bytes/s", 1e8, 1e15, "one direction")]


@dataclass(frozen=True)
class SliceOf:
    """What a MIG slice is a part of: its GPU, the profile of its instance, and the slices it has.

    `share` is the part of the GPU that nobody else can have then, the larger one of compute and
    memory: what it counts in a bill.
    """

    gpu: str
    profile: str
    compute_slices: Count
    memory_slices: Count
    copy_engines: Annotated[int, Quantity("", 0, 1 << 10)]
    decoders: Annotated[int, Quantity("", 0, 1 << 10)]
    share: Annotated[float, Quantity("", 0, 1)]


class TargetField(NamedTuple):
    """One field of a target, for a reader."""

    field: str
    value: str | float | bool | tuple[str, ...]
    unit: str
    source: str


class Sourced:
    """A record of a spec file, perhaps laid over that of a `base`; its `sources` say of each number
    where it comes from."""

    name: str
    title: str
    base: str
    sources: FrozenTable[str]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{self.title and f': {self.title}'}>"

    def source(self, path: str) -> str:
        """Where the number of a field comes from: its own entry, else its longest prefix's."""
        return source_of(path, self.sources)

    def rows(self) -> list[TargetField]:
        """Every field that has a value, in the order of a spec file."""
        return rows_of(self, self.sources)


@dataclass(frozen=True, repr=False)
class Target(Sourced):
    """A GPU, a part of one, or a CPU, that a model is costed for. SI units, dense rates.

    `clock_hz` is the boost clock, `observed_clock_hz` what boards of it run at under load where
    that is another, `tensor_clock_hz` the one at which the vendor quotes tensor peaks, `launch_s`
    the device-side time from one kernel to the next that no kernel escapes. `sources` maps a field,
    or the prefix of several, to where its number comes from; `discrepancies` says of a field why it
    does not match its own recomputation (`gpuir.targets.check`).

    `factors` multiply constants of the cost model for this device alone, each named by family and
    constant (`stream.dram share`): what calibration found. `local` says by how much the model, with
    those, still misses kernels that were measured (`gpuir.cost.local`). `backtest` says of a family
    between which multiples of the predicted time (`gemm.low`, `gemm.high`) 80 % of the kernels that
    calibration left out lay: no interval is narrower (`gpuir.cost.local`). `base` is the shipped
    target whose file this one's starts from, and whose constants it therefore shares. `host` is the
    machine that it is usually in (`gpuir.targets.host`), where it is sold with one. `slice` says of
    what this is a MIG slice (`gpuir.targets.mig`): one has all numbers of a GPU.
    """

    name: str
    vendor: str
    arch: str
    sms: Annotated[int, Quantity("", 1, 1 << 16)]
    clock_hz: Annotated[float, Quantity("Hz", 1e7, 1e11, "boost")]
    launch_s: Seconds
    flops_per_s: Flops
    dram: Dram
    l2: Cache
    sm: Sm
    title: str = ""
    isa: str = ""
    aliases: tuple[str, ...] = ()
    notes: str = ""
    base_clock_hz: Hertz | None = None
    observed_clock_hz: Annotated[float, Quantity("Hz", 1e7, 1e11, "under load")] | None = None
    tensor_clock_hz: Annotated[float, Quantity("Hz", 1e7, 1e11, "of tensor peaks")] | None = None
    tdp_w: Watts | None = None
    mig_capable: bool = False
    host: str = ""
    l3: Cache | None = None
    link: Link | None = None
    pcie: Pcie | None = None
    slice: SliceOf | None = None
    base: str = ""
    factors: FrozenTable[Multiplier] = _NO_FACTORS
    local: FrozenTable[Multiplier] = _NO_FACTORS
    backtest: FrozenTable[Miss] = _NO_MISSES
    sources: FrozenTable[str] = _NO_TEXT
    discrepancies: FrozenTable[str] = _NO_TEXT

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def dram_bytes(self) -> int:
        return self.dram.bytes

    @property
    def dram_bytes_per_s(self) -> float:
        return self.dram.bytes_per_s

    @property
    def l2_bytes(self) -> int:
        return self.l2.bytes

    @property
    def l2_bytes_per_s(self) -> float:
        return self.l2.bytes_per_s

    @property
    def is_cpu(self) -> bool:
        """Whether `isa` is a level of x86-64: `sms` are then cores, `l2` is the cache they share,
        `sm.smem_bytes` that of one core alone, and a lane one of its SIMD units.
        """
        return self.isa.startswith("x86")

    @property
    def device(self) -> str:
        """The shipped target that this one is a variant of, or its own name."""
        return self.base or self.name.partition("+")[0]

    @cached_property
    def under_load(self) -> Target:
        """The same at the clock that its boards were observed to run at: peaks and the L2's rate go
        with it. Vendors rate consumer boards at a clock that most exceed."""
        if self.observed_clock_hz is None:
            return self
        by = self.observed_clock_hz / self.clock_hz

        def faster(rates: Rates) -> Rates:
            return FrozenTable({name: by * rate for name, rate in rates.items()})

        peaks = self.flops_per_s
        return replace(
            self,
            clock_hz=self.observed_clock_hz,
            observed_clock_hz=None,
            tensor_clock_hz=by * (self.tensor_clock_hz or self.clock_hz),
            flops_per_s=Flops(*map(faster, (peaks.vector, peaks.tensor, peaks.tensor_f16_acc))),
            l2=replace(self.l2, bytes_per_s=by * self.l2.bytes_per_s),
        )

    def peak(self, pipe: Pipe, dtype: DType) -> float:
        """Dense flop/s on operands of `dtype`; never fails, `peak_rule` says what it fell back to.

        On the tensor pipe a dtype without a unit runs as the next wider one that holds its values
        and has one (i4 as i8 as f16, f4 as f8 as f16, tf32 as f32), else on the vector pipe.
        """
        return self._peaks(pipe, dtype)[0]

    def peak_rule(self, pipe: Pipe, dtype: DType) -> str:
        """The listed rate that `peak` rests on: `tensor.f16`, `vector.f32 / 2`."""
        return self._peaks(pipe, dtype)[1]

    def _peaks(self, pipe: Pipe, dtype: DType) -> tuple[float, str]:
        key = pipe, dtype.name
        if key not in self._memo:
            self._memo[key] = (_tensor if pipe == "tensor" else _vector)(self, dtype)
        return self._memo[key]

    @cached_property
    def _memo(self) -> dict[tuple[str, str], tuple[float, str]]:
        return {}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What no document says: numbers assumed, set by the user, or scaled along with those."""
        together: dict[str, list[str]] = {}
        for path, text in self.sources.items():
            if text.startswith(("assumed", "set by the user", "scaled")):
                together.setdefault(text, []).append(path)
        return tuple(f"{', '.join(paths)}: {text}" for text, paths in together.items())


# What a dtype runs as on the matrix units, best first. A bf16 does not fit into an f16.
_TENSOR_AS = {
    "f4e2m1": ("f4e2m1", "f8e4m3", "f16"),
    **{f"f8{kind}": ("f8e4m3", "f16") for kind in ("e4m3", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0")},
    **dict.fromkeys(("i8", "u8", "i4", "u4", "i2", "u2"), ("i8", "f16")),
    "f16": ("f16",),
    "bf16": ("bf16",),
    "tf32": ("tf32", "f32"),
    "f32": ("f32",),
    "c64": ("f32",),
    "f64": ("f64",),
    "c128": ("f64",),
}


def _tensor(target: Target, dtype: DType) -> tuple[float, str]:
    rates = target.flops_per_s.tensor
    for name in _TENSOR_AS.get(dtype.name, ()):
        if name in rates:
            return rates[name], f"tensor.{name}"
    return _vector(target, dtype)


def _vector(target: Target, dtype: DType) -> tuple[float, str]:
    """A listed rate; else by f32, to which narrower floats are converted in registers at no cost.

    Assumed where no rate is listed: f64 at 1/64 (CUDA C++ Programming Guide, arithmetic
    throughput, compute capability 8.6), 32-bit integers at 1/2 (the same table: 64 a clock on SMs
    of 128 lanes), 64-bit ones, made of two or more instructions, at 1/4.
    """
    rates = target.flops_per_s.vector
    f32 = rates["f32"]
    name = {"c64": "f32", "c128": "f64"}.get(dtype.name, dtype.name)
    if name == "f64":
        return (rates["f64"], "vector.f64") if "f64" in rates else (f32 / 64, "vector.f32 / 64")
    if dtype.is_inexact:
        listed = rates.get(name, 0.0)
        return (listed, f"vector.{name}") if listed > f32 else (f32, "vector.f32")
    if name in rates:
        return rates[name], f"vector.{name}"
    share = 4 if dtype.bits > 32 else 2
    return f32 / share, f"vector.f32 / {share}"


class Spec(NamedTuple):
    """How the type of a field reads: what it holds, its unit if a number, and whether it may miss.

    `holds` is int, float, bool, str, a dataclass, Table (of numbers where there is a quantity,
    else of text) or tuple.
    """

    holds: Any
    quantity: Quantity | None
    required: bool


def specs(cls: type[Any]) -> dict[str, Spec]:
    """The fields of a dataclass of this file, from their annotations."""
    if cls not in _SPECS:
        hints = get_type_hints(cls, include_extras=True)
        _SPECS[cls] = {f.name: _spec(hints[f.name], f) for f in fields(cls)}
    return _SPECS[cls]


_SPECS: dict[type[Any], dict[str, Spec]] = {}


def _spec(hint: Any, f: Any) -> Spec:
    required = f.default is MISSING and f.default_factory is MISSING
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Annotated:
        holds, quantity = get_args(hint)[:2]
        return Spec(holds, quantity, required)
    if get_origin(hint) is FrozenTable:
        inner = get_args(hint)[0]
        return Spec(
            FrozenTable, get_args(inner)[1] if get_origin(inner) is Annotated else None, required
        )
    return Spec(get_origin(hint) or hint, None, required)


# The order of a spec file: tables after plain values, as TOML wants it.
_ORDER = (
    *("base", "name", "title", "aliases", "vendor", "arch", "isa", "notes"),
    *("sms", "clock_hz", "base_clock_hz", "observed_clock_hz", "tensor_clock_hz", "launch_s"),
    *("tdp_w", "mig_capable", "host"),
    *("flops_per_s", "dram", "l2", "l3", "sm", "link", "pcie", "slice"),
    *("factors", "local", "backtest"),
)


def source_of(path: str, sources: Mapping[str, str]) -> str:
    """Where the number at a path comes from: its own entry, else its longest prefix's, or ""."""
    while path and path not in sources:
        path = path.rpartition(".")[0]
    return sources.get(path, "")


def rows_of(record: Any, sources: Mapping[str, str]) -> list[TargetField]:
    """Every field below a record that is set, with its unit and source."""
    return [
        TargetField(path, value, spec.unit if spec else "", source_of(path, sources))
        for path, spec, value in walk(record)
    ]


def walk(
    record: Any, prefix: str = ""
) -> Iterator[tuple[str, Quantity | None, str | float | bool | tuple[str, ...]]]:
    """Dotted path, quantity and value of every field below a record that is set."""
    known = specs(cast(type[Any], type(record)))
    for name in _ORDER if isinstance(record, Target) else known:
        value, path = getattr(record, name), prefix + name
        if is_dataclass(value):
            yield from walk(value, path + ".")
        elif name in ("sources", "discrepancies"):
            continue
        elif isinstance(value, FrozenTable):
            for key, rate in cast(Rates, value).items():
                yield f"{path}.{key}", known[name].quantity, rate
        elif value not in (None, "", ()):
            yield path, known[name].quantity, value
