"""Plans: as JSON and back, and as what PyTorch, Megatron-LM and DeepSpeed take for the same."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import gpuir
from gpuir.backends.plans.cuts import CUT_KINDS, module_cuts
from gpuir.backends.plans.deepspeed import deepspeed
from gpuir.backends.plans.megatron import megatron
from gpuir.backends.plans.pytorch import pytorch
from gpuir.backends.plans.record import TrainingPlan, plan_json, read_plan
from gpuir.backends.plans.table import PLAN_FORMATS
from gpuir.cli.main import main
from gpuir.ir.errors import UsageError
from gpuir.ops import tensor as t
from gpuir.simulate.parallel import Parallel

ENCODER = Path(__file__).parents[2] / "tests" / "encoder.onnx"
DEGREE = st.integers(1, 4)
PARALLEL = st.builds(
    Parallel,
    dp=DEGREE,
    tp=DEGREE,
    pp=DEGREE,
    cp=DEGREE,
    ep=DEGREE,
    zero=st.integers(0, 3),
    sequence=st.booleans(),
    overlap=st.booleans(),
    microbatches=DEGREE,
    schedule=st.sampled_from(("gpipe", "1f1b", "interleaved", "zero-bubble")),
    chunks=DEGREE,
    exchange=st.sampled_from(("", "heads", "keys", "ring")),
)


@st.composite
def plans(draw: st.DrawFn) -> TrainingPlan:
    p = draw(PARALLEL)
    batch = p.dp * p.ep * p.microbatches * draw(DEGREE)
    cuts = draw(st.dictionaries(st.text(), st.sampled_from(CUT_KINDS)))
    texts = draw(st.text()), draw(st.text())
    return TrainingPlan(p, batch, *texts, tuple(cuts.items()), draw(st.booleans()))


# ---- JSON ----------------------------------------------------------------------------------------


@given(plans())
def test_a_plan_reads_back(plan: TrainingPlan):
    assert read_plan(plan_json(plan)) == plan


def test_a_plan_by_hand_needs_little():
    text = '{"schema": "gpuir.plan/1", "batch": 16, "parallel": {"dp": 4, "zero": 1}}'
    assert read_plan(text) == TrainingPlan(Parallel(dp=4, zero=1), 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "gpuir.plan/2"}, "not a plan"),
        ({"parallel": {"dq": 2}}, "did you mean"),
        ({"parallel": {"dp": 0}}, "dp is not a valid number"),
        ({"parallel": {"dp": True}}, "dp is not a valid number"),
        ({"parallel": {"zero": 4}}, "the stage of ZeRO is unknown"),
        ({"parallel": {"schedule": "1f2b"}}, "the schedule is unknown"),
        ({"parallel": {"schedule": ["1f1b"]}}, "the schedule is unknown"),
        ({"parallel": {"sequence": 1}}, "sequence"),
        ({"parallel": 8}, "no degrees"),
        ({"ranks": 3}, "the product of the degrees is not the number"),
        ({"order": ["dp", "tp"]}, "the order of ranks differs"),
        ({"order": 3}, "the order of ranks differs"),
        ({"recompute": "try"}, "recompute must be true or false"),
        ({"cuts": ["fc"]}, "the cuts must be an object with modules as"),
        ({"cuts": {"fc": "col"}}, "the cut of 'fc' is unknown"),
        ({"batch": "8"}, "batch is not a valid number"),
        ({"batch": 7}, "8"),
        ({"model": 3}, "model must be text"),
        ({"btach": 8}, "did you mean batch"),
    ],
)
def test_what_is_no_plan_is_refused(change: dict[str, Any], says: str):
    good = {"schema": "gpuir.plan/1", "batch": 8, "parallel": {"dp": 2, "microbatches": 4}}
    with pytest.raises(UsageError, match=says):
        read_plan(json.dumps(good | change))


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_what_is_no_object_is_refused(text: str):
    with pytest.raises(UsageError):
        read_plan(text)


def test_a_batch_that_does_not_divide_has_neighbours_that_do():
    with pytest.raises(UsageError, match="96 or 128"):
        TrainingPlan(Parallel(dp=4, microbatches=8), 100)


# ---- Megatron-LM ---------------------------------------------------------------------------------


def megatron_arguments(plan: TrainingPlan) -> argparse.Namespace:
    """What a shell makes of the text, parsed as Megatron-LM's `arguments.py` declares it."""
    script = f'{megatron(plan)}\nprintf "%s\\n" "${{PARALLEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in (
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "expert-model-parallel-size",
        "micro-batch-size",
        "global-batch-size",
        "num-virtual-stages-per-pipeline-rank",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "sequence-parallel",
        "tp-comm-overlap",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "no-gradient-accumulation-fusion",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", choices=("uniform", "block"))
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--cp-comm-type", choices=("p2p", "a2a", "all_gather", "a2a+p2p"))
    parser.add_argument("--data-parallel-sharding-strategy", choices=strategies)
    parser.add_argument("--ckpt-format", choices=("torch_dist", "fsdp_dtensor"))
    return parser.parse_args(done.stdout.split())


