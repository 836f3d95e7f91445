"""transformers' mixtures of experts, each one call of `gpuir::experts`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from gpuir.frontends.torch.experts import ACTIVATIONS, experts, gated
from gpuir.frontends.torch.packed import dense

NAME = "gpuir"  # of this way to run experts, among transformers' own


def adopt(model: torch.nn.Module) -> None:
    """Has every mixture of the model run as one call, where `t.Experts` can say what it computes.
    Others keep transformers' way: sorted rows and grouped products."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__ == "SwitchTransformersSparseMLP":
            module.experts = Stacked(module.experts, module.router.expert_capacity)
            module.router.register_forward_hook(partial(_note_length, module.experts))
            classifier = module.router.classifier.to(module.router.dtype)
            classifier.to = partial(_same, classifier)  # it would be converted at each call
        elif type(module).__name__ == "DbrxFFN":
            if named(module.experts.mlp.activation_fn) is not None:
                module.experts = DbrxExperts(module.experts)
        elif hasattr(module, "is_concatenated") and not module.has_post_expert_norm:
            module.how = activation(module)
            if module.how is not None:
                module.config._experts_implementation = NAME


def _same(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    return module


def _note_length(
    experts: Stacked, router: torch.nn.Module, given: tuple[torch.Tensor, ...], found: object
) -> None:
    """An expert's capacity is of each sequence, and experts see all tokens in a row."""
    experts.length = given[0].shape[1]


def run(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What a module of experts computes, as transformers calls it."""
    inputs, dtype = getattr(self, "inputs", None), hidden_states.dtype
    up = dense(self.gate_up_proj if self.has_gate else self.up_proj, inputs)
    down = dense(self.down_proj, inputs)
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases: dict[str, torch.Tensor] = {}
    if self.has_bias:
        up_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        biases = {"up_bias": up_bias, "down_bias": self.down_proj_bias}
    if inputs is not None:
        hidden_states = hidden_states.to(inputs)
    mixed = (hidden_states, top_k_index, top_k_weights, up, down)
    return experts(*mixed, **biases, **self.how, dtype=dtype if inputs else None)


def activation(module: Any) -> dict[str, Any] | None:
    """The attributes of `t.Experts` that say what the module does between its products, found by
    trying: its own code runs on a few numbers beside ours."""
    rows = torch.linspace(-12, 12, 32).reshape(2, 16)
    rows = torch.stack((rows, rows.flip(0, 1)))
    try:
        wanted = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    except Exception:  # it wants more than rows
        return None
    for how in candidates(module):
        ours = gated(rows, **how) if module.has_gate else ACTIVATIONS[how["fn"]](rows)
        if torch.allclose(ours, wanted, rtol=1e-4, atol=1e-5):
            return how
    return None


def candidates(module: Any) -> Iterator[dict[str, Any]]:
    def numbers(name: str, default: float | None) -> list[Any]:
        found = (getattr(module, key, None) for key in (name, f"swiglu_{name}"))
        return [default, *(n for n in found if isinstance(n, int | float))]

    for fn, interleaved, alpha, beta, limit in product(
        ACTIVATIONS, (False, True), numbers("alpha", 1.0), (0.0, 1.0), numbers("limit", None)
    ):
        yield {
            "fn": fn,
            "interleaved": interleaved,
            "alpha": float(alpha),
            "beta": beta,
            "limit": None if limit is None else float(limit),
        }


class Stacked(torch.nn.Module):
    """Switch Transformer's experts with their matrices in one tensor each, so that all of them are
    one call. A token beyond an expert's capacity has no expert: of a sequence of `length` tokens,
    which are expected to spread evenly, each takes `capacity` at most."""

    def __init__(self, apart: Any, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0
        each = list(apart.values())
        self.up = torch.nn.Parameter(torch.stack([x.wi.weight for x in each]))
        self.down = torch.nn.Parameter(torch.stack([x.wo.weight for x in each]))
        self.fn = named(each[0].act)

    def forward(
        self, hidden_states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        which, shares = selected.argmax(-1), weights * selected.sum(-1)
        count, length = len(self.up), max(self.length, 1)
        rows = min(length // count, self.capacity) * (len(hidden_states) // length)
        mixed = (hidden_states, which, shares, self.up, self.down)
        return experts(*mixed, fn=self.fn, each=[rows] * count if rows else None)


class DbrxExperts(torch.nn.Module):
    """DBRX's experts: the rows of a gate and those it lets through, which are apart in its own
    matrices, in one tensor; the rows of each matrix are an expert's behind another's."""

    def __init__(self, own: Any):
        super().__init__()
        mlp, shape = own.mlp, (own.num_experts, own.ffn_hidden_size, own.hidden_size)
        gate, up, down = (w.detach().view(shape) for w in (mlp.w1, mlp.v1, mlp.w2))
        self.up = torch.nn.Parameter(torch.cat((gate, up), 1))
        self.down = torch.nn.Parameter(down)
        self.fn = named(mlp.activation_fn)

    def forward(
        self, hidden_states: torch.Tensor, which: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        down = self.down.transpose(1, 2)
        return experts(rows, which, shares, self.up, down, fn=self.fn).view_as(hidden_states)


def named(activation: Any) -> str | None:
    """What `t.Experts` calls a function between its products; None for one it does not know."""
    return next((name for name, f in ACTIVATIONS.items() if matches(f, activation)), None)


def matches(ours: Any, theirs: Any) -> bool:
    numbers = torch.linspace(-6, 6, 16)
    return torch.allclose(ours(numbers), theirs(numbers), rtol=1e-4, atol=1e-5)
