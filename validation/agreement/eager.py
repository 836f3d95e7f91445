"""Launches of the `eager` profile against the operators that eager PyTorch dispatches.

usage: python -m validation.agreement.eager [MODEL...]

PyTorch runs the model on the CPU under a `TorchDispatchMode`. An operator counts as one
launch; views and allocations are left out, and so is what computes shapes from numbers alone. One
that first copies an operand that is not packed (`PACKS`) counts as a copy more, a convolution whose
bias PyTorch adds after cuDNN's call on a GPU as one more. Training is the
module's forward pass, a loss of one number, and `backward()`, with attention that drops nothing:
to drop something PyTorch spells it out in matrix products, on the CPU alone. Operators are told
apart as products, copies and the rest: one number for each, and for all of them the share that both
sides have.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpuir
from gpuir.ops import kernel as k
from validation.agreement.torch_memory import MODELS, Loss, Made, first, target

FREE = {  # operators that launch nothing: views, allocations, and the scalars behind a mask
    *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze"),
    *("squeeze", "slice", "select", "split", "split_with_sizes", "detach", "as_strided", "alias"),
    *("unbind", "narrow", "view_as_real", "view_as_complex", "unfold", "lift_fresh", "diagonal"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "scalar_tensor"),
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}
COPIES = {
    "slice_backward",
    "select_backward",
    "clone",
    "copy_",
    "cat",
    "constant_pad_nd",
    "roll",
    "stack",
}
# Operators that call contiguous() on operands, or reshape() on indices, by their places: aten/src/
# ATen/native/cuda/layer_norm_kernel.cu, SoftMax.cu, group_norm.cpp, Embedding.cpp.
PACKS = {
    "embedding": (1,),
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    "native_group_norm": (0,),
    "_softmax": (0,),
    "_log_softmax": (0,),
    "_softmax_backward_data": (0, 1),
}
# Operators that are several kernels: the gradients of a layer norm's operand, and of its weights
# (layer_norm_kernel.cu, LayerNormBackwardKernelImplInternal).
LAUNCHES = {"native_layer_norm_backward": 2}
LAUNCHED = {k.Gemm: "product", k.Conv: "product", k.Copy: "copy"}


class Counted(TorchDispatchMode):
    """Counts what is dispatched, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            kind = "product" if name in PRODUCTS else "copy" if name in COPIES else "rest"
            if name == "convolution_backward":  # of operand, weights and bias, those asked for
                *products, bias = args[-1]
                self.ops["product"] += sum(products)
                self.ops["rest"] += bias
            else:
                self.ops[kind] += LAUNCHES.get(name, 1)
            self.ops["rest"] += name == "convolution" and is_biased_apart(*args)
            packed = (args[i].is_contiguous() for i in PACKS.get(name, ()))
            self.ops["copy"] += sum(not yes for yes in packed)
        return func(*args, **(kwargs or {}))


def is_biased_apart(x: Any, weight: Any, bias: Any, *rest: Any) -> bool:
    """Whether PyTorch adds a convolution's bias after cuDNN's call (aten/src/ATen/native/
    Convolution.cpp): depthwise ones have a kernel of PyTorch's that does."""
    groups = rest[-1]
    depthwise = groups > 1 and groups == x.shape[1] and x.dim() == 4
    return bias is not None and not depthwise


def dispatched(run: Callable[[], Any]) -> Counter[str]:
    with Counted() as counted:
        run()
    return counted.ops


def launched(graph: gpuir.Graph) -> Counter[str]:
    """What the eager profile launches, by kind."""
    kernels = gpuir.lower(graph, profile="eager").walk()
    return Counter(
        LAUNCHED.get(type(n.op), "rest") for n in kernels if not isinstance(n.op, k.View)
    )


def inference(made: Made) -> tuple[Counter[str], Counter[str]]:
    """What PyTorch dispatches, and what gpuir launches."""
    module, args = made
    module.eval()
    with torch.no_grad():
        seen = dispatched(lambda: module(*args))
    return seen, launched(gpuir.load(module, args=args))


def undropped(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
    return ATTENTION(*args, **kwargs)


ATTENTION = torch.nn.functional.scaled_dot_product_attention


def training(name: str, made: Made) -> tuple[Counter[str], Counter[str]]:
    module, args = made
    with torch.no_grad():
        wanted = target(name, first(module(*args)))
    loss = Loss(module).train()
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", undropped):
        seen = dispatched(lambda: loss(*args, wanted).backward())
    loss.zero_grad()
    return seen, launched(gpuir.load(loss, args=(*args, wanted), train=True))


def share(seen: Counter[str], ours: Counter[str]) -> float:
    """Of all launches on either side, those that the other has too."""
    return (seen & ours).total() / max((seen | ours).total(), 1)


def main(names: list[str]) -> None:
    columns = ("product", "copy", "rest")
    print("| model | PyTorch: products, copies, rest | gpuir | both have |")
    print("|---|---|---|---|")
    for name in names or MODELS:
        for what, (seen, ours) in (
            ("", inference(MODELS[name]())),
            (", training", training(name, MODELS[name]())),
        ):
            cells = (", ".join(str(c[kind]) for kind in columns) for c in (seen, ours))
            print(f"| {name}{what} | {' | '.join(cells)} | {100 * share(seen, ours):.0f} % |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