def test_megatron_gets_the_degrees_the_batch_and_the_schedule():
    p = Parallel(
        dp=2, tp=4, pp=2, zero=1, sequence=True, microbatches=8, schedule="interleaved", chunks=3
    )
    found = megatron_arguments(TrainingPlan(p, 64, "GPT `x` $(false) \n#", "dgx-a100"))
    assert found.tensor_model_parallel_size == 4
    assert found.pipeline_model_parallel_size == 2
    assert found.num_virtual_stages_per_pipeline_rank == 3
    assert (found.micro_batch_size, found.global_batch_size) == (4, 64)
    assert found.sequence_parallel and not found.tp_comm_overlap
    assert megatron_arguments(TrainingPlan(replace(p, overlap=True), 64)).tp_comm_overlap
    assert found.use_distributed_optimizer
    assert not found.use_megatron_fsdp


def test_megatron_gets_what_contexts_exchange():
    found = [
        megatron_arguments(TrainingPlan(Parallel(cp=2, exchange=x), 8))
        for x in ("", "keys", "ring")
    ]
    assert [x.cp_comm_type for x in found] == [None, "all_gather", "p2p"]
    assert "not as planned" not in PLAN_FORMATS["deepspeed"](
        TrainingPlan(Parallel(cp=2, exchange="heads"), 8)
    )


