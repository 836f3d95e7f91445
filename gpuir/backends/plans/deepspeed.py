"""A plan as DeepSpeed's configuration file.

Its keys are those of DeepSpeed 0.19: `deepspeed/runtime/config.py`, `runtime/tensor_parallel/
config.py`, `module_inject/auto_ep_config.py`; what pipelines take is in `runtime/pipe/engine.py`.
"""

from __future__ import annotations

import json
from typing import Any

from gpuir.backends.plans.record import TrainingPlan

NOTES_AT = "gpuir"  # a key that DeepSpeed passes over


def deepspeed(plan: TrainingPlan) -> str:
    """DeepSpeed's configuration file. What is said elsewhere (pipelines in code) or not at all is
    under the key `gpuir`, which DeepSpeed passes over."""
    p = plan.parallel
    zero, notes = p.zero, list[str]()
    if p.pp > 1:
        notes.append(
            f"pipeline: the model is to be a deepspeed.pipe.PipelineModule(num_stages={p.pp})"
        )
        if p.schedule != "1f1b":
            notes.append(
                f"not as planned: the schedule {p.schedule}; a PipelineModule runs 1F1B"
                + (f", with one group of layers a rank and not {p.chunks}" * (p.chunks > 1))
            )
        if zero > 1:
            notes.append(
                f"not as planned: ZeRO stage {zero}; DeepSpeed refuses 2 and 3 with pipelines, and "
                "stage 1 is written here"
            )
            zero = 1
        if p.tp > 1:
            notes.append(
                "tensor_parallel: AutoTP is not for a PipelineModule; its layers are to be cut "
                f"{p.tp} ways by the model itself, with an mpu"
            )
    if p.sequence and p.tp > 1:
        notes.append(
            "not as planned: sequence; AutoTP keeps norms and residuals whole on each rank"
        )
    if p.overlap:
        notes.append("not as planned: overlap; AutoTP waits for its all-reduces")
    if p.cp > 1 and p.exchange != "heads":
        notes.append(
            "not as planned: cp; DeepSpeed-Ulysses exchanges heads by all-to-all, the plan passes "
            "keys and values around"
        )
    if p.zero and p.cp * p.ep > 1:
        notes.append(
            f"not as planned: ZeRO over dp={p.dp}; DeepSpeed cuts over the ranks of cp and ep too"
        )
    if plan.recompute:
        notes.append(
            "recompute: the model is to checkpoint each of its blocks itself, by "
            "deepspeed.checkpointing.checkpoint"
        )
    config: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.microbatch,
        "gradient_accumulation_steps": p.microbatches,
        "zero_optimization": {"stage": zero, "overlap_comm": True},
    }
    if p.tp > 1 and p.pp == 1:
        config["tensor_parallel"] = {"autotp_size": p.tp}
    if p.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": p.ep}
    if p.cp > 1:
        config |= {"sequence_parallel_size": p.cp, "data_parallel_size": p.dp * p.ep}
    config[NOTES_AT] = {"plan": plan.title, "notes": notes}
    return json.dumps(config, indent=1) + "\n"
