"""How many Triton kernels Inductor would compile and measure for a model, with gpuir and without.

    python -m validation.agreement.inductor_choices [MODEL ...] [--target a100] [--top 8]

No GPU is needed: as in validation.agreement.inductor, the program is lowered for an A100 that is
not there. max-autotune is on; each configuration is counted where Inductor would write its code,
and the library's own kernel is taken as if it had won. MODEL is one of that program's.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gpuir.tune.inductor import enabled
from validation.agreement.inductor import FRESH, MODELS, functional, inductor_kernels

LOWERINGS = ("mm", "bmm", "conv", "mm_plus_mm", "flex.flex_attention")
SMALL = ("bert-eager", "gpt2-sdpa", "llama-sdpa", "unet")


class Config:
    """What Inductor reads of a triton.Config; torch has none where Triton is not installed."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **more: Any
    ):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def compiled(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Counter[str]:
    """Triton kernels that max-autotune would compile for a module, by template."""
    from torch._inductor import config
    from torch._inductor.lowering import empty

    made = Counter[str]()

    def generate(template: Any, **given: Any) -> Any:
        made[template.name] += 1
        return SimpleNamespace(template=True)

    def select(name: str, choices: list[Any], inputs: Any, layout: Any, **more: Any) -> Any:
        for choice in choices:
            if not hasattr(choice, "template"):
                return choice.output_node(), None
        # flexible attention has no library's kernel: something of its type instead
        found = empty(layout.size, dtype=layout.dtype, device=layout.device)
        found.realize()
        return found, None

    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch._inductor.select_algorithm.TritonTemplate.generate": generate,
            "torch._inductor.template_heuristics.triton.TritonConfig": Config,
            "torch._inductor.utils.is_big_gpu": lambda *device: True,
            # copies on the device, only for the order of axes
            "torch._higher_order_ops.flex_attention._permute_strides": lambda out, strides: out,
            **{f"torch._inductor.kernel.{x}.autotune_select_algorithm": select for x in LOWERINGS},
        }.items():
            stack.enter_context(mock.patch(name, value))
        backends = {f"max_autotune_{kind}_backends": "ATEN,TRITON" for kind in ("gemm", "conv")}
        stack.enter_context(config.patch(max_autotune=True, **backends))
        with torch.no_grad():
            program = torch.export.export(module.eval(), args, kwargs, strict=False)
            inductor_kernels(functional(program))
    return made


def main() -> int:
    assert __doc__
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    models = {**MODELS, **FRESH}
    parser.add_argument("models", nargs="*", choices=[*models, []], metavar="MODEL")
    parser.add_argument("--target", default="a100")
    parser.add_argument("--top", type=int, default=8)
    given = parser.parse_args()
    print(f"{'model':16}{'without':>9}{'with':>7}")
    for name in given.models or SMALL:
        torch.manual_seed(0)
        module, args, kwargs = models[name]()
        module = module.half()
        args = tuple(x.half() if x.is_floating_point() else x for x in args)
        plain = compiled(module, args, kwargs)
        with enabled(given.target, top=given.top) as seen:
            ours = compiled(module, args, kwargs)
        print(f"{name:16}{plain.total():9}{ours.total():7}", flush=True)
        for line in str(seen).splitlines():
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
