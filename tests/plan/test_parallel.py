"""The search for a parallel plan."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gpuir
from gpuir.cli.main import main
from gpuir.cli.plan import measured
from gpuir.passes.microbatch import Microbatch
from gpuir.plan.parallel import Choice, ModelBounds, least_bytes, least_s, search, space
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
    known: dict[Choice, gpuir.Answer] = {}

    def simulate(choice: Choice) -> gpuir.Answer:
        if choice not in known:
            g = Microbatch(choice.parallel.microbatches).run(training)
            known[choice] = gpuir.simulate_ranks(g, CLUSTER, choice.parallel)
        return known[choice]

    return simulate


def the_model(training: gpuir.Graph) -> ModelBounds:
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
        assert x.answer.latency_s <= times[x.choice].answer.latency_s * (1 + 1e-9)
        assert least_s(x.choice, model) <= times[x.choice].answer.latency_s
    for x in every.best:
        others = [y for y in every.tried if y != x]
        assert (
            least_bytes(x.choice, model)
            <= least_bytes(x.choice, model, others)
            <= x.answer.reserved_bytes
        )
        assert least_s(x.choice, model, others) <= x.answer.latency_s


BOTH = "dgx-h100+dgx-a100"


def test_on_several_kinds_of_gpu_no_choice_bounds_another():
    """Of layers cut unevenly over two kinds another choice has more on the quick one: bounds are
    those of the quickest alone, and leave out nothing that would win."""
    g = gpuir.load(ENCODER, dims={"batch": 64, "seq": 64}, train=True, optimizer="adamw")
    model = measured(g, gpuir.load_cluster(BOTH), 64)
    assert not model.alike and model.gpus == 16
    assert (
        model.peak_flops_per_s == measured(g, gpuir.load_cluster("dgx-h100"), 64).peak_flops_per_s
    )
    known: dict[Choice, gpuir.Answer] = {}

    def simulate(choice: Choice) -> gpuir.Answer:
        if choice not in known:
            part = Microbatch(choice.parallel.microbatches).run(g)
            known[choice] = gpuir.simulate_ranks(part, BOTH, choice.parallel)
        return known[choice]

    limits = {"tp": (1,), "pp": (1, 2), "zero": (0,), "microbatch": (1, 4)}
    choices = list(space(model, limits, recompute=(False,), schedules=("1f1b",)))
    assert {c.parallel.pp for c in choices} == {1, 2}
    every = search(choices, model, simulate, exhaustive=True)
    some = search(choices, model, simulate)
    assert some.best[0] == every.best[0] and every.simulated == len(choices)
    for x in every.tried:
        assert least_s(x.choice, model, every.tried) <= x.answer.latency_s
        assert least_bytes(x.choice, model, every.tried) <= x.answer.reserved_bytes


def test_a_plan_of_several_kinds_has_the_mean_price():
    args = ["plan", str(ENCODER), "--cluster", BOTH, "--dims", "batch=64,seq=64", "--tp", "8"]
    args += ["--pp", "2", "--microbatch", "8", "--price", "h100-sxm-80gb=3"]
    done = CliRunner().invoke(main, [*args, "--price", "a100-sxm-80gb=1", "--format", "json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["usd_per_gpu_hour"] == 2.0 and made["cluster"] == BOTH and made["gpus"] == 16
    refused = CliRunner().invoke(main, [*args, "--price", "l4=1"])
    assert refused.exit_code == 2 and "--price a100-sxm-80gb=1" in refused.output


def test_what_does_not_fit_loses_by_memory(training: gpuir.Graph, steps):
    model = the_model(training)
    least = least_bytes(Choice(Parallel(dp=4, zero=3)), model)
    small = replace(model, available_bytes=int(1.5 * least))
    found = search(list(space(small, LIMITS, recompute=(False,))), small, steps)
    out = [x for x in found.tried if x.answer.why == "memory: weights and states"]
    assert out and all(not x.choice.parallel.zero for x in out if x.choice.parallel.dp == 4)


def test_every_choice_uses_all_gpus_and_divides_the_batch(training: gpuir.Graph):
    model = the_model(training)
    for choice in space(model, {"tp": (2,), "dp": (2,)}):
        p = choice.parallel
        assert p.ranks == 4 and p.tp == 2 and p.dp == 2
        assert model.batch % (p.dp * p.microbatches) == 0


ADAMW = ("--train", "--optimizer", "adamw")
COMMON = ("plan", str(ENCODER), "--cluster", CLUSTER, *ADAMW, "--dims", "batch=32,seq=256")


def run(*args: str) -> Result:
    few = ("--microbatch", "8", "--tp", "1,2", "--pp", "1", "--recompute", "never")
    return CliRunner().invoke(main, [*COMMON, *few, *args])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tp", "0"), "0 is not from 1 to"),
        (("--pp", "0"), "0 is not from 1 to"),
        (("--microbatch", "0"), "0 is not from 1 to"),
        (("--zero", "5"), "5 is not from 0 to 3"),
        (("--tp", "3"), "--tp 2 or --tp 4"),
        (("--tp", "4", "--pp", "4"), "leave out --tp or leave out --pp"),
        (("--microbatch", "3"), "--dims batch=33 or leave out --microbatch"),
        (("--ep", "2"), "remove --ep"),
        (("--price", "a100-sxm-80gb=-3"), "gpuir: --price a100-sxm-80gb=-3: the price of an hour"),
        (("--price", "h100-sxm=3"), "--price a100-sxm-80gb=3, or remove it"),
        (("--resume", "gone/plan.db"), "mkdir -p gone"),
        (("--predictor", "tiles"), "did you mean tile?"),
        (("--dims", "batch=0"), "--dims batch=1"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_simulated(args: tuple[str, ...], message: str):
    done = CliRunner().invoke(main, [*COMMON, *args])
    assert done.exit_code == 2 and message in done.stderr
    assert "tp=2, dp=2" not in done.stderr  # each plan that is simulated is named


def test_zero_is_refused_without_training():
    refused = CliRunner().invoke(main, [*(x for x in COMMON if x not in ADAMW), "--zero", "1"])
    assert refused.exit_code == 2 and "remove --zero" in refused.stderr


def test_a_search_goes_on_from_its_file(tmp_path: Path):
    kept = tmp_path / "plan.db"
    first = run("--resume", str(kept), "--format", "json")
    assert first.exit_code == 0, first.output
    plans = rows(kept)
    assert json.loads(first.stdout)["simulated"] == len(plans) > 0
    assert run("--format", "json").stdout == first.stdout
    with closing(sqlite3.connect(kept)) as db:  # as if stopped before the last
        db.execute("delete from plans where name = ?", plans[-1][:1])
        db.commit()
    again = run("--resume", str(kept), "--format", "json")
    assert again.stdout == first.stdout and rows(kept) == plans
    assert "by an earlier search" in run("--resume", str(kept)).stdout
    (tmp_path / "notes.txt").write_text("no store, but long enough to have a head" * 10)
    refused = run("--resume", str(tmp_path / "notes.txt"))
    assert refused.exit_code == 2 and "gpuir cannot use the store" in refused.stderr


def rows(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("select name, plan from plans order by rowid").fetchall()


@pytest.mark.parametrize(
    ("args", "expected", "found"),
    [
        (("--dims", "seq=128"), "--dims batch=32 seq=256 seq=128", "--dims batch=32 seq=256"),
        (("--no-tf32",), "--no-tf32", "no --tf32"),
        (("--predictor", "roofline"), "--predictor roofline", "--predictor tile"),
        (("--optimizer", "sgd"), "--optimizer sgd", "--optimizer adamw"),
        (("--cluster", "my.toml"), "--cluster my.toml", f"--cluster {CLUSTER}"),
    ],
)
def test_a_search_of_something_else_does_not_go_on(kept: Path, args, expected: str, found: str):
    (kept.parent / "my.toml").write_text(SLOW)
    refused = run("--resume", "plan.db", *args)
    assert refused.exit_code == 2, refused.output
    assert f"  expected: {expected}\n  found:    {found}\n  fix:      --resume" in refused.stderr


def test_inference_under_another_profile_is_another_search(tmp_path: Path):
    args = ["plan", str(ENCODER), "--cluster", CLUSTER, "--dims", "batch=4,seq=32", "--tp", "1"]
    args += ["--pp", "1", "--microbatch", "1", "--resume", str(tmp_path / "plan.db")]
    assert CliRunner().invoke(main, [*args, "--profile", "ort"]).exit_code == 0
    refused = CliRunner().invoke(main, [*args, "--profile", "tensorrt"])
    assert refused.exit_code == 2 and "expected: --profile tensorrt" in refused.stderr


@pytest.mark.parametrize(
    ("what", "by"),
    [
        (r'"latency_s": [^,]*', '"latency_s": "quick"'),
        (r'"reserved_bytes": [^,]*', '"reserved_bytes": null'),
        (r'"tp": \d', '"tp": "2"'),
        (r'"why": .*', ""),
    ],
)
def test_a_plan_that_was_changed_is_refused(kept: Path, what: str, by: str):
    (kept.parent / "bad.db").write_bytes(kept.read_bytes())
    with closing(sqlite3.connect("bad.db")) as db:
        (name, text), *_ = rows(kept)
        db.execute("update plans set plan = ? where name = ?", (re.sub(what, by, text), name))
        db.commit()
    refused = run("--resume", "bad.db")
    assert refused.exit_code == 2
    assert f"bad.db: the plan '{name}' does not come from an earlier search" in refused.stderr


def test_an_edited_cluster_is_another(kept: Path):
    own = ("--cluster", "my.toml", "--resume", "own.db")
    (kept.parent / "my.toml").write_text(SLOW.replace("5e9", "300e9"))
    assert run(*own).exit_code == 0
    (kept.parent / "my.toml").write_text(SLOW)
    assert "what --cluster my.toml says now" in run(*own).stderr


SLOW = """
name = "slow"
base = "dgx-a100"
domain.joins = 4
domain.bytes_per_s = 5e9
[sources]
"domain" = "our own"
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("searched") / "plan.db"
    assert run("--resume", str(path)).exit_code == 0
    return path


