"""Kernels beside collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuir
from gpuir.simulate.overlap import overlapped
from gpuir.simulate.streams import StreamJob


def test_a_collective_is_hidden_behind_what_does_not_read_it():
    jobs = [StreamJob(0, 2.0, 0.5, ()), StreamJob(0, 3.0, 0.25, (0,)), StreamJob(0, 4.0, 0.5, ())]
    found = overlapped(jobs, [0, 1, 0], 2)
    assert found.shared.starts == [0, 2, 2] and found.shared.ends == [2, 5, 6]
    assert found.exposed_s == (0.0,)


def test_what_reads_it_waits():
    jobs = [StreamJob(0, 2.0, 1.0, ()), StreamJob(0, 3.0, 0.25, (0,)), StreamJob(0, 4.0, 1.0, (1,))]
    found = overlapped(jobs, [0, 1, 0], 2)
    assert found.shared.ends == [2, 5, 9] and found.exposed_s == (3.0,)
    assert found.shared.causes == [-1, 0, 1]


def test_it_takes_its_share_of_the_device():
    """A kernel that fills the device goes on with three quarters of it while 3 s are sent."""
    jobs = [StreamJob(0, 3.0, 0.25, ()), StreamJob(0, 4.0, 1.0, ())]
    found = overlapped(jobs, [1, 0], 2)
    assert found.shared.ends == pytest.approx([3.0, 3.0 + (4.0 - 3.0 * 0.75)])


def test_what_is_sent_last_is_exposed():
    found = overlapped([StreamJob(0, 1.0, 1.0, ()), StreamJob(0, 2.0, 0.1, (0,))], [0, 1], 2)
    assert found.exposed_s == (2.0,)


@st.composite
def works(draw):
    n = draw(st.integers(1, 20))
    times = st.floats(0.0, 5.0)
    jobs = [
        StreamJob(
            draw(times),
            draw(times),
            draw(st.floats(0.01, 1.0)),
            tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else (),
        )
        for i in range(n)
    ]
    return jobs, [draw(st.integers(0, 2)) for _ in range(n)]


@given(works())
def test_order_and_dependences_hold(given_works):
    jobs, lanes = given_works
    starts, ends, _, _ = overlapped(jobs, lanes, 3).shared
    last = [0.0, 0.0, 0.0]
    for i, (job, lane) in enumerate(zip(jobs, lanes, strict=True)):
        assert starts[i] >= max(job.arrives_s, last[lane], *(ends[j] for j in job.after), 0.0)
        assert ends[i] >= starts[i] + job.work_s * (1 - 1e-9)
        last[lane] = ends[i]


def test_gradients_are_summed_beside_the_backward_pass():
    """Of a training step cut by data, most of what is sent is hidden."""
    g = gpuir.load("tests/encoder.onnx", dims={"batch": 64, "seq": 128}, train=True)
    g = gpuir.pipeline("shard{ranks=8,by=data}").run(g)
    run = gpuir.analyze(g, cluster="dgx-a100").timeline
    (dp,) = run.traffic
    assert dp.group == "dp" and dp.count == sum(x.group == "dp" for x in run.launches)
    assert 0 < dp.exposed_s < dp.time_s < run.time_s
    assert {x.lane for x in run.spans if x.kind == "kernel"} == {"stream 0", "communication dp"}
    assert any(x.lane == "communication dp" for x in run.critical)
