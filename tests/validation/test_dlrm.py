"""Training iterations as `gpuir eval dlrm` builds and scores them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import gpuir
from gpuir.backends.structured import to_json
from gpuir.backends.terminal import Terminal
from gpuir.cli.main import main
from gpuir.ir.errors import UsageError
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from validation import convnets, dlrm, recommenders, sharded
from validation.dlrm import Case, Result, Table, predicted, read, scores
from validation.models import is_loss

MEASURED = Path(__file__).parents[3] / "shared/data/kernels/dlrm_e2e.csv"
HEAD = ",".join((*dlrm.COLUMNS, *dlrm.PUBLISHED[:3])) + "\n"
SMALL = recommenders.Recommender((4, 8, 8), (16, 1), 2, 8, 3, 100)


@pytest.fixture(scope="module")
def step() -> gpuir.Graph:
    return gpuir.analyze(recommenders.step(SMALL, 5), "v100-sxm-16gb", profile="eager").graph


def test_lines_are_cases_or_say_why_not(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_text(
        HEAD
        + "V100,DLRM_default,512,train,4.0,-7,25,-50\n"
        + "V100,DLRM_default,512,inf,4.0,,,\n"
        + "V100,mystery,512,train,4.0,,,\n"
        + "nobody's,DLRM_default,512,train,4.0,,,\n"
        + "V100,DLRM_default,0.5,train,4.0,,,\n"
    )
    (case,), skipped = read(path)
    assert (case.batch, case.measured_s, case.published) == (512, pytest.approx(4e-3), -7)
    # Theirs is half of the iteration, and a quarter above the device's measured time.
    assert case.active_s == pytest.approx(4e-3 * 0.5 / 1.25)
    assert sum(skipped.values()) == 4
    assert any("mystery" in why for why in skipped)


def test_another_table_is_refused(tmp_path: Path):
    (path := tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a table of training iterations"):
        read(path)
    result = CliRunner().invoke(main, ["eval", "dlrm"])
    assert result.exit_code == 2 and "Missing argument 'FILES...'" in result.stderr


def test_no_table_has_a_gradient_and_each_tensor_has_launches(step: gpuir.Graph):
    dense = [v for v in step.params if v.name.endswith(".grad")]
    assert not any("tables" in v.name for v in dense)
    for place in (":zero_grad", ":sgd/optimizer"):
        nodes = [n for n in step.nodes if n.locs[0].endswith(place)]
        assert len(nodes) == len(dense) == 8


def test_an_iteration_is_two_spans_and_the_loss_ends_the_first(step: gpuir.Graph):
    first, second = recommenders.spans(step)
    assert (*first.nodes, *second.nodes) == step.nodes
    assert first.nodes[-1].locs == ("Dlrm:loss/binary_cross_entropy.mean",)
    assert recommenders.is_clearing(second.nodes[0])


def test_scores_are_by_family_and_gpu():
    def result(gpu: str, off: float) -> Result:
        case = Case(gpu, gpu, "DLRM_x", 1, 1.0, 0.5, 10, 5)
        return Result(case, 1 + off, 0.5 * (1 - off), (0.95 + off, 1.05 + off), 1)

    table = Table("t", (result("a", 0.04), result("a", -0.09), result("b", 0.0)), {})
    found = {(e.op, e.device): e for e in scores(table)}
    end = found["DLRM iteration", "a"]
    assert (end.n, end.coverage) == (2, 50)
    assert end.gmape == pytest.approx(6) and end.mape == pytest.approx(6.5)
    assert end.bias == pytest.approx(-2.5) and end.published_mape == 10
    assert found["DLRM active", "a"].bias == pytest.approx(2.5)
    assert found["DLRM iteration", "b"].gmape == dlrm.LEAST_APE
    assert found["DLRM iteration", "all"].n == 3
    rows = json.loads(to_json(dlrm.report([table]), Terminal()))["rows"]
    assert {"file", "op", "target", "n", "mape", "median_ape", "bias", "coverage"} <= set(rows[0])


@pytest.mark.skipif(not MEASURED.exists(), reason="the measurements are not here")
@pytest.mark.slow
def test_measured_iterations_are_met():
    """The largest and the smallest batch on each GPU: 6 % in the geometric mean of eight."""
    cases = [c for c in read(MEASURED)[0] if c.batch in (512, 4096) and c.model != "DLRM_MLPerf"]
    results = tuple(map(predicted, cases))
    table = Table("", results, {})
    errors = {(e.op, e.device): e for e in scores(table)}["DLRM iteration", "all"]
    assert errors.n == 8
    assert errors.gmape < 6
    assert all(r.active_s < r.time_s for r in results)
    assert not math.isnan(errors.bias)


# ---- tables over many GPUs

SHARDED = MEASURED.parents[1] / "training/embedding_sharding.csv"
STEPS = """id,model,gpu,gpus,gpus_per_node,dtype,placement,global_batch,step_time_s
a,dlrm-mine,A100-SXM4-80GB,1,8,tf32,one GPU,4096,0.002
b,dlrm-mine,A100-SXM4-80GB,8,8,tf32,whole tables,4096,0.001
c,dlrm-mine,nobody's,8,8,tf32,whole tables,4096,0.001
"""
TWO = {
    "mine": {
        "tables": [
            {
                "count": 2,
                "features_per_table": 1,
                "lookups_per_feature": [1],
                "rows": n,
                "width": 16,
            }
            for n in (1000, 500_000)
        ],
        "numerical_features": 13,
        "bottom_mlp": [32, 16],
        "top_mlp": [64, 1],
    }
}


def test_steps_over_many_gpus_are_predicted_by_part(tmp_path: Path):
    (tmp_path / "steps.csv").write_text(STEPS)
    (tmp_path / "embedding_models.json").write_text(json.dumps(TWO))
    result = CliRunner().invoke(main, ["eval", "dlrm", str(tmp_path / "steps.csv"), "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    one, eight = found["cases"]
    assert set(one["parts"]) < set(eight["parts"])
    assert one["parts"]["all-to-all"] == 0 < eight["parts"]["all-to-all"]
    assert one["predicted_s"] == pytest.approx(sum(one["parts"].values()), rel=1e-4)
    assert eight["parts"]["lookups"] < one["parts"]["lookups"]
    (everywhere,) = (r for r in found["rows"] if r["device"] == "all")
    assert everywhere["op"] == "sharded step, PyTorch" and everywhere["n"] == 2
    assert list(found["files"][0]["skipped"].values()) == [1]


def test_models_of_steps_are_asked_for(tmp_path: Path):
    (tmp_path / "steps.csv").write_text(STEPS)
    result = CliRunner().invoke(main, ["eval", "dlrm", str(tmp_path / "steps.csv")])
    assert result.exit_code == 2 and "--models embedding_models.json" in result.stderr


@pytest.mark.skipif(not SHARDED.exists(), reason="the measurements are not here")
@pytest.mark.slow
def test_published_steps_of_dlrm_are_met():
    models = sharded.read_models(SHARDED.with_name("embedding_models.json"))
    runs = [r for r in sharded.read(SHARDED, models)[0] if r.model.startswith("dlrm")]
    found = [*sharded.forecast(runs, models)]
    assert len(found) == 14
    assert sum(abs(f.error) for f in found) / len(found) < 20
    right, pairs = sharded.in_order(found)
    assert right / pairs > 0.6


def test_convolutional_nets_are_timed_in_three_spans(monkeypatch: pytest.MonkeyPatch):
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
            self.loss = nn.CrossEntropyLoss()

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.loss(self.net(images), labels)

    args = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    monkeypatch.setattr(convnets, "program", lambda name, batch: (Net(), args))
    g = convnets.step("small", 2)
    costed = gpuir.analyze(g, "v100-sxm-16gb", profile="eager").graph
    forward, backward, optimizer = convnets.spans(costed)
    assert sum(len(s.nodes) for s in (forward, backward, optimizer)) == len(costed.nodes)
    assert all(phase_of(n) is None and not is_loss(n) for n in forward.nodes)
    assert any(is_loss(n) for n in backward.nodes)
    assert {phase_of(n) for n in optimizer.nodes} == {"optimizer"}


def test_inception_v3_has_its_papers_sizes():
    import torch

    with torch.device("meta"):
        net, images = convnets.inception_v3(), torch.zeros(2, 3, 299, 299)
        early = net.early(net.stem(images))
        assert early.shape == (2, 768, 17, 17)
        assert net.late(early).shape == (2, 2048, 8, 8)
        logits, auxiliary = net(images)
    assert logits.shape == auxiliary.shape == (2, 1000)
    assert isinstance(net.eval()(images), torch.Tensor)
    params = {name: p.numel() for name, p in net.named_parameters()}
    assert sum(params.values()) == 27_161_264
    head = sum(n for name, n in params.items() if name.startswith("auxiliary"))
    assert sum(params.values()) - head == 23_834_568


@pytest.mark.slow
def test_inception_v3_is_trained_without_its_auxiliary_head():
    g = convnets.step("Inception-V3", 2)
    assert sum(isinstance(n.op, t.Conv) for n in g.nodes) == 94
    assert not any("auxiliary" in v.name for v in g.outputs)
