"""The device that torch runs on here: as a target, where it is a CPU, and how to time it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuir.cost.cpu import HELD_SHARE
from gpuir.fit.benchmarks import BENCHMARKS
from gpuir.fit.kit import Kit, Run
from gpuir.fit.timing import CudaWatch, HostWatch, Stopwatch
from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

# What /proc/cpuinfo calls the instructions of the x86-64 psABI's level 4, and SIMD lanes of a core:
# two units of 512 bits, or of 256.
LEVEL_4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NARROW = ("avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
LANES = {"x86-64-v4": 32, "x86-64-v3": 16}
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LARGEST = 2048  # extent of the product that measures the arithmetic peak
UNLIKE = 0.1  # share by which a GPU may differ from its target: a driver keeps some memory
LARGEST_FOOTPRINT = 1 << 30  # bytes that measure memory: more than any cache
FASTER = 1.2  # a narrow dtype's products count as its own rate when so much faster than f32's


def torch_here() -> Any:
    """torch, or a UsageError that says how to have it."""
    try:
        return import_module("torch")
    except ImportError as error:
        raise UsageError(
            "torch, which runs the measurements, is not installed", fix="pip install 'gpuir[torch]'"
        ) from error


@dataclass(frozen=True)
class Machine:
    """A device of torch's: `cuda` or `cpu`, and its clock."""

    torch: Any
    device: str
    watch: Stopwatch
    facts: Mapping[str, str]  # of the software and the device, for a table's columns

    @staticmethod
    def of(target: Target) -> Machine:
        """The machine to measure a target on; UsageError where there is none."""
        torch = torch_here()
        if target.is_cpu:
            facts = {"device": target.name, "torch": torch.__version__, "driver": "", "clock": ""}
            return Machine(torch, "cpu", HostWatch(int(torch.get_num_threads())), facts)
        if not torch.cuda.is_available():
            raise UsageError(
                "torch finds no GPU",
                expected=f"{target.title or target.name}",
                found=f"torch {torch.__version__} without a GPU",
                fix="install a torch build for your GPU and check its driver,"
                "\nor give measurements: --table FILE, or a CPU: --target cpu",
            )
        driver, clock = _driver()
        facts = {
            "device": str(torch.cuda.get_device_name()),
            "torch": str(torch.__version__),
            "driver": driver,
            "clock": clock,
        }
        return Machine(torch, "cuda", CudaWatch.of(torch, target.l2_bytes), facts)

    def kit(self, dtype: str) -> Kit:
        return Kit(self.torch, dtype, self.device)

    def least(self, run: Run, budget_s: float) -> float:
        """Seconds of the fastest call: what the device can do."""
        return self.watch(run, budget_s).least

    @property
    def free_bytes(self) -> float:
        """Memory that tensors can have."""
        if self.device == "cuda":  # what torch keeps of tensors that are gone is free too
            cuda = self.torch.cuda
            return float(cuda.mem_get_info()[0] + cuda.memory_reserved() - cuda.memory_allocated())
        try:
            return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError):
            return 4e9

    def differences(self, target: Target) -> Iterator[str]:
        """What this GPU says of itself that its target does not."""
        device = self.torch.cuda.get_device_properties(0)
        for what, here, listed in (
            ("SMs", int(device.multi_processor_count), target.sms),
            ("GiB of memory", device.total_memory >> 30, target.dram_bytes >> 30),
        ):
            if abs(here / listed - 1) > UNLIKE:
                yield f"{self.facts['device']} has {here} {what}, {target.name} {listed}"

    @property
    def provenance(self) -> str:
        """The software and the device in a few words."""
        versions = [f"torch {self.facts['torch']}"]
        if self.facts["driver"]:
            versions.append(f"driver {self.facts['driver']}")
        return f"{self.facts['device']}, {', '.join(versions)}"


def sees_gpu() -> bool:
    """Whether torch has a GPU to run on here; UsageError without torch."""
    return bool(torch_here().cuda.is_available())


def gpu_name() -> str:
    """What the driver calls the GPU here; UsageError where there is none."""
    torch = torch_here()
    if not torch.cuda.is_available():
        raise UsageError(
            "torch finds no GPU",
            found=f"torch {torch.__version__} without a GPU",
            fix="give the device to measure: --target cpu",
        )
    return str(torch.cuda.get_device_name())


