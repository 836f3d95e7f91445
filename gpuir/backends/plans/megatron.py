"""A plan as arguments of Megatron-LM.

Their names are those of Megatron-LM's `megatron/training/arguments.py`; ranks lie in the order of
megatron-core's `parallel_state.py` (tp-cp-ep-dp-pp), which is gpuir's too; what sharded data
parallelism asks for is in Megatron-FSDP's user guide.
"""

from __future__ import annotations

from gpuir.backends.plans.record import TrainingPlan

SHARDED = {2: "optim_grads", 3: "optim_grads_params"}  # the strategy by the stage of ZeRO

EXCHANGES = {"heads": "a2a", "keys": "all_gather", "ring": "p2p"}


def megatron(plan: TrainingPlan) -> str:
    """Arguments for Megatron-LM's training scripts, as an array of the shell."""
    p = plan.parallel
    given = [
        f"--tensor-model-parallel-size {p.tp}",
        f"--pipeline-model-parallel-size {p.pp}",
        f"--context-parallel-size {p.cp}",
        f"--expert-model-parallel-size {p.ep}",
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {plan.batch}",
    ]
    notes: list[str] = []
    if p.cp > 1 and p.exchange:
        given.append(f"--cp-comm-type {EXCHANGES[p.exchange]}")
    if p.sequence and p.tp > 1:
        given.append("--sequence-parallel")
        if p.overlap:
            given.append("--tp-comm-overlap")
    if p.dp * p.ep * p.cp > 1:
        given.append("--overlap-grad-reduce")
    if p.zero:
        given += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if p.zero > 1:
        given += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {SHARDED[p.zero]}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
        ]
    if p.zero and p.cp * p.ep > 1:
        notes.append(
            f"ZeRO: Megatron-LM cuts over the {p.dp * p.ep * p.cp} ranks of dp, ep and cp"
            f" together, the plan over dp={p.dp}"
        )
    if p.ep > 1 and p.cp > 1:
        notes.append(
            "experts: Megatron-LM lays its groups of experts over the ranks of contexts too, the "
            "plan keeps cp and ep apart"
        )
    if plan.recompute:
        given += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    if p.pp > 1:
        match p.schedule:
            case "interleaved":
                given.append(f"--num-virtual-stages-per-pipeline-rank {p.chunks}")
            case "gpipe" | "zero-bubble":
                notes.append(
                    f"the schedule {p.schedule}: Megatron-LM has 1F1B and interleaved 1F1B; these "
                    "arguments run 1F1B"
                )
            case "1f1b":
                pass
    lines = [f"# {plan.title}", *(f"# not as planned: {x}" for x in notes), "PARALLEL_ARGS=("]
    return "\n".join((*lines, *(f"    {x}" for x in given), ")", ""))
