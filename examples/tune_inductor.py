"""torch.compile in max-autotune mode compiles fewer configurations: those that gpuir keeps.

    python examples/tune_inductor.py      needs gpuir[torch] and no GPU

With a GPU, `torch.compile(model, mode="max-autotune")(x)` stands where `compiled(model, (x,))`
does: that counts what Inductor would compile, on an A100 that is not there.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from gpuir.tune.inductor import enabled

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from validation.agreement.inductor_choices import compiled


class Net(nn.Module):
    """Two convolutions with a shortcut, and two layers over what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.second = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.layers = nn.Sequential(nn.Linear(64 * 14 * 14, 512), nn.GELU(), nn.Linear(512, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x + self.second(torch.relu(self.first(x))))
        return self.layers(y.flatten(1))


def main() -> None:
    model, x = Net().half(), torch.zeros(32, 64, 14, 14, dtype=torch.half)
    print(f"without: {compiled(model, (x,)).total()} Triton kernels to compile")
    with enabled("a100", top=6) as seen:
        print(f"with:    {compiled(model, (x,)).total()}")
    print(seen)


if __name__ == "__main__":
    main()
