"""The timeline: by hand, against its laws, and at the size of real models."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from calls import calls
from hypothesis import given
from hypothesis import strategies as st
from timed import Timed, run, timed

import gpuir
from gpuir.ir.graph import Graph
from gpuir.simulate.launches import Found, Launch, Repeat, written_out
from gpuir.simulate.timeline import Timeline, costed_launches, timeline, together
from gpuir.targets.profile import NO_HOST, Copies, Host, Profile, load_profile
from gpuir.targets.target import FrozenTable

US = 1e-6


def encoder(target: str = "a100", batch: int = 1, seq: int = 8) -> Graph:
    model = gpuir.load("tests/encoder.onnx", dims={"batch": batch, "seq": seq})
    return gpuir.analyze(gpuir.lower(model, profile="ideal"), target).graph


HOST = Host(
    between_s=2 * US,
    before_s=5 * US,
    launch_s=3 * US,
    next_s=1 * US,
    after_s=4 * US,
    empty_s=1 * US,
    call_s=10 * US,
    queue=1024,
)


def stack(host: Host = HOST, **fields) -> Profile:
    return Profile("mine", "", "", "none", host, **fields)


def launched_by(costed: Graph, apart: bool = False) -> tuple[Found, ...]:
    return costed_launches(costed, apart)[0].found


def launch(op: str, us: float, **fields) -> Timed:
    return timed(op, us * US, **fields)


def microseconds(values) -> list[float]:
    return [round(1e6 * v, 6) for v in values]


# ---- by hand -----------------------------------------------------------------------------------


def test_two_ops_of_short_kernels_are_the_hosts_time():
    """call 10, T1 2, T2 5, T4 3: the first kernel at 20. T3 4, T1 2, T2 5, T4 3: the second at 34.
    T3 4 after it, while its kernel of 1 runs: the host is done at 38."""
    t = run([launch("a", 1), launch("b", 1)], stack())
    assert microseconds(t.starts) == [20, 34]
    assert microseconds([t.time_s, t.host_s, t.device_s]) == [38, 38, 2]
    assert microseconds([t.gaps_s, t.head_s, t.tail_s]) == [33, 20, 3]
    assert t.is_host_bound


def test_long_kernels_hide_the_host():
    t = run([launch("a", 100), launch("b", 100)], stack())
    assert microseconds(t.starts) == [20, 120]
    assert microseconds([t.time_s, t.gaps_s, t.host_s]) == [220, 20, 38]
    assert not t.is_host_bound


def test_two_kernels_of_one_op_have_t5_between_them():
    """20, then T5 1 and T4 3."""
    t = run([launch("a", 1), launch("a", 1)], stack())
    assert microseconds(t.starts) == [20, 24]
    assert microseconds([t.host_s]) == [28]


def test_a_librarys_loop_may_have_a_t5_of_its_own():
    """The first kernel at 20; in the loop 0.5 and T4 3 to each next; behind it T5 1 and T4 3."""
    found = [Repeat(("l",), (launch("a", 1), launch("a", 1)), 2, True), launch("a", 1)]
    t = run(found, stack(replace(HOST, library_s=0.5 * US)))
    assert microseconds(t.starts) == [20, 23.5, 27, 30.5, 34.5]
    assert microseconds(run(found, stack()).starts) == [20, 24, 28, 32, 36]


def test_a_view_takes_the_host_its_own_time_and_t1():
    """call 10, T1 2, view 1, T1 2, T2 5, T4 3."""
    t = run([launch("v", 0, empty=True), launch("a", 1)], stack())
    assert microseconds(t.starts) == [23]
    assert len(t.launches) == 1


def test_the_dearest_kind_of_its_kernels_decides_an_ops_t2():
    """call 10, T1 2, T2 50, T4 3; behind a copy of the weight (20), T5 1 and what is missing,
    45."""
    slow = replace(HOST, before=FrozenTable({"conv": 50 * US}))
    t = run([launch("a", 1, kind="conv"), launch("b", 1)], stack(slow))
    assert microseconds(t.starts) == [65, 79]
    t = run([launch("a", 1, kind="copy"), launch("a", 1, kind="conv"), launch("b", 1)], stack(slow))
    assert microseconds(t.starts) == [20, 69, 83]


def test_the_host_waits_for_room_in_the_queue():
    """With room for one, the second launch (ready at 31) waits until the first kernel ends."""
    t = run([launch("a", 100), launch("b", 1)], stack(replace(HOST, queue=1)))
    assert microseconds(t.starts) == [20, 123]
    chain = [(s.lane, *microseconds([s.start_s, s.end_s])) for s in t.critical]
    assert chain == [("host", 0, 20), ("stream 0", 20, 120), ("host", 120, 127)]


def test_the_host_waits_for_a_size_that_the_device_computes():
    """The first kernel runs from 20 to 120; T3 4, T1 2, T2 5, T4 3 come after it."""
    t = run([launch("nonzero", 100, waits=True), launch("b", 1)], stack())
    assert microseconds(t.starts) == [20, 134]
    assert [s.lane for s in t.critical] == ["host", "stream 0", "host"]


def test_a_graph_is_one_launch():
    """call 10, T4 3, and then the kernels, each half a microsecond after the other."""
    graph = stack(replace(HOST, graph=True, graph_s=0.5 * US))
    t = run([launch("a", 1), launch("v", 0, empty=True), launch("b", 2)], graph)
    assert microseconds(t.starts) == [13.5, 15]
    assert microseconds([t.time_s, t.host_s, t.gaps_s]) == [17, 13, 14]
    assert [s.kind for s in t.spans if s.lane == "host"] == ["call", "launch"]
    assert [s.kind for s in t.critical] == ["host", "kernel"]


def test_copies_are_waited_for():
    """call 10, a copy's call 2 and 50 on the bus, T1 2, T2 5, T4 3; kernel 100 until 172; the copy
    back is called at 76 + 2, starts when the kernel ends and takes 7."""
    both = stack(copies=Copies(2 * US, 1.0))
    t = run([launch("a", 100)], both, [("x", 50 * US)], [("y", 7 * US)])
    assert microseconds(t.starts) == [72]
    assert microseconds([t.time_s, t.copies_s, t.tail_s, t.gaps_s]) == [179, 57, 7, 22]
    assert [(s.lane, s.name) for s in t.critical] == [
        ("host", ""), ("copy", "x"), ("host", ""), ("stream 0", ""), ("copy", "y"),
    ]  # fmt: skip


def test_the_backward_pass_is_launched_by_autograds_thread():
    """After 20 and T3 4 another call of 10, T1 2, T2 5, T4 3."""
    items = [launch("a", 1), launch("b", 1, lane="autograd")]
    t = run(items, stack())
    assert [s.lane for s in t.spans if s.kind == "launch"] == ["host", "autograd"]
    assert microseconds(t.starts) == [20, 44]
    graph = run(items, stack(replace(HOST, graph=True)))
    assert microseconds(graph.starts) == [13, 26]
    assert [s.lane for s in graph.spans if s.kind == "launch"] == ["host", "autograd"]


def test_the_chain_covers_all_of_the_time():
    for kernels in ([5, 5, 5], [50, 1, 1, 50], [1, 1, 90]):
        t = run([launch(str(i), us) for i, us in enumerate(kernels)], stack())
        chain = t.critical
        assert chain[0].start_s == 0 and chain[-1].end_s == t.time_s
        assert all(a.end_s == b.start_s for a, b in pairwise(chain))


# ---- loops -------------------------------------------------------------------------------------


def loop(body, trips: int, inner: bool = False) -> Repeat:
    return Repeat(("loop",), tuple(body), trips, inner)


@pytest.mark.parametrize("us", [1, 9, 200], ids=["host", "mixed", "device"])
@pytest.mark.parametrize("queue", [1, 7, 64])
def test_a_long_loop_is_as_all_its_trips_one_by_one(us: float, queue: int):
    body = [launch("a", us), launch("v", 0, empty=True), launch("b", 2)]
    mine = stack(replace(HOST, queue=queue))
    short = run([launch("x", 30), loop(body, 500), launch("y", 1)], mine)
    rolled = [launch("x", 30), *(loop(body, 1) for _ in range(500)), launch("y", 1)]
    long = run(rolled, mine)
    assert len(short.launches) < len(long.launches) == 1002
    for name in ("time_s", "device_s", "host_s", "gaps_s"):
        assert getattr(short, name) == pytest.approx(getattr(long, name), rel=1e-9)
    chain = short.critical
    assert chain[0].start_s == 0 and chain[-1].end_s == short.time_s
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in pairwise(chain))


def test_a_long_loop_is_in_the_chain_as_who_decides_it():
    """Kernels of 200 us hide the host; kernels of 1 us do not."""
    device = run([loop([launch("a", 200)], 5000)], load_profile("eager")).critical
    assert [s.lane for s in device] == ["host", "stream 0", "stream 0"]
    assert device[-1].kind == "loop"
    host = run([loop([launch("a", 1)], 5000)], load_profile("eager")).critical
    assert [s.lane for s in host] == ["host"]


def test_params_are_checked_once_before_the_first_op():
    """call 10 and 7 params of 2, T1 2, T2 5, T4 3: the first kernel at 34. Its backward pass is
    another call, of 10, which checks nothing."""
    checked = stack(replace(HOST, param_s=2 * US))
    t = run([launch("a", 1), launch("b", 1, lane="autograd")], checked, params=7)
    assert microseconds(t.starts) == [34, 58]  # T3 4, the call 10, T1 2, T2 5, T4 3
    graph = encoder()
    more = timeline(graph, checked).host_s - timeline(graph, stack()).host_s
    assert more == pytest.approx(2 * US * len(graph.params))


def test_what_a_trip_costs_the_executor_counts_for_loops_of_the_model_only():
    costly = stack(replace(HOST, trip_s=100 * US))
    body = [launch("a", 1), launch("b", 1)]
    own = run([loop(body, 10)], costly).host_s
    assert own == pytest.approx(run([loop(body, 10)], stack()).host_s + 1000 * US)
    library = run([loop(body[:1], 10, inner=True)], costly).host_s
    assert library == pytest.approx(run([loop(body[:1], 10, inner=True)], stack()).host_s)


def test_ten_thousand_trips_are_no_more_work_than_ten():
    body = [launch(str(i), 3) for i in range(200)]
    eager = load_profile("eager")
    t = run([loop(body, 10_000)], eager)
    assert t.device_s == pytest.approx(10_000 * 200 * 3 * US)
    few, many = (calls(lambda n=n: run([loop(body, n)], eager)) for n in (10, 10_000))
    assert many < 1.1 * few


@pytest.mark.parametrize("us", [1, 21, 300], ids=["host", "mixed", "device"])
@pytest.mark.parametrize("queue", [7, 64, 1024])
def test_loops_within_loops_run_as_one_by_one_and_cost_a_few_walks_a_level(us: float, queue: int):
    """How far the device is behind when an inner loop begins depends on how many levels just
    ended: no two of its runs in a row are alike."""
    mine = stack(replace(HOST, queue=queue, trip_s=9 * US))

    def nested(depth: int) -> Repeat:
        inside = [nested(depth - 1)] if depth else []
        return loop([*inside, launch(str(depth), us), launch("y", 2)], 3)

    def unrolled(items) -> list:
        found: list = []
        for x in items:
            if isinstance(x, Repeat):
                found += [loop(unrolled(x.body), 1) for _ in range(x.trips)]
            else:
                found.append(x)
        return found

    short, long = run([nested(5)], mine), run(unrolled([nested(5)]), mine)
    for name in ("time_s", "device_s", "host_s", "gaps_s"):
        assert getattr(short, name) == pytest.approx(getattr(long, name), rel=1e-6)
    few, many = (calls(lambda n=n: run([nested(n)], mine)) for n in (7, 14))
    assert many < 9 * few


def test_works_in_proportion():
    def work(count: int) -> int:
        items = [launch(str(i), 3) for i in range(count)]
        return calls(lambda: run(items, load_profile("eager")))

    assert work(8000) < 8.2 * work(1000)


# ---- several streams ---------------------------------------------------------------------------


def two(share: float, streams: int, graph: bool = False) -> Timeline:
    """Two kernels of 100 us that read one of 10, and one of 10 that reads both."""
    items = [
        launch("a", 10, share=1.0),
        launch("b", 100, share=share, after=(0,)),
        launch("c", 100, share=share, after=(0,)),
        launch("d", 10, share=1.0, after=(1, 2)),
    ]
    return run(items, stack(replace(NO_HOST, graph=graph), streams=streams))


def test_small_kernels_run_beside_each_other():
    assert microseconds([two(0.4, 1).time_s, two(0.4, 2).time_s]) == [220, 120]
    assert microseconds([two(0.4, 2, graph=True).time_s]) == [120]


def test_kernels_that_fill_the_device_gain_nothing():
    assert microseconds([two(1.0, 2).time_s]) == [220]
    assert microseconds([two(0.75, 2).time_s]) == [170]


def test_device_work_counts_once_where_kernels_overlap():
    t = two(0.4, 2)
    assert microseconds([t.device_s, t.gaps_s]) == [220, 0]
    assert {s.lane for s in t.spans if s.kind == "kernel"} == {"stream 0", "stream 1"}
    chain = t.critical
    assert chain[0].start_s == 0 and chain[-1].end_s == t.time_s


def test_branches_are_found_in_the_graph():
    """The three projections of an attention layer read one value, and what follows waits: under a
    stack that does not make them one product."""
    model = gpuir.load("tests/encoder.onnx", dims={"batch": 1, "seq": 16})
    g = gpuir.analyze(model, "a100", profile="ort").graph
    found = [x for x in written_out(launched_by(g, apart=True)) if not x.empty]
    assert len(found) == sum(not x.empty for x in launched_by(g) if isinstance(x, Launch))
    assert all(j < i for i, x in enumerate(found) for j in x.after)
    readers: dict[tuple[int, ...], int] = {}
    for x in found:
        readers[x.after] = readers.get(x.after, 0) + 1
    assert max(n for after, n in readers.items() if after) >= 2


# ---- laws --------------------------------------------------------------------------------------

times = st.floats(0, 300).map(lambda us: us * US)
hosts = st.builds(
    Host,
    *(st.floats(0, 30).map(lambda us: us * US) for _ in range(7)),
    queue=st.integers(1, 8),
    library_s=st.none() | st.floats(0, 30).map(lambda us: us * US),
)
kernels = st.builds(
    lambda op, time, sort, lane: timed(
        *(op, 0.0 if sort == "view" else time),
        empty=sort == "view",
        waits=sort == "sized",
        lane=lane,
    ),
    st.sampled_from("abcdef"),
    times,
    st.sampled_from(["kernel", "kernel", "kernel", "view", "sized"]),
    st.sampled_from(["host", "host", "autograd"]),
)
launched = st.lists(
    st.one_of(
        kernels,
        st.builds(
            lambda body, trips, inner: Repeat(("l",), tuple(body), trips, inner),
            st.lists(kernels, min_size=1, max_size=4),
            st.integers(0, 30),
            st.booleans(),
        ),
    ),
    max_size=12,
)


@given(launched, hosts)
def test_no_quicker_than_the_device_or_the_host(items, host):
    t = run(items, stack(host))
    slack = 1e-12 + 1e-9 * t.time_s
    assert t.time_s >= t.device_s - slack
    assert t.time_s >= t.host_s - slack
    assert t.time_s == pytest.approx(t.device_s + t.gaps_s + t.tail_s, abs=1e-12)
    assert t == run(items, stack(host))


@given(launched, hosts, st.floats(1, 3), st.data())
def test_slower_parts_make_it_no_quicker(items, host, by, data):
    before = run(items, stack(host)).time_s
    part = data.draw(
        st.sampled_from([f for f, n in vars(host).items() if f.endswith("_s") and n is not None])
    )
    slower = replace(host, **{part: by * getattr(host, part)})
    assert run(items, stack(slower)).time_s >= before * (1 - 1e-9)
    assert run(items, stack(host.scaled(by))).time_s >= before * (1 - 1e-9)

    def longer(x):
        if isinstance(x, Repeat):
            return replace(x, body=tuple(map(longer, x.body)))
        return replace(x, time_s=x.time_s * data.draw(st.sampled_from([1.0, by])))

    assert run([longer(x) for x in items], stack(host)).time_s >= before * (1 - 1e-9)


@given(launched, hosts)
def test_a_graph_is_never_slower_than_its_launches(items, host):
    if not any(not x.empty for x in run(items, stack(host)).launches):
        return
    graph = run(items, stack(replace(host, graph=True))).time_s
    assert graph <= run(items, stack(host)).time_s * (1 + 1e-9)


def is_chain(t: Timeline) -> bool:
    """Whether what decides the end is without a hole, and made of what did run."""
    chain, near = t.critical, 1e-12 + 1e-9 * t.time_s
    if not chain:
        return t.time_s == 0
    joints = [chain[0].start_s, *(a.end_s - b.start_s for a, b in pairwise(chain))]
    ran = all(x.start_s <= x.end_s + near for x in chain)
    return ran and max(map(abs, joints)) <= near and abs(chain[-1].end_s - t.time_s) <= near


copied = st.lists(times.map(lambda s: ("x", s)), max_size=2)


@given(launched, hosts, st.booleans(), copied, copied)
def test_the_chain_has_no_hole(items, host, graph, into, back):
    both = stack(replace(host, graph=graph), copies=Copies(2 * US, 1.0))
    assert is_chain(run(items, both, into, back))


@given(st.lists(st.tuples(times, st.floats(0.01, 1)), max_size=12), st.integers(1, 4), st.data())
def test_streams_keep_order_and_share_the_device(drawn, streams, data):
    items: list[Timed] = []
    for i, (time, share) in enumerate(drawn):
        after = data.draw(st.lists(st.integers(0, i - 1), max_size=2)) if i else []
        items.append(timed(str(i), time, share=share, after=tuple(after)))
    t = run(items, stack(streams=streams))
    alone = run(items, stack()).time_s
    assert t.time_s <= alone * (1 + 1e-9) + 1e-9
    ends = t.marks.ends
    for i, x in enumerate(items):
        assert all(t.starts[i] >= ends[j] - 1e-12 for j in x.launch.after)
        assert ends[i] - t.starts[i] >= x.time_s * (1 - 1e-9) - 1e-12
    work = sum(x.time_s * x.share for x in items)
    assert t.time_s >= work * (1 - 1e-9)
    assert t.busy_s <= t.device_s * (1 + 1e-9) + 1e-12
    assert is_chain(t)


# ---- whole graphs ------------------------------------------------------------------------------


def test_the_interval_is_that_of_kernels_and_host():
    """A host-bound run is as uncertain as its host, however sure the kernels are."""
    g = encoder()
    eager = load_profile("eager")
    t = timeline(g, eager)
    assert t.interval is not None
    low, high = t.interval
    assert t.is_host_bound
    assert low < t.time_s < high
    spread = eager.host.uncertainty
    assert low == pytest.approx(t.host_s / spread, rel=0.05)
    assert high == pytest.approx(t.host_s * spread, rel=0.05)
    sure = replace(eager, host=replace(eager.host, uncertainty=1.0))
    low, high = timeline(g, sure).interval or (0, 0)
    assert high - low < 0.1 * t.time_s


def test_on_a_cpu_there_is_no_host_beside_the_kernels():
    g = encoder("x86-64-v4")
    t = timeline(g, load_profile("ort"))
    assert t.time_s == pytest.approx(t.device_s)
    assert not t.copies_s


def test_onnxruntime_copies_what_it_is_given():
    g = encoder(batch=8, seq=128)
    t = timeline(g, load_profile("ort"))
    names = [s.name for s in t.spans if s.kind == "copy"]
    assert names == [v.name for v in (*g.inputs, *g.outputs)]
    assert not timeline(g, load_profile("tensorrt")).copies_s


@pytest.mark.parametrize("autodiff", ["torch", "gpuir"])
def test_gradients_are_handed_over_by_autograds_thread(autodiff: str):
    """Once each, and by the kernel that adds them where there are earlier ones."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Sigmoid())

    def launched(accumulate: bool) -> list[Launch]:
        how: Any = {"train": True, "autodiff": autodiff, "accumulate": accumulate}
        g = gpuir.load(module, args=(torch.randn(4, 8),), **how)
        costed = gpuir.analyze(g, "v100", profile="eager").graph
        return [x for x in launched_by(costed) if isinstance(x, Launch)]

    fresh, added = launched(False), launched(True)
    assert sum(x.op.endswith(" accumulated") for x in fresh) == 4
    assert sum("/accumulate/" in x.op for x in added) == 4
    assert not any(x.op.endswith(" accumulated") for x in added)
    lanes = [x.lane for x in fresh]
    assert lanes == sorted(lanes, reverse=True)  # the host's forward, then autograd's backward