@pytest.fixture
def kept(searched: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a search, in the folder that one is in."""
    monkeypatch.chdir(searched.parent)
    return searched


def test_the_report_says_why_others_lost():
    text = run("--width", "100", "--microbatch", "1,8", "--pp", "1,2").stdout
    assert "best" in text and "MFU" in text and "Why the others lost" in text
    megatron = run("--format", "megatron").stdout
    assert "--tensor-model-parallel-size" in megatron
    assert run("--format", "nothing").exit_code == 2


def test_contexts_are_tried_round_a_ring_too(training: gpuir.Graph):
    """Beside what sends the fewest bytes; what the one takes bounds the other only where no context
    is cut in it: a ring puts blocks together, which takes kernels more."""
    choices = list(space(the_model(training), LIMITS | {"cp": (1, 2)}, recompute=(False,)))
    assert {(c.parallel.cp, c.parallel.exchange) for c in choices} == {
        (1, ""),
        (2, ""),
        (2, "ring"),
    }
    whole, gathered, ring = (
        Choice(Parallel(dp=2, cp=cp, exchange=exchange))
        for cp, exchange in ((1, ""), (2, ""), (2, "ring"))
    )
    assert gathered.is_part_of(whole) and ring.is_part_of(whole)
    assert not gathered.is_part_of(ring) and not ring.is_part_of(gathered)