def _driver() -> tuple[str, str]:
    """The driver's version and the SM clock as nvidia-smi says, or nothing."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "", ""
    driver, _, clock = answer.partition("\n")[0].partition(",")
    return driver.strip(), clock.strip()


def gpu_numbers(machine: Machine, budget_s: float) -> dict[str, float]:
    """Numbers of the target that this GPU is: what a kernel of one cell takes is its launch."""
    one = machine.torch.zeros(1, device=machine.device)
    launch_s = machine.watch(lambda: one.add_(one), budget_s).seconds
    return {"launch_s": float(f"{launch_s:.3g}")}


def check_at_hand(target: Target) -> str:
    """What torch calls the device here that the target describes: `cpu` or `cuda`; UsageError where
    the target is of another device, or of no product."""
    if not target.is_cpu:
        here = gpu_name()
        if load_target(here).device != target.device:
            raise _elsewhere(target, here)
        return "cuda"
    name, cores = cpu_name(), os.cpu_count() or 1
    if not target.title.startswith(name):
        raise _elsewhere(target, name)
    if target.sms > cores:
        raise _elsewhere(target, f"{cores} cores")
    return "cpu"


def _elsewhere(target: Target, found: str) -> UsageError:
    return UsageError(
        f"the target {target.name} does not describe a device of this machine",
        expected=target.title or target.name,
        found=found,
        fix="--target cpu, or a file that `gpuir calibrate --target cpu -o my-cpu.toml` has "
        "written here",
    )


# ---------------------------------------------------------------------------- a CPU's ceilings


def cpu_level() -> str:
    """The shipped target that this CPU resembles, from the instructions it has."""
    return "x86-64-v4" if _flags() >= LEVEL_4 else "x86-64-v3"


def _flags() -> set[str]:
    """The instructions of this CPU, as Linux calls them; none where it does not say."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\nflags")[2]
    except OSError:
        return set()
    return set(flags.partition("\n")[0].split())


def cpu_name() -> str:
    """What this CPU calls itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    name = text.partition("model name")[2].partition("\n")[0].partition(":")[2].strip()
    return name or "x86-64 CPU"


def cpu_title(machine: Machine) -> str:
    """What this CPU calls itself, and the cores that torch uses of it."""
    cores = int(machine.torch.get_num_threads())
    return f"{cpu_name()}, {cores} core{'s' * (cores > 1)}"


def cpu_notes(machine: Machine) -> str:
    """What decides which kernels run on this CPU, beside its numbers: threads, the SIMD words of
    PyTorch's own loops, the libraries of its products, instructions for narrow numbers."""
    torch = machine.torch
    cores, backends = int(torch.get_num_threads()), torch.backends
    found = [f"PyTorch runs {cores} thread{'s' * (cores > 1)}"]
    found.append(f"its own loops with {backends.cpu.get_cpu_capability()}")
    if backends.mkl.is_available():
        found.append("f32 products by MKL")
    if backends.mkldnn.is_available() and backends.mkldnn.enabled:
        found.append("convolutions and narrow products by oneDNN")
    narrow = [name for name in NARROW if name in _flags()]
    found.append(f"instructions for narrow numbers: {', '.join(narrow) or 'none'}")
    return "; ".join(found) + "."


def cpu_numbers(machine: Machine, level: str, budget_s: float) -> dict[str, float]:
    """Numbers of the target that this CPU is, by their path in a spec file: cores as torch uses
    them, caches as the kernel lists them, rates as measured.

    The peak is what a large product or convolution reaches (they come from different libraries),
    the clock what the peak implies; bandwidths are the better of reading (a sum) and copying.
    `budget_s` is for each measurement.
    """
    torch = machine.torch
    cores = int(torch.get_num_threads())
    numbers: dict[str, float] = {"sms": cores, **_cache_sizes()}
    peaks = {d: _product_rate(machine, d, budget_s) for d in ("f32", "f64", "bf16", "f16", "i8")}
    peaks["f32"] = max(peaks["f32"], _convolution_rate(machine, budget_s))
    for dtype in ("f32", "f64"):
        numbers[f"flops_per_s.vector.{dtype}"] = peaks[dtype]
    for dtype in ("bf16", "f16", "i8"):
        if peaks[dtype] > FASTER * peaks["f32"]:
            numbers[f"flops_per_s.tensor.{dtype}"] = peaks[dtype]
    numbers["clock_hz"] = peaks["f32"] / (2 * LANES[level] * cores)
    numbers |= _memories(machine, numbers, cores, budget_s)
    one, two = (torch.zeros(1) for _ in range(2))
    numbers["launch_s"] = machine.least(lambda: torch.add(one, two, out=two), budget_s)
    return {path: n if isinstance(n, int) else float(f"{n:.4g}") for path, n in numbers.items()}


