"""Pipelines of ranks: orders of microbatches against published formulas; laws of their times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.ir.errors import UsageError
from gpuir.simulate.microbatches import (
    LastPass,
    PartTimes,
    Pipelined,
    Sums,
    Task,
    most_in_flight,
    run_pipeline,
    task_orders,
)

SECONDS = st.floats(0.1, 10)


@st.composite
def last_passes(draw):
    time_s, sums_s = draw(SECONDS), draw(SECONDS)
    end_s = max(sums_s, draw(st.floats(0, 1)) * time_s + sums_s)
    return LastPass(time_s, (Sums("dp", sums_s, end_s),), draw(st.floats(1, 2)))


@st.composite
def cases(draw):
    """A schedule, ranks, microbatches, chunks, the times of the parts and of sends. Of some parts
    the last pass sums gradients."""
    ranks = draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    chunks = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    rounds = draw(st.integers(1, 3))
    microbatches = ranks * rounds if schedule == "interleaved" else draw(st.integers(1, 9))
    parts = ranks * chunks
    times = [
        PartTimes(
            *(draw(SECONDS), draw(SECONDS), draw(SECONDS)),
            draw(st.sampled_from([0.0, 1.5])),
            draw(st.sampled_from([0.0, 0.5])),
            draw(st.none() | last_passes()),
        )
        for _ in range(parts)
    ]
    sends = [draw(st.floats(0, 3)) for _ in range(parts - 1)]
    return (schedule, ranks, microbatches, chunks), times, sends


def even(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> Pipelined:
    """With one second for each third of the work of a rank's microbatch."""
    times = PartTimes(1 / chunks, 1 / chunks, 1 / chunks)
    orders = task_orders(schedule, ranks, microbatches, chunks)  # pyright: ignore
    return run_pipeline(orders, [times] * (ranks * chunks))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_bubbles_are_as_published(p: int, rounds: int):
    """GPipe and 1F1B wait (p - 1) / m of the time they work (arXiv 2104.04473, section 2.2.1),
    interleaved v times less (2.2.2), ZB-H1 for forward and backward less the gradients of weights
    (arXiv 2401.10241, table 2), where there are p microbatches or more."""
    m, v = p * rounds, 3
    for schedule in ("gpipe", "1f1b"):
        found = even(schedule, p, m)
        assert found.time_s == pytest.approx(3 * (m + p - 1))
        assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert even("interleaved", p, m, v).time_s == pytest.approx(3 * (m + (p - 1) / v))
    assert even("zero-bubble", p, m).time_s == pytest.approx(3 * m + (p - 1) * (1 + 1 - 1))


def test_microbatches_in_flight_are_as_published():
    """GPipe holds all; 1F1B on rank r at most p - r (arXiv 2104.04473, section 2.2.1)."""
    assert even("gpipe", 4, 9).in_flight == (9, 9, 9, 9)
    assert even("1f1b", 4, 9).in_flight == (4, 3, 2, 1)
    assert even("1f1b", 4, 2).in_flight == (2, 2, 2, 1)
    assert even("interleaved", 4, 8, 2).in_flight == (11, 9, 7, 5)
    assert even("zero-bubble", 4, 9).in_flight == (4, 3, 2, 1)


@given(cases())
def test_orders_and_times_keep_their_laws(case):
    (schedule, ranks, microbatches, chunks), times, sends = case
    orders = task_orders(schedule, ranks, microbatches, chunks)
    found = run_pipeline(orders, times, sends)
    ends, starts = {}, {}
    for rank, order in enumerate(found.orders):
        kinds = ["forward", "backward"] + ["weights"] * (schedule == "zero-bubble")
        assert sorted(t for t in order if t.kind not in ("sums", "norm", "update")) == sorted(
            Task(kind, m, c) for kind in kinds for m in range(microbatches) for c in range(chunks)
        )  # each once
        one_at_a_time = list(zip(found.starts[rank], found.ends[rank], strict=True))
        assert all(a[1] <= b[0] for a, b in pairwise(one_at_a_time))
        for task, (start, end) in zip(order, one_at_a_time, strict=True):
            part = rank + ranks * task.chunk
            starts[task.kind, part, task.microbatch] = start
            ends[task.kind, part, task.microbatch] = end
    last = len(times) - 1
    for (kind, part, m), start in starts.items():
        if kind == "forward" and part:
            assert start >= ends[kind, part - 1, m] + sends[part - 1]
        if kind == "backward":
            assert start >= ends["forward", part, m]
            assert part == last or start >= ends[kind, part + 1, m] + sends[part]
        if kind == "weights":
            assert start >= ends["backward", part, m]
        if kind == "update":
            assert start >= max((end for (k, *_), end in ends.items() if k == "norm"), default=0)
    assert found.time_s == max(ends.values())
    assert all(idle >= -1e-9 for idle in found.idle_s)
    assert found.in_flight == tuple(map(most_in_flight, found.orders))


