"""Triton's autotuner measures 8 of 288 configurations of a matrix product: those that gpuir keeps.

    python examples/tune_triton.py        needs gpuir[triton] and no GPU

With a GPU the kernel is launched as always; here its configurations are pruned as a launch would.
"""

from itertools import product
from types import SimpleNamespace

import triton
import triton.language as tl

import gpuir
from gpuir.tune.kernels import nest
from gpuir.tune.templates import Template
from gpuir.tune.triton import prune, pruner, to_configs

CONFIGS = [
    triton.Config(
        {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8},
        num_warps=warps,
        num_stages=stages,
    )
    for m, n, k, warps, stages in product(
        (128, 64, 256, 32), (128, 64, 256, 32), (64, 32, 128), (4, 8), (3, 2, 4)
    )
]


@triton.autotune(CONFIGS, key=["M", "N", "K"], prune_configs_by=pruner("matmul", "h100-sxm"))
@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """The body is that of Triton's tutorial on matrix products."""


# A kernel of one's own: a blur of an image by 3 x 3, a block of BLOCK_Y x BLOCK_X pixels a program.
BLUR = Template(
    "blur",
    lambda args: nest(
        "blur",
        {"y": args["height"], "x": args["width"], "i": 3, "j": 3},
        reads=[("y+i", "x+j"), ("i", "j")],
        writes=[("y", "x")],
        reduced=("i", "j"),
        dtype="f32",
    ),
    lambda meta: gpuir.Tiles({"y": meta["BLOCK_Y"], "x": meta["BLOCK_X"]}, warps=meta["num_warps"]),
    {"BLOCK_Y": (8, 4, 16, 32), "BLOCK_X": (64, 32, 128), "num_warps": (4, 2, 8)},
)


def main() -> None:
    half = SimpleNamespace(dtype="float16")  # on a GPU: the tensors
    launch = {"a_ptr": half, "b_ptr": half, "c_ptr": half, "M": 4096, "N": 4096, "K": 4096}
    matmul_kernel.nargs = launch
    kept = matmul_kernel.prune_configs({"grid": (1,)})
    print(f"matmul: {len(CONFIGS)} configurations, {len(kept)} are measured")
    for config in kept:
        print("  ", *config.kwargs.values(), f"{config.num_warps} warps {config.num_stages} stages")

    found = prune(CONFIGS, launch, "matmul", "h100-sxm")
    print(f"{len(found.dropped)} cannot run: {found.dropped[0][1]}")
    print(f"at most {found.worst_loss:.1f} times the best, within the intervals")

    print("blur: tried first")
    blur = BLUR.kernel({"height": 4096, "width": 4096})
    for config in to_configs(blur, 4, template=BLUR, target="h100-sxm"):
        print("  ", config.kwargs, f"{config.num_warps} warps")


if __name__ == "__main__":
    main()
