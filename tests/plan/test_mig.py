"""Plans that divide GPUs: exact choices, never worse than a plain one, and why others lost."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuir.ir.errors import UsageError
from gpuir.plan.mig.reasons import PART, TURN, causes, reasons
from gpuir.plan.mig.search import GpuKind, Search, parts_of, search
from gpuir.plan.mig.timetable import DAY_S, DayStretch, read_day, timetable
from gpuir.plan.mig.workloads import DoesNotFit, ServingSetting, SharedSlice, Workload
from gpuir.report.answer import Answer, Needs
from gpuir.simulate.sharing import Load
from gpuir.targets.load import load_target
from gpuir.targets.mig import geometries, mig_of

GIB = 1 << 30


def runs(*models: tuple[float, float, float]):
    """Models as (seconds of whole work of 56 SMs, seconds that do not scale, GiB)."""

    def run(model: int, target: str) -> Answer:
        work, fixed, gib = models[model]
        found = load_target(target)
        time_s = fixed + work * 56 / found.sms
        needs = Needs(
            busy_s=time_s - fixed / 2,
            host_s=fixed,
            copies_s=0.0,
            filled=0.9,
            bandwidth=0.3 * work * 56 / found.sms / time_s,
            watts=0.0,
        )
        held = round(gib * GIB)
        return Answer("m", target, latency_s=time_s, reserved_bytes=held, needs=needs)

    return run


def setting(*workloads: Workload, models=((0.01, 0.002, 1.0),), **more) -> ServingSetting:
    return ServingSetting(workloads, runs(*models), **more)


FOUR = setting(Workload("bert", 0, 4), models=((0.01, 0.004, 1.0),))


def test_four_equal_models_get_a_slice_each_where_their_work_does_not_scale():
    found = search([GpuKind("a30")], FOUR, ways=("mig", "serial", "time-slicing"), requests=200)
    best = found.outcomes[0]
    assert str(best.gpus[0].geometry) == "1g.6gb+1g.6gb+1g.6gb+1g.6gb"
    assert best.throughput == pytest.approx(4 * 0.014 / (0.004 + 0.04), rel=0.01)
    whole = [x for x in found.outcomes if x.gpus[0].geometry is None]
    serial = next(x for x in whole if x.gpus[0].seats[0].part.mode == "serial")
    assert best.throughput > serial.throughput


def test_modes_without_mig_are_among_the_plans():
    found = search([GpuKind("t4")], FOUR, requests=200)
    assert {x.gpus[0].seats[0].part.how for x in found.outcomes} == {
        "one at a time",
        "time slicing",
        "MPS",
        "MPS, 25 % of the SMs each",
    }


def test_with_mig_alone_every_model_has_a_slice():
    found = search([GpuKind("a100")], FOUR, ways=("mig",), requests=200)
    assert found.outcomes
    for outcome in found.outcomes:
        assert all(len(seat.members) <= 1 for seat in outcome.gpus[0].seats)
        assert outcome.gpus[0].geometry is not None


def test_deadline_decides():
    """A model that is quick enough on a large slice alone."""
    models = ((0.01, 0.0, 1.0), (0.004, 0.0, 1.0))
    some = setting(Workload("batch", 0, 2), Workload("live", 1, 1, Load(20.0, 0.03)), models=models)
    found = search([GpuKind("a30")], some, ways=("mig",), requests=1000)
    best = found.outcomes[0]
    assert best.missed == 0
    assert any(
        some.workloads[seat.members[0]].name == "live" and seat.part.target == "a30:2g.12gb"
        for seat in best.gpus[0].seats
        if seat.members
    )
    (worse,) = [x for x in found.outcomes if str(x.gpus[0].geometry).count("1g.6gb") == 4]
    assert worse.missed == 1
    why = reasons(worse, best, some, found.references, "throughput")
    assert [(r.workload, r.what) for r in why] == [("live", "deadline")]
    assert why[0].here > 0.03 and why[0].cause is not None and why[0].cause.name == PART


def test_model_that_fits_no_slice_but_the_large():
    some = setting(Workload("big", 0, 1), models=((0.01, 0.0, 8.0),))
    found = search([GpuKind("a30")], some, requests=100)
    assert {x.target for x in found.left} == {"a30:1g.6gb"}
    assert 2 * GIB < found.left[0].missing_bytes < 4 * GIB
    best = found.outcomes[0]
    assert all("1g.6gb" not in s.part.target for s in best.gpus[0].seats if s.members)


def test_model_that_fits_nowhere():
    with pytest.raises(UsageError, match="big fits none of the given GPUs") as error:
        search(
            [GpuKind("a30"), GpuKind("t4")], setting(Workload("big", 0), models=((0.01, 0, 40.0),))
        )
    assert "a30 has" in str(error.value) and "less than it needs" in str(error.value)


def test_models_that_do_not_fit_together():
    with pytest.raises(UsageError, match="fit no division"):
        search([GpuKind("t4")], setting(Workload("a", 0, 3, Load(1.0)), models=((0.01, 0, 8.0),)))


def test_jobs_one_after_another_need_the_memory_of_one():
    jobs = setting(Workload("job", 0, 3), models=((0.01, 0, 8.0),))
    found = search([GpuKind("t4")], jobs, requests=100)
    assert [x.gpus[0].seats[0].part.mode for x in found.outcomes] == ["serial"]


def test_memory_counts_a_context_for_each_process():
    one = setting(Workload("a", 0, 2), models=((0.01, 0, 6.0),))
    one.tenants(SharedSlice("t4", "mps"), "GPU", (0, 0))
    with pytest.raises(DoesNotFit):
        setting(Workload("a", 0, 2), models=((0.01, 0, 7.5),)).tenants(
            SharedSlice("t4", "mps"), "GPU", (0, 0)
        )


speeds = st.tuples(st.floats(0.001, 0.05), st.floats(0.0, 0.01), st.just(0.5))


@settings(max_examples=15, deadline=None)
@given(st.lists(speeds, min_size=1, max_size=3), st.sampled_from(["throughput", "latency"]))
def test_choice_is_that_of_trying_all(models, objective):
    """On an A30, each model on one slice alone: as good as the best of all assignments."""
    some = setting(*(Workload(f"m{i}", i) for i in range(len(models))), models=tuple(models))
    made = Search([GpuKind("a30")], some, objective, requests=100, ways=("mig",))
    chosen = made.found().outcomes

    def worth(where: tuple[str, ...]) -> float:
        times = [some.alone(i, f"a30:{name}").latency_s for i, name in enumerate(where)]
        alone = [some.alone(i, "a30").latency_s for i in range(len(where))]
        pairs = list(zip(times, alone, strict=True))
        if objective == "latency":
            return -sum(t / a for t, a in pairs) / len(pairs)
        return sum(a / t for t, a in pairs)

    best = max(
        worth(where)
        for geometry in geometries(mig_of(load_target("a30")))
        for where in product([p.name for p in geometry.profiles], repeat=len(models))
        if all(where.count(n) <= [p.name for p in geometry.profiles].count(n) for n in set(where))
    )
    found = -chosen[0].latency if objective == "latency" else chosen[0].throughput
    assert found == pytest.approx(best, rel=0.02)


@settings(max_examples=10, deadline=None)
@given(st.lists(speeds, min_size=2, max_size=4), st.sampled_from(["throughput", "fairness"]))
def test_never_worse_than_the_plain_choice(models, objective):
    some = setting(*(Workload(f"m{i}", i) for i in range(len(models))), models=tuple(models))
    made = Search([GpuKind("a100-sxm-40gb")], some, objective, requests=100, ways=("mig",))
    plain = made._plain("a100-sxm-40gb", geometries(mig_of(load_target("a100"))))
    assert plain is not None
    best = made.found().outcomes[0]
    assert best.order(objective) <= made.outcome(plain).order(objective)


def test_several_gpus_hold_what_one_cannot():
    some = setting(
        Workload("a", 0, 6), Workload("b", 1, 2, Load(30.0, 0.05)),
        models=((0.02, 0.001, 4.0), (0.005, 0.001, 4.0)),
    )  # fmt: skip
    kinds = [GpuKind("a30", 2, 1.0), GpuKind("t4", 1, 0.4)]
    found = search(kinds, some, requests=300, ways=("mig", "time-slicing"))
    best = found.outcomes[0]
    assert len(best.gpus) == 3 and len(best.served) == 8
    members = sorted(i for gpu in best.gpus for seat in gpu.seats for i in seat.members)
    assert members == [0] * 6 + [1] * 2


def test_more_models_than_seats_take_turns():
    """Ten models on two GPUs, and fourteen on an A30: more than the sets that are tried first."""
    many = setting(Workload("a", 0, 10), models=((0.01, 0.001, 0.3),))
    found = search([GpuKind("t4", 2)], many, requests=100)
    assert {len(s.members) for g in found.outcomes[0].gpus for s in g.seats} == {5}
    many = setting(Workload("a", 0, 14), models=((0.01, 0.001, 0.3),))
    found = search([GpuKind("a30")], many, requests=100, ways=("mig", "serial"))
    assert any(x.gpus[0].geometry is not None for x in found.outcomes)


@settings(max_examples=5, deadline=None)
@given(st.lists(speeds, min_size=3, max_size=5))
def test_several_gpus_never_do_worse_than_dealing_models_out(models):
    some = setting(*(Workload(f"m{i}", i) for i in range(len(models))), models=tuple(models))
    made = Search([GpuKind("a30"), GpuKind("t4")], some, "throughput", requests=100)
    dealt = made._dealt()
    assert dealt is not None
    best = made.found().outcomes[0]
    assert best.order("throughput") <= made.outcome(dealt).order("throughput")


def test_cost_takes_the_fewest_gpus_that_serve():
    some = setting(Workload("live", 0, 2, Load(10.0, 0.1)))
    kinds = [GpuKind("a100-sxm-40gb", 2, 3.0), GpuKind("t4", 2, 0.5)]
    found = search(kinds, some, "cost", requests=300)
    best = found.outcomes[0]
    assert best.missed == 0 and best.usd_per_hour == 0.5


def test_host_threads_are_shared_by_all_slices():
    models = ((0.0, 0.01, 0.5),)  # nothing but host
    few = search([GpuKind("a30")], setting(Workload("a", 0, 4), models=models, host_threads=2))
    many = search([GpuKind("a30")], setting(Workload("a", 0, 4), models=models, host_threads=4))
    assert many.outcomes[0].throughput == pytest.approx(4, rel=0.02)
    assert few.outcomes[0].throughput == pytest.approx(2, rel=0.02)


def test_causes_add_up():
    found = search([GpuKind("t4")], FOUR, requests=200)
    for outcome in found.outcomes:
        for served in outcome.served:
            reference = found.references[0]
            total = reference.latency_s + sum(c.seconds for c in causes(served, reference))
            assert served.mean_s == pytest.approx(total, rel=0.1)
    serial = next(x for x in found.outcomes if x.gpus[0].seats[0].part.mode == "serial")
    assert [c.name for c in causes(serial.served[0], found.references[0])] == [TURN]


def test_ways_to_share():
    assert parts_of("a30", 1) == (SharedSlice("a30"),)
    assert [p.mode for p in parts_of("a30:2g.12gb", 2)] == ["serial", "time-slicing"]
    assert parts_of("a30", 2, ("mig",)) == ()


# ---- over a day ---------------------------------------------------------------------------------

DAY = "time,live\n0:00,5\n8:00,150\n20:30,5\n"


def test_table_of_a_day(tmp_path):
    path = tmp_path / "day.csv"
    path.write_text(DAY)
    day = read_day(str(path), ["batch", "live"])
    assert [(s.start_s, s.end_s) for s in day] == [
        (0, 28_800),
        (28_800, 73_800),
        (73_800, DAY_S),
    ]
    assert [s.rates for s in day] == [(None, 5), (None, 150), (None, 5)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("hour,live\n0,1\n", "the file is not a table of rates over a day"),
        ("", "the file is not a table of rates over a day"),
        ("time,life\n0:00,1\n", "did you mean live"),
        ("time,live,live\n0:00,1,1\n", "two columns have the name live"),
        ("time,live\n0:00,x\n", "the rate of live is not valid"),
        ("time,live\n0:00,-1\n", "the rate of live is not valid"),
        ("time,live\n0:00,1,2\n", "as many cells"),
        ("time,live\n1:00,1\n", "start with 0:00"),
        ("time,live\n0:00,1\n0:00,1\n", "the times of day must start"),
        ("time,live\n0:00,1\n24:00,1\n", "the time of day is not valid"),
    ],
)
def test_what_is_no_table_of_a_day(tmp_path, text, words):
    path = tmp_path / "day.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_day(str(path), ["batch", "live"])
    assert words in str(error.value)


def changing(rates: list[float], **more):
    """Two batch jobs, and a model that has to be quick and is asked more by day."""
    models = ((0.01, 0.004, 1.0), (0.003, 0.0, 1.0))
    some = setting(Workload("batch", 0, 2), Workload("live", 1, 1, Load(1.0, 0.05)), models=models)
    ends = [DAY_S * (i + 1) / len(rates) for i in range(len(rates))]
    day = [
        DayStretch(start, end, (None, rate))
        for start, end, rate in zip([0.0, *ends], ends, rates, strict=False)
    ]
    return timetable(day, [GpuKind("a30")], some, "throughput", requests=300, ways=("mig",), **more)


def test_divided_anew_where_the_load_asks_for_it():
    made = changing([5.0, 100.0, 5.0])
    assert made.changes == 2
    targets = [
        next(s.part.target for s in x.outcome.gpus[0].seats if s.members == (1,))
        for x in made.entries
    ]
    assert targets == ["a30:1g.6gb", "a30:2g.12gb", "a30:1g.6gb"]
    assert all(x.outcome.missed == 0 for x in made.entries)
    assert made.spent.worth > made.fixed_spent.worth


def test_not_divided_anew_where_that_costs_more_than_it_gives():
    made = changing([5.0, 100.0, 5.0], change_s=DAY_S)
    assert made.changes == 0
    assert made.spent == made.fixed_spent


def test_equal_load_all_day_never_changes():
    assert changing([5.0, 5.0, 5.0, 5.0]).changes == 0


def test_example_of_the_documents(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    (code,) = re.findall(
        r"```python\n(.*?)```", (root / "docs" / "guide" / "mig.md").read_text(), re.DOTALL
    )
    exec(code, {})
    assert capsys.readouterr().out.strip().endswith(" 0")


def test_a_model_that_does_not_keep_up_counts_for_what_it_answers():
    some = setting(Workload("m", 0, load=Load(rate=200.0)))
    made = Search([GpuKind("a30")], some, "throughput", requests=100, ways=("mig",))
    late = SimpleNamespace(load=Load(rate=200.0), keeps_up=False, rate=50.0)
    assert made._progress(0, late) == 0.25  # pyright: ignore[reportArgumentType]