@pytest.mark.parametrize(("zero", "strategy"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_shards_gradients_and_weights(zero: int, strategy: str):
    found = megatron_arguments(TrainingPlan(Parallel(dp=8, zero=zero), 8))
    assert found.use_megatron_fsdp
    assert found.data_parallel_sharding_strategy == strategy


# ---- what a framework cannot do is said ----------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "parallel", "says"),
    [
        ("megatron", Parallel(pp=4, schedule="zero-bubble", microbatches=8), "zero-bubble"),
        ("megatron", Parallel(pp=4, schedule="gpipe", microbatches=8), "gpipe"),
        ("megatron", Parallel(dp=2, ep=2, zero=1), "ZeRO"),
        ("megatron", Parallel(cp=2, ep=2), "experts"),
        ("deepspeed", Parallel(pp=4, schedule="zero-bubble", microbatches=8), "zero-bubble"),
        ("deepspeed", Parallel(pp=2, dp=2, zero=3), "ZeRO stage 3"),
        ("deepspeed", Parallel(tp=2, sequence=True), "sequence"),
        ("deepspeed", Parallel(tp=2, sequence=True, overlap=True), "overlap"),
        ("deepspeed", Parallel(cp=2), "Ulysses"),
        ("pytorch", Parallel(ep=2), "ep"),
        ("pytorch", Parallel(cp=2), "cp"),
        ("pytorch", Parallel(dp=2, cp=2, zero=3), "ZeRO"),
        ("pytorch", Parallel(dp=2, microbatches=4), "microbatches"),
    ],
)
def test_what_a_framework_does_otherwise_is_said(framework: str, parallel: Parallel, says: str):
    text = PLAN_FORMATS[framework](TrainingPlan(parallel, 64))
    [line] = [x for x in text.splitlines() if "not as planned" in x and says in x]
    assert line


@pytest.mark.parametrize("framework", ["megatron", "pytorch", "deepspeed"])
def test_blocks_computed_again_are_said(framework: str):
    text = PLAN_FORMATS[framework](TrainingPlan(Parallel(dp=4), 64, recompute=True))
    assert "recompute" in text and "computed again" in text
    assert "recompute" not in PLAN_FORMATS[framework](TrainingPlan(Parallel(dp=4), 64))


@pytest.mark.parametrize("framework", ["megatron", "pytorch", "deepspeed"])
def test_what_all_can_do_needs_no_remark(framework: str):
    text = PLAN_FORMATS[framework](TrainingPlan(Parallel(dp=4, tp=2, zero=1), 64))
    assert "not as planned" not in text


# ---- PyTorch -------------------------------------------------------------------------------------

TRY = """
import sys, json
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

def whole(rank, ranks, text, layers):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    plan = {}
    exec(compile(text.replace('"cuda"', '"cpu"'), "plan.py", "exec"), plan)
    mesh = plan["mesh"]
    found = {"axes": dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))}
    found["data"] = plan["data"].size() if "data" in plan else 1
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if "cut" in plan:
        parallel = plan["parallel"]
        styles = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
        model = plan["cut"](model, styles)
    if "spread" in plan:
        blocks = ([model[0], model[2]],) if "fully_shard" in plan else ()
        model = plan["spread"](model, *blocks)
    if "optimizer" in plan:
        found["optimizer"] = type(plan["optimizer"](model, torch.optim.AdamW, lr=1e-3)).__name__
    weight = next(model.parameters())
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    found["weight"] = list(local.shape)
    found["kind"] = type(model).__name__
    if "schedule" in plan:
        stages = [plan["stage"](nn.Linear(4, 4), *((c,) if c else ())) for c in range(layers)]
        found["stages"] = [x.stage_index for x in stages]
        found["schedule"] = type(plan["schedule"](stages, nn.MSELoss())).__name__
        found["microbatches"] = plan["schedule"](stages, nn.MSELoss())._n_microbatches
    torch.distributed.destroy_process_group()
    return found

print(json.dumps([whole(*case) for case in json.load(sys.stdin)]))
"""
SHARDED = Parallel(dp=2, tp=2, zero=3)
CASES: list[tuple[int, Parallel]] = [
    (3, SHARDED),
    (1, Parallel(dp=2, tp=2, zero=2)),
    (5, Parallel(dp=2, tp=2, cp=2)),
    (2, Parallel(dp=4, zero=1)),
    (6, Parallel(dp=2, tp=2, pp=2, microbatches=4)),
    (1, Parallel(pp=2, microbatches=4, schedule="gpipe")),
    (1, Parallel(pp=2, microbatches=4, schedule="interleaved", chunks=2)),
    (1, Parallel(pp=2, microbatches=4, schedule="zero-bubble")),
    (0, Parallel()),
    (11, Parallel(tp=2, cp=2, dp=2, pp=2, ep=2, zero=3, sequence=True, microbatches=2)),
]


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    """What PyTorch makes of each case, on a rank of a process group that sends nothing."""
    given = [
        (rank, p.ranks, pytorch(TrainingPlan(p, 64, 'a "b" \\', "c")), p.chunks)
        for rank, p in CASES
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRY],
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_rank_is_where_it_is_in_the_plan(tried: list[dict[str, Any]]):
    for (rank, p), found in zip(CASES, tried, strict=True):
        stride = 1
        for axis in ("tp", "cp", "ep", "dp", "pp"):
            n = getattr(p, axis)
            group = t.members(rank, (n,), (stride,))
            assert found["axes"].get(axis, 0) == group.index(rank)
            stride *= n


def test_weights_are_cut_as_planned(tried: list[dict[str, Any]]):
    for (_, p), found in zip(CASES, tried, strict=True):
        data = p.dp * p.cp * p.ep
        assert found["data"] == data
        parts = p.tp * (data if p.zero > 1 else 1)
        assert found["weight"] == [32 // parts, 16]
        if data > 1 and p.zero < 2:
            assert found["kind"] == "DistributedDataParallel"
        assert ("optimizer" in found) is (p.zero == 1)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
HALVES = """
import sys, json
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

given = json.load(sys.stdin)
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
plan = {}
exec(given["text"].replace('"cuda"', '"cpu"'), plan)
model = plan["cut"](LlamaForCausalLM(LlamaConfig(**given["config"])))
print(json.dumps({name: list(p.to_local().shape) for name, p in model.named_parameters()
                  if hasattr(p, "to_local")}))
"""


def test_modules_are_cut_in_torch_as_in_the_graph(tmp_path: Path):
    """The real model, cut by the text, has on a rank what the cut graph says."""
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(LLAMA))
    graph = gpuir.load(f"hf:{file}", dims={"batch": 2, "seq": 16}, train=True)
    [part] = gpuir.simulate_ranks(graph, "dgx-a100", Parallel(tp=2)).step.parts
    cut = part.runs[0].graph
    cuts, others = module_cuts(cut)
    assert others == ()
    assert dict(cuts)["model.layers.*.self_attn.o_proj"] == "row"
    assert dict(cuts)["model.layers.*.mlp.up_proj"] == "column"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HALVES],
        input=json.dumps(
            {"text": pytorch(TrainingPlan(Parallel(tp=2), 2, cuts=cuts)), "config": LLAMA}
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    named = {name for name, c in cut.cuts if c.group == "tp"}
    types = {v.name: list(v.type.shape) for v in cut.params if v.name in named}
    assert found == types


def test_a_graph_of_onnx_has_names_of_its_own():
    graph = gpuir.load(ENCODER, dims={"batch": 2, "seq": 16})
    [part] = gpuir.simulate_ranks(graph, "dgx-a100", Parallel(tp=2)).step.parts
    assert module_cuts(part.runs[0].graph) == ((), ())


def test_stages_and_their_order(tried: list[dict[str, Any]]):
    names = {
        "1f1b": "Schedule1F1B",
        "gpipe": "ScheduleGPipe",
        "interleaved": "ScheduleInterleaved1F1B",
        "zero-bubble": "ScheduleInterleavedZeroBubble",
    }
    for (_, p), found in zip(CASES, tried, strict=True):
        if p.pp > 1:
            assert found["schedule"] == names[p.schedule]
            assert found["microbatches"] == p.microbatches
            place = found["axes"]["pp"]
            assert found["stages"] == [place + c * p.pp for c in range(p.chunks)]


# ---- DeepSpeed -----------------------------------------------------------------------------------


@given(plans())
def test_deepspeeds_batches_agree(plan: TrainingPlan):
    found, p = json.loads(deepspeed(plan)), plan.parallel
    ranks = p.dp * p.ep
    assert found["train_batch_size"] == (
        found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * ranks
    )


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(dp=4, tp=2, zero=3, microbatches=2),
        Parallel(dp=2, pp=2, zero=3, microbatches=4, schedule="zero-bubble"),
        Parallel(dp=2, ep=2, zero=1),
    ],
    ids=str,
)
def test_deepspeed_takes_it(parallel: Parallel):
    script = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
