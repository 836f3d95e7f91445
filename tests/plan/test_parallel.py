"""The search for a parallel plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gpuir
from gpuir.cli.main import main
from gpuir.cli.plan import measured
from gpuir.ir.errors import UsageError
from gpuir.passes.microbatch import Microbatch
from gpuir.plan.parallel import Choice, Model, least_bytes, least_s, search, space
from gpuir.simulate.parallel import Parallel

ENCODER = Path(__file__).parents[1] / "encoder.onnx"
CLUSTER = "4xa100-sxm"
LIMITS = {"microbatch": (8,), "zero": (0, 3)}


@pytest.fixture(scope="module")
def training() -> gpuir.Graph:
    return gpuir.load(ENCODER, dims={"batch": 32, "seq": 256}, train=True, optimizer="adamw")


@pytest.fixture(scope="module")
def steps(training: gpuir.Graph):
    """Steps by choice, each simulated once."""
    known: dict[Choice, gpuir.Step] = {}

    def simulate(choice: Choice) -> gpuir.Step:
        if choice not in known:
            g = Microbatch(choice.parallel.microbatches).run(training)
            known[choice] = gpuir.simulate_ranks(g, CLUSTER, choice.parallel)
        return known[choice]

    return simulate


def the_model(training: gpuir.Graph) -> Model:
    return measured(training, gpuir.load_cluster(CLUSTER), 32)


def test_bounds_leave_out_nothing_that_would_win(training: gpuir.Graph, steps):
    model = the_model(training)
    choices = list(space(model, LIMITS, recompute=(False,)))
    assert len(choices) > 6
    every = search(choices, model, steps, exhaustive=True)
    some = search(choices, model, steps)
    assert every.simulated == len(choices) > some.simulated
    assert some.best[0] == every.best[0]
    times = {x.choice: x for x in every.tried}
    for x in some.tried:
        assert x.time_s <= times[x.choice].time_s * (1 + 1e-9)
        assert least_s(x.choice, model) <= times[x.choice].time_s
    for x in every.best:
        others = [y for y in every.tried if y != x]
        assert least_bytes(x.choice, model) <= least_bytes(x.choice, model, others) <= x.held_bytes
        assert least_s(x.choice, model, others) <= x.time_s


def test_what_does_not_fit_loses_by_memory(training: gpuir.Graph, steps):
    model = the_model(training)
    least = least_bytes(Choice(Parallel(dp=4, zero=3)), model)
    small = replace(model, available_bytes=int(1.5 * least))
    found = search(list(space(small, LIMITS, recompute=(False,))), small, steps)
    out = [x for x in found.tried if x.why == "memory: weights and states"]
    assert out and all(not x.choice.parallel.zero for x in out if x.choice.parallel.dp == 4)


def test_every_choice_uses_all_gpus_and_divides_the_batch(training: gpuir.Graph):
    model = the_model(training)
    for choice in space(model, {"tp": (2,), "dp": (2,)}):
        p = choice.parallel
        assert p.ranks == 4 and p.tp == 2 and p.dp == 2
        assert model.batch % (p.dp * p.microbatches) == 0
    with pytest.raises(UsageError, match="no plan uses all GPUs"):
        search(space(model, {"tp": (3,)}), model, lambda _: pytest.fail("nothing to simulate"))


def run(*args: str) -> Result:
    common = ["plan", str(ENCODER), "--cluster", CLUSTER, "--train", "--optimizer", "adamw"]
    common += ["--dims", "batch=32,seq=256", "--microbatch", "8", "--tp", "1,2", "--pp", "1"]
    return CliRunner().invoke(main, [*common, "--recompute", "never", *args])


def test_a_search_goes_on_from_its_file(tmp_path: Path):
    kept = tmp_path / "plan.jsonl"
    first = run("--resume", str(kept), "--format", "json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    lines = kept.read_text().splitlines()
    assert found["simulated"] == len(lines) - 1 > 0
    kept.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:30])  # stopped while writing
    again = json.loads(run("--resume", str(kept), "--format", "json").stdout)
    assert again["simulated"] == 1 and again["plans"] == found["plans"]
    other = run("--resume", str(kept), "--dims", "seq=128")
    assert other.exit_code == 2 and "this search is of something else" in other.output


def test_the_report_says_why_others_lost():
    text = run("--width", "100", "--microbatch", "1,8", "--pp", "1,2").stdout
    assert "best" in text and "MFU" in text and "Why the others lost" in text
    megatron = run("--format", "megatron").stdout
    assert "--tensor-model-parallel-size" in megatron
    assert run("--format", "nothing").exit_code == 2
