"""Whole models against labels: what is read, how each case is built, what is scored."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpuir
from gpuir.fit.score import Errors
from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Level
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ops import tensor as t
from gpuir.targets.load import load_target
from validation import models
from validation.cases import Case, Labels, Predicted, Program, Result, Times

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
CONFIGS: dict[str, dict[str, Any]] = {"bert": BERT, "gpt2": GPT2, "new": {"model_type": "mamba"}}
HEAD = "device,model,mode,seqlen,batch,option,num_layer,e2e_ms,fw_ms,bwall_ms,fw_vs_opsum"
HEAD += ",bwall_vs_opsum,neusight_e2e_ms,neusight_fw_ms,neusight_bwall_ms\n"
LINES = """\
Tesla_V100-PCIE-32GB,bert,inf,16,4,none,2,10,10,,1.0,,12,12,
Tesla_V100-PCIE-32GB,bert,train,16,4,none,2,30,10,20,1.3,0.9,24,9,15
NVIDIA_A100-PCIE-40GB,gpt2,inf,16,4,fusion,2,8,8,,,,,,
AMD_Instinct_MI250,gpt2,inf,16,4,none,2,8,8,,,,10,10,
NVIDIA_A100-SXM4-40GB,gpt2,train,16,4,dp4,,9,,,,,,,
Tesla_V100-PCIE-32GB,opt,inf,16,4,none,2,8,8,,,,,,
Tesla_V100-PCIE-32GB,new,inf,16,4,none,2,8,8,,,,,,
Abacus,gpt2,inf,16,4,none,2,8,8,,,,,,
Tesla_V100-PCIE-32GB,gpt2,inf,16,4,none,2,,,,,,,,
Tesla_V100-PCIE-32GB,gpt2,inf,16,four,none,2,8,8,,,,,,
Tesla_V100-PCIE-32GB,gpt2,inf,0.5,4,none,2,8,8,,,,,,
"""


def labels(folder: Path) -> Labels:
    (folder / "labels.csv").write_text(HEAD + LINES)
    return models.read_labels(str(folder / "labels.csv"), CONFIGS)


def test_lines_are_cases_or_say_why_not(tmp_path: Path):
    table = labels(tmp_path)
    first, second, third, fourth = table.cases
    assert first.program == Program("bert", "inf", 16, 4, masked=True)
    assert first.measured.total_s == 0.010
    assert first.published["neusight"].error(first.measured) == pytest.approx(20.0)
    assert (first.suspect, second.suspect) == ("", "slower than its operators")
    assert (third.profile, first.profile) == ("compiled@2.1", "eager")
    assert fourth.target.name == "mi210"  # one die of two
    assert table.skipped == {
        "option dp4: several GPUs": 1,
        "no config called opt": 1,
        "nobody has said how a mamba of mode inf was run": 1,
        "no target is called Abacus": 1,
        "no measurement": 1,
        "batch is no size": 1,
        "seqlen is no size": 1,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("device,model\n", "no mode, seqlen"), ("", "not a table of whole models")],
)
def test_another_table_is_refused(text: str, message: str, tmp_path: Path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        models.read_labels(str(tmp_path / "t.csv"), CONFIGS)


@pytest.mark.parametrize("text", ["[1]", "{", '{"bert": 3}'])
def test_configs_are_configs(text: str, tmp_path: Path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match=r"not a (JSON|file of configs)"):
        models.read_configs(str(tmp_path / "c.json"))


def test_a_model_is_loaded_as_it_was_measured():
    options = models.load_options(Program("bert", "train", 16, 4, masked=True), BERT)
    assert options["task"] == "pretraining"
    assert options["dims"] == {"batch": 4, "seq": 16}
    assert options["attention"] == "eager"
    assert options["mask"] and options["train"] and options["accumulate"]
    assert "train" not in models.load_options(Program("gpt2", "inf", 16, 4), GPT2)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> gpuir.Graph:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    (folder / "config.json").write_text(json.dumps(BERT))
    options = models.load_options(Program("bert", "train", 16, 4, masked=True), BERT)
    g = gpuir.load(f"hf:{folder}", **options)
    return gpuir.analyze(g, "v100-pcie-32gb", profile="eager", tf32=False).graph


def test_eager_training_launches_what_pytorch_does(step: gpuir.Graph):
    """Of each layer: keys, queries and values of several sequences are copied for bmm, what comes
    out is copied back; the mask is added; every gradient is added to the one that is there."""
    where = "encoder.layer.1.attention.self/"
    forward = [n for n in step.nodes if phase_of(n) is None and where in n.locs[0]]
    launched = [n.op.name for n in forward if n.op.name != "k.view"]
    assert launched.count("k.copy") == 4
    assert launched.count("k.gemm") == 2
    keys = [n for n in forward if getattr(n.op, "apart", 1) > 1]
    assert len(keys) == 1
    assert sum("/add" in n.locs[0] for n in forward) == 1
    added = [n for n in step.nodes if "/accumulate" in n.locs[0]]
    gradients = [v for v in step.params if step.role_of(v) == "gradient"]
    assert len(added) == len(gradients) > 30


def test_forward_and_backward_are_timed_apart_and_the_loss_is_not(step: gpuir.Graph):
    said = models.predicted(step, "eager")
    assert said.times.total_s == pytest.approx(said.times.forward_s + said.times.backward_s)
    assert said.interval is not None and said.interval[0] < said.times.total_s < said.interval[1]
    loss = [n for n in step.nodes if models.is_loss(n)]
    assert {n.op.name for n in loss} >= {"k.reduce"}
    rest = replace(step, nodes=tuple(n for n in step.nodes if n not in loss))
    assert models.predicted(rest, "eager").times == said.times


def test_kernels_are_of_the_kinds_that_traces_have(step: gpuir.Graph):
    seconds = models.predicted(step, "eager").kinds
    parts = {part: {kind for kind, p in seconds if p == part} for part in ("forward", "backward")}
    kinds = {"linear", "matmul", "softmax", "norm", "embedding", "dropout", "copy", "pointwise"}
    assert parts["forward"] == kinds
    assert parts["backward"] == kinds | {"accumulate"}
    costs = (n.cost.time_s for n in step.nodes if n.cost)
    assert sum(seconds.values()) == pytest.approx(sum(costs))


def result(device: str, error: float, suspect: str = "", unseen: float | None = None) -> Result:
    """A case of 1 s whose prediction is off by so many percent."""

    def off(percent: float) -> Predicted:
        return Predicted(Times(1 + percent / 100, 1 + percent / 100))

    program = Program("bert", "inf", 16, 4)
    published = {"neusight": Times(1.1, 1.1)} if error > 0 else {}
    one = Times(1.0, 1.0)
    case = Case(program, device, "none", load_target(device), one, published, {}, suspect)
    return Result(case, off(error), None if unseen is None else off(unseen))


def test_groups_are_by_gpu_and_vendor_with_suspect_cases_apart():
    found = [result("a100-pcie-40gb", e, unseen=2 * e) for e in (10, -20)]
    found += [result("t4", 30), result("mi100", 1), result("t4", 99, "slower than its operators")]
    by = {(g.device, g.suspect): g for g in models.groups(found)}
    assert set(by) == {
        *(("a100-pcie-40gb", False), ("t4", False), ("mi100", False)),
        *(("all NVIDIA", False), ("all AMD", False), ("t4", True), ("all NVIDIA", True)),
    }
    own = by["a100-pcie-40gb", False].errors
    assert own["gpuir"] == Errors(2, *map(pytest.approx, (15.0, 15.0, 19.0, -5.0)))
    assert own["unseen"].mape == pytest.approx(30.0)
    assert own["neusight"].n == 1  # on the cases that it has
    assert by["all NVIDIA", False].errors["gpuir"].mape == pytest.approx(20.0)
    assert not math.isnan(by["t4", True].errors["gpuir"].p90_ape)


def test_a_program_is_predicted_on_all_gpus_before_the_next(tmp_path: Path):
    cases = labels(tmp_path).cases
    order: list[str] = []

    def predict(case: Case) -> tuple[Predicted, None]:
        order.append(str(case.program))
        return Predicted(case.measured), None

    found = list(models.results([cases[2], cases[0], cases[3]], predict))
    assert order == ["gpt2 inf 4x16", "gpt2 inf 4x16", "bert inf 4x16"]
    assert [r.predicted.times.error(r.case.measured) for r in found] == [0.0] * 3


def test_inputs_of_ones_choose_one_expert():
    """As many tokens of each sequence as its capacity takes; others get none. Dropout spreads them,
    not evenly."""
    b = Builder(Level.graph, "g")
    x = b.input("x", TensorType((16, 4), f32))
    which = b.input("which", TensorType((16, 1), i64))
    shares = b.input("shares", TensorType((16, 1), f32))
    up, down = (
        b.param(name, TensorType(shape, f32))
        for name, shape in (("up", (2, 8, 4)), ("down", (2, 4, 8)))
    )
    g = b.finish((b(t.Experts(x, which, shares, up, down, fn="relu", each=(6, 6))),))
    program = Program("switch", "inf", 8, 2, False)
    (node,) = models.as_measured(g, program, {"expert_capacity": 5}).nodes
    assert isinstance(node.op, t.Experts) and node.op.each == (10, 0)
    (node,) = models.as_measured(g, replace(program, mode="train"), {"expert_capacity": 5}).nodes
    assert isinstance(node.op, t.Experts) and node.op.each == (3, 3)
    assert models.as_measured(g, program, {}) is g