given = json.load(sys.stdin)
class Ranks:
    def get_data_parallel_world_size(self):
        return given["ranks"]
import deepspeed.comm as dist
dist.get_rank = lambda *a: 0
found = DeepSpeedConfig(given["config"], mpu=Ranks())
print(json.dumps([found.train_batch_size, int(found.zero_optimization_stage),
    found.tensor_parallel_config.autotp_size, found.expert_parallel_config.autoep_size
    if found.expert_parallel_config else 1]))
"""
    config = json.loads(deepspeed(TrainingPlan(parallel, 64)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=json.dumps({"config": config, "ranks": parallel.dp * parallel.ep}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    batch, stage, tensor, experts = json.loads(done.stdout.splitlines()[-1])
    assert batch == 64
    assert stage == (min(parallel.zero, 1) if parallel.pp > 1 else parallel.zero)
    assert max(tensor, 1) == parallel.tp
    assert experts == parallel.ep


# ---- the command line ----------------------------------------------------------------------------


def test_simulate_writes_the_plan_and_the_traces(tmp_path: Path):
    def run(*more: str) -> Result:
        given = ("simulate", str(ENCODER), "--cluster", "dgx-a100", "--tp", "2", "--dp", "2")
        sizes = ("--microbatches", "2", "--dims", "batch=4,seq=64")
        return CliRunner().invoke(main, (*given, *sizes, *more))

    plan = read_plan(run("--format", "plan").stdout)
    assert plan == TrainingPlan(Parallel(dp=2, tp=2, microbatches=2), 4, "encoder", "dgx-a100")
    for form in ("pytorch", "megatron", "deepspeed"):
        assert run("--format", form).stdout == PLAN_FORMATS[form](plan)
    folder = tmp_path / "traces"
    assert run("--format", "chakra", "-o", str(folder)).exit_code == 0
    assert len([*folder.glob("workload.*.et")]) == 4


def test_a_name_does_not_leave_its_comment():
    assert "\n" not in TrainingPlan(Parallel(), 1, "a\nb\r", "c").title
    assert (
        shlex.split(megatron(TrainingPlan(Parallel(), 1, "a\n--x", "")), comments=True)[0] != "--x"
    )