def _product_rate(machine: Machine, dtype: str, budget_s: float) -> float:
    """flop/s of a large product, as large as takes a second; 0 where torch has none."""
    kit, best, extent = machine.kit(dtype), 0.0, 256
    while extent <= LARGEST:
        run = BENCHMARKS["linear"].make(kit, {"m": extent, "n": extent, "k": extent})
        try:
            seconds = machine.least(run, budget_s)
        except RuntimeError:
            return 0.0
        best = max(best, 2 * extent**3 / seconds)
        if seconds > budget_s / 3:
            break
        extent *= 2
    return best


def _convolution_rate(machine: Machine, budget_s: float) -> float:
    """flop/s of a large 3x3 convolution, directly computed (oneDNN takes Winograd only when asked
    to): on some CPUs more than a product reaches."""
    kit = machine.kit("f32")
    x, w = kit.random(4, 128, 28, 28), kit.random(128, 128, 3, 3)
    seconds = machine.least(lambda: machine.torch.nn.functional.conv2d(x, w, padding=1), budget_s)
    return 2 * 4 * 28 * 28 * 128 * 128 * 9 / seconds


def _memories(
    machine: Machine, listed: Mapping[str, float], cores: int, budget_s: float
) -> dict[str, float]:
    """What lies behind the cores' own caches: the bandwidths of the shared cache and of memory, and
    how much of the cache there is for this process. A virtual machine lists all that the processor
    has, and shares it with others.

    The bandwidth falls from the one to the other as footprints grow; the middle, on a logarithmic
    scale, is where half is held.
    """
    own = int(listed.get("sm.smem_bytes", 1 << 20)) * cores
    shared = int(listed.get("l2.bytes", 1 << 25))
    most = max(int(min(4 * shared, LARGEST_FOOTPRINT, machine.free_bytes / 8)), 8 * own)
    footprints = [own << i for i in range(2, (most // own).bit_length())]
    rates = [_bandwidth(machine, size, budget_s) for size in footprints]
    slow, fast = rates[-1], max(rates)
    held = [size for size, rate in zip(footprints, rates, strict=True) if rate**2 >= slow * fast]
    half = max(held, default=own) * 2**0.5
    return {
        "l2.bytes": int(min(shared, half / HELD_SHARE)),
        "l2.bytes_per_s": fast,
        "dram.bytes_per_s": slow,
    }


def _bandwidth(machine: Machine, footprint: int, budget_s: float) -> float:
    """Bytes/s of reading, and of copying with both tensors counted, within a footprint."""
    torch = machine.torch
    x = torch.ones(footprint // 4)
    read_s = machine.least(lambda: torch.sum(x), budget_s)
    half = x[: len(x) // 2]
    y = torch.empty_like(half)
    copy_s = machine.least(lambda: y.copy_(half), budget_s)
    return max(footprint / read_s, footprint / copy_s)


def _cache_sizes() -> dict[str, float]:
    """Bytes of a core's L1 data cache and L2, and of the L3 that it shares."""
    return dict(_listed_caches())


def _listed_caches() -> Iterator[tuple[str, int]]:
    paths = {"1": "sm.l1_bytes", "2": "sm.smem_bytes", "3": "l2.bytes"}
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for folder in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
            number = int(size[:-1]) * units[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
        if kind != "Instruction" and level in paths:
            yield paths[level], number
            if level == "2":
                yield "sm.smem_bytes_per_block", number