def test_indices_of_what_is_not_zero_are_waited_for():
    torch = pytest.importorskip("torch")

    class Chosen(torch.nn.Module):
        def forward(self, x):
            return torch.nonzero(x.relu()).sum()

    g = gpuir.load(Chosen(), args=(torch.randn(64, 64),), dims={"u0": 99}, warn=lambda _: None)
    costed = gpuir.analyze(g, "a100", profile="eager").graph
    found = [x for x in launched_by(costed) if isinstance(x, Launch)]
    assert [x.op.rpartition("/")[2] for x in found if x.waits] == ["Chosen:nonzero"]


def test_what_stays_on_the_device_is_not_copied():
    encoder = str(Path(__file__).parent.parent.parent / "tests/encoder.onnx")
    g = gpuir.load(encoder, dims={"batch": 1, "seq": 8}, train=True, optimizer="adamw")
    costed = gpuir.analyze(g, "t4", profile="ort").graph
    found, _ = costed_launches(costed, apart=False)
    assert [name for name, _ in found.into] == ["input_ids", "attention_mask"]
    assert [name for name, _ in found.back] == ["last_hidden_state"], "gradients and weights stay"


def test_an_ops_own_views_are_part_of_it():
    """An LSTM's are in its loop, those of a model's own are not."""
    torch = pytest.importorskip("torch")
    module = torch.nn.LSTM(8, 8)
    g = gpuir.load(module, args=(torch.randn(9, 4, 8),), warn=lambda _: None)
    costed = gpuir.analyze(g, "a100", profile="eager").graph
    loop = next(x for x in launched_by(costed) if isinstance(x, Repeat))
    assert loop.inner and loop.trips == 9
    assert not any(x.empty for x in loop.body if isinstance(x, Launch))
    views = [x for x in launched_by(encoder()) if isinstance(x, Launch) and x.empty]
    assert views and len({x.op for x in views}) == len(views)


def test_errors_of_one_kind_add_up_and_those_of_several_as_squares():
    one = together({"gemm": [3.0, 6.0]})
    assert one == (1.0, 1.0)
    quicker, slower = together({"gemm": [3.0, 6.0], "map": [4.0, 8.0], "copy": [0.0, 0.0]})
    assert quicker == pytest.approx(5 / 7) and slower == pytest.approx(10 / 14)
