"""Every form of a plan by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuir.backends.plans.deepspeed import deepspeed
from gpuir.backends.plans.megatron import megatron
from gpuir.backends.plans.pytorch import pytorch
from gpuir.backends.plans.record import TrainingPlan, plan_json

PLAN_FORMATS: Mapping[str, Callable[[TrainingPlan], str]] = {
    "plan": plan_json,
    "pytorch": pytorch,
    "megatron": megatron,
    "deepspeed": deepspeed,
}