@given(cases())
def test_the_critical_path_takes_the_whole_time(case):
    """Each task in it starts when the one before it has ended and its result has come."""
    shape, times, sends = case
    found = run_pipeline(task_orders(*shape), times, sends)
    path = found.critical
    assert path[0].start_s == 0 and path[-1].end_s == found.time_s
    for before, after in pairwise(path):
        assert after.start_s == pytest.approx(before.end_s + after.sent_s)
        assert before.rank == after.rank or len(found.orders) > 1
    took = sum(x.end_s - x.start_s + x.sent_s for x in path)
    assert took == pytest.approx(found.time_s)


@given(cases(), st.data())
def test_a_slower_part_or_send_never_ends_the_step_earlier(case, data):
    shape, times, sends = case
    orders = task_orders(*shape)
    before = run_pipeline(orders, times, sends).time_s
    i = data.draw(st.integers(0, len(times) - 1))
    what = data.draw(st.sampled_from(["forward", "backward", "weights", "norm", "update"]))
    slower = replace(times[i], **{what: getattr(times[i], what) + data.draw(SECONDS)})
    assert run_pipeline(orders, [*times[:i], slower, *times[i + 1 :]], sends).time_s >= before
    late = [s + 1 for s in sends]
    assert run_pipeline(orders, times, late).time_s >= before


@given(cases())
def test_no_step_is_shorter_than_a_rank_s_own_work(case):
    """Nor than the way of one microbatch through all parts and back."""
    shape, times, sends = case
    found = run_pipeline(task_orders(*shape), times, sends)
    ranks, m = shape[1:3]
    for rank in range(ranks):
        own = [times[i] for i in range(rank, len(times), ranks)]
        work = sum(m * (t.forward + t.backward + t.weights) + t.norm + t.update for t in own)
        for t in own:
            if t.last is not None:
                apart = shape[0] == "zero-bubble"
                work += t.last.time_s - t.weights - (0.0 if apart else t.backward)
        assert found.busy_s[rank] >= work * (1 - 1e-9) and found.time_s >= work * (1 - 1e-9)
        if all(t.last is None for t in own):
            assert found.busy_s[rank] == pytest.approx(work)
    back = (min(t.backward, t.last.time_s if t.last else t.backward) for t in times)
    there_and_back = sum(t.forward for t in times) + sum(back) + 2 * sum(sends)
    assert found.time_s >= there_and_back * (1 - 1e-9)


def test_the_owner_of_the_critical_path_is_the_slow_rank():
    times = [PartTimes(1, 2), PartTimes(1, 2), PartTimes(2, 4), PartTimes(1, 2)]
    found = run_pipeline(task_orders("1f1b", 4, 16), times)
    by_rank = [sum(x.end_s - x.start_s for x in found.critical if x.rank == r) for r in range(4)]
    assert max(by_rank) == by_rank[2] > 0.8 * found.time_s


