"""Kernels that tuners published with measurements of their whole search space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuir.cost.nest import Tiles
from gpuir.tune.kernels import Kernel, kernel, nest
from gpuir.tune.templates import Meta, Template, values_of


def _xgemm_kernel(given: Mapping[str, Any]) -> Kernel:
    dims = {d: given[d] for d in ("m", "n", "k")}
    return nest("xgemm", dims, reads=[("k", "m"), ("k", "n")], writes=[("n", "m")], reduced=["k"])


def _xgemm_tile(p: Meta) -> Tiles:
    return Tiles(
        {"m": p["MWG"], "n": p["NWG"], "k": p["KWG"]},
        unroll=p["KWI"],
        threads={"m": p["MDIMC"], "n": p["NDIMC"]},
        vector={"m": p["VWM"], "n": p["VWN"]},
        direct={0: 1 - p["SA"], 1: 1 - p["SB"]},
        fetch={0: p["MDIMA"], 1: p["NDIMB"]},
    )


def _xgemm_allows(kernel: Kernel, p: Meta) -> Any:
    """CLBlast's own restrictions (src/kernels/level3/xgemm_part1.opencl)."""
    threads = p["MDIMC"] * p["NDIMC"]
    whole = (
        (p["KWG"], p["KWI"]),
        (p["MWG"], p["MDIMC"] * p["VWM"]),
        (p["NWG"], p["NDIMC"] * p["VWN"]),
        (p["MWG"], p["MDIMA"] * p["VWM"]),
        (p["NWG"], p["NDIMB"] * p["VWN"]),
        (p["KWG"] * p["MDIMA"], threads),
        (p["KWG"] * p["NDIMB"], threads),
    )
    found: Any = True
    for n, by in whole:
        found = found & (n % by == 0)
    return found


def _convolution_kernel(given: Mapping[str, Any]) -> Kernel:
    dims = {d: given[d] for d in ("y", "x", "i", "j")}
    return nest(
        "convolution",
        dims,
        reads=[("y+i", "x+j"), ("i", "j")],
        writes=[("y", "x")],
        reduced=["i", "j"],
        kept=[1],
    )


def _convolution_tile(p: Meta) -> Tiles:
    return Tiles(
        {"x": p["block_size_x"] * p["tile_size_x"], "y": p["block_size_y"] * p["tile_size_y"]},
        threads={"x": p["block_size_x"], "y": p["block_size_y"]},
        strided={"x": 1, "y": 1},
        direct={0: (1 - p["use_shmem"]) * (1 + p["read_only"])},
        pad={0: p["use_padding"] * (p["block_size_x"] % 32 != 0)},
    )


def _dedispersion_kernel(given: Mapping[str, Any]) -> Kernel:
    """`slope` is by how many samples one more measure of dispersion delays a channel, as a mean."""
    dims = {"d": given["dms"], "s": given["samples"], "c": given["channels"]}
    reads = [("c", f"s+{given['slope']}d")]
    return nest(
        "dedispersion", dims, reads=reads, writes=[("d", "s")], reduced=["c"], dtypes={0: "u8"}
    )


def _dedispersion_tile(p: Meta) -> Tiles:
    return Tiles(
        {"s": p["block_size_x"] * p["tile_size_x"], "d": p["block_size_y"] * p["tile_size_y"]},
        threads={"s": p["block_size_x"], "d": p["block_size_y"]},
        strided={"s": p["tile_stride_x"], "d": p["tile_stride_y"]},
        direct={0: 1},
    )


def _product(given: Mapping[str, Any]) -> Kernel:
    """Products of vLLM's Triton kernels: of rows with weights [n, k], or, with `groups`, of rows
    handed out to that many of them. `scales` is how the operands are scaled."""
    extents = {name: given[name] for name in ("n", "k")}
    more = {name: given[name] for name in ("weight", "scales") if name in given}
    kind: dict[str, Any] = {"dtype": given["dtype"], "out": "bf16", **more}
    if "groups" in given:
        return kernel("grouped", rows=given["rows"], groups=given["groups"], **extents, **kind)
    return kernel("gemm", m=given["rows"], layout="nt", **extents, **kind)


def _product_tile(p: Meta) -> Tiles:
    return Tiles(
        {"m": p["BLOCK_SIZE_M"], "n": p["BLOCK_SIZE_N"], "k": p["BLOCK_SIZE_K"], "b": 1},
        p["num_stages"],
        p["num_warps"],
        group=p["GROUP_SIZE_M"],
    )


# CLBlast's product, two kernels of Kernel Tuner's benchmarks (convolution, dedispersion), and the
# products of vLLM's and SGLang's Triton kernels.
TEMPLATES: Mapping[str, Template] = {
    t.name: t
    for t in (
        Template(
            "clblast.xgemm",
            _xgemm_kernel,
            _xgemm_tile,
            values_of("clblast.xgemm"),
            _xgemm_allows,
        ),
        Template(
            "kernel_tuner.convolution",
            _convolution_kernel,
            _convolution_tile,
            values_of("kernel_tuner.convolution"),
        ),
        Template("vllm.fused_moe", _product, _product_tile, values_of("vllm.fused_moe")),
        Template("vllm.block_gemm", _product, _product_tile, values_of("vllm.block_gemm")),
        Template(
            "kernel_tuner.dedispersion",
            _dedispersion_kernel,
            _dedispersion_tile,
            values_of("kernel_tuner.dedispersion"),
        ),
    )
}