def test_updates_wait_for_each_rank_s_share_of_a_norm():
    """The last rank is done with its microbatch first, and waits for the first one."""
    times = [PartTimes(1, 2, update=1, norm=0.5), PartTimes(1, 2, update=1, norm=3)]
    found = run_pipeline(task_orders("1f1b", 2, 1), times, [0.25], norm_s=0.125)
    assert [[t.kind for t in order] for order in found.orders] == [
        ["forward", "backward", "norm", "update"]
    ] * 2
    assert found.ends[0][:3] == (1, 6.5, 7.0) and found.ends[1][:3] == (2.25, 4.25, 7.25)
    assert found.starts[0][3] == found.starts[1][3] == 7.25 + 0.125 and found.time_s == 8.375
    *_, norm, update = found.critical
    assert (norm.task.kind, norm.rank, update.sent_s) == ("norm", 1, 0.125)


def test_sums_run_beside_what_follows_and_the_update_waits():
    """Of two chunks of one rank: the second chunk's sums of 4 s begin 1 s into its pass of 2 s, and
    take from the first chunk's, which takes half as long again beside them. Its own sums of 3 s
    wait until then, and the update for both."""
    last = LastPass(2, (Sums("dp", 4, 5),), slows=1.5)
    times = [
        PartTimes(1, 2, update=1, last=LastPass(2, (Sums("dp", 3, 4),), slows=1.5)),
        PartTimes(1, 2, update=1, last=last),
    ]
    found = run_pipeline(task_orders("interleaved", 1, 1, 2), times)
    assert [x.kind for x in found.orders[0]] == [
        *("forward", "forward", "backward", "backward", "sums", "update", "update"),
    ]
    assert found.ends[0] == (1, 2, 4, 7, 10, 11, 12) and found.sums_s == (3,)
    assert [x.task.kind for x in found.critical] == [x.kind for x in found.orders[0]]


@given(cases())
def test_sums_beside_passes_are_never_slower_than_behind_them(case):
    """If they take nothing from kernels."""
    shape, times, sends = case
    apart = shape[0] == "zero-bubble"
    behind, beside = list[PartTimes](), list[PartTimes]()
    for t in times:
        if t.last is None:
            behind.append(t)
            beside.append(t)
            continue
        (x,) = t.last.sums
        own = t.weights if apart else t.backward + t.weights
        sums = (x._replace(end_s=own + x.time_s),)
        beside.append(replace(t, last=LastPass(own, sums)))
        first = "norm" if t.norm else "update"
        behind.append(replace(t, last=None, **{first: getattr(t, first) + x.time_s}))
    orders = task_orders(*shape)
    before, after = (run_pipeline(orders, x, sends).time_s for x in (behind, beside))
    if all(t.update for t in times):
        assert after <= before * (1 + 1e-9)


def test_many_ranks_and_microbatches():
    found = run_pipeline(task_orders("1f1b", 64, 1024), [PartTimes(1, 2)] * 64, [0.25] * 63)
    assert found.time_s >= 3 * (1024 + 63) and found.in_flight[0] == 64
    assert sum(map(len, found.orders)) == 64 * 1024 * 2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("1f1d", 4, 8), "did you mean 1f1b"),
        (("1f1b", 0, 8), "ranks count from 1"),
        (("1f1b", 4, 0), "microbatches count from 1"),
        (("1f1b", 4, 8, 2), "has one chunk on each rank"),
        (("interleaved", 4, 8), "several chunks"),
        (("interleaved", 4, 10, 2), "8 or 12 microbatches"),
        (("interleaved", 4, 2, 2), "4 microbatches, or 1f1b"),
    ],
)
def test_what_cannot_be_is_refused(shape, message: str):
    with pytest.raises(UsageError) as error:
        task_orders(*shape)
    assert message in str(error.value)


def test_parts_and_sends_go_together():
    orders = task_orders("1f1b", 2, 2)
    with pytest.raises(UsageError, match="each rank of a pipeline needs the same"):
        run_pipeline(orders, [PartTimes(1, 1)] * 3)
    with pytest.raises(UsageError, match="each rank of a pipeline needs the same"):
        run_pipeline(orders, [PartTimes(1, 1)] * 2, [1, 1])


def test_ranks_that_wait_for_each_other_are_named():
    first, second = task_orders("1f1b", 2, 2)
    with pytest.raises(UsageError, match="never ends") as error:
        run_pipeline([(Task("backward", 0), *first), second], [PartTimes(1, 1)] * 2)
    assert "backward of microbatch 0" in str(error.value)
