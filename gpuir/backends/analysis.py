"""What a model takes on one target, or on several compared: answers, the slowest kernels, totals,
coverage, and what it all rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gpuir.backends.json_csv import fields_of
from gpuir.backends.terminal import GAP, Terminal
from gpuir.ir.notes import Bound
from gpuir.report.answer import SCHEMA, Answer
from gpuir.report.equal import EqualKernels, alike, layer, tile_text
from gpuir.report.kernels import KernelRow, Total
from gpuir.report.modules import modules
from gpuir.report.names import node_name
from gpuir.report.order import slower_than_fastest
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table
from gpuir.report.units import between, percent, quantity, rate, share
from gpuir.targets.host import load_host
from gpuir.targets.profile import Profile, load_profile

if TYPE_CHECKING:
    from gpuir.simulate.causes import Gain
    from gpuir.simulate.clock import Traffic
    from gpuir.simulate.fitting import ToFit
    from gpuir.simulate.layout import Moment
    from gpuir.simulate.memory import Memory

NOT_MEASURED = {  # words of `Cost.unseen`, where they are not "this" dtype or size
    "gpu": "this GPU",
    "indices": "indices like these",
    "links": "links like these",
    "ranks": "so many ranks",
    "network": "this network",
}
WAITS = "waits"  # a column of the comparison
SLOWER = "slower"
LEAST_SHARE = 0.005  # of the time: modules below are not listed
LEAST_GAIN = 0.01  # of the time: causes below are not listed
GONE = {"host": "the host"}  # of causes, where the word alone does not read well


def analysis_report(answers: Sequence[Answer], layout: Terminal) -> Report:
    """One run, or several compared. JSON is described in docs/reference/json-schema.md; programs
    have a row for each kernel, target and profile."""
    return Report(
        SCHEMA,
        lambda: _single(answers[0], layout) if len(answers) == 1 else _compare(answers, layout),
        lambda: {"reports": list(map(fields_of, answers))},
    )


# ---------------------------------------------------------------------------- one target


def _single(s: Answer, layout: Terminal) -> Iterator[Part]:
    title = f"{s.device.title} ({s.device.name})" if s.device.title else s.device.name
    short = f"does not fit, {lacking(s.memory)}: " if s.memory.fits is False else ""
    yield Heading(f"{short}{s.model} on {title}")
    yield Notes(list(answers(s)))
    yield Notes(list(head(s)))
    yield from filter(None, (_slowest(s, layout.top), _totals(s, layout)))
    if layout.memory:
        yield _peak(s.memory)
        yield holders(s.memory, layout.top)
    yield from _coverage(s)
    if notes := [*_labelled("assumed", s.assumed), *_labelled("warning", s.warnings)]:
        yield Notes(notes)


def machine_text(profile: Profile) -> str:
    """The machine whose times the host's are."""
    if not profile.machine:
        return "one of the profile's own"
    host = load_host(profile.machine)
    if host.slowdown == 1:
        return f"{host.name}: {host.title}"
    on = f"{host.title}, {host.processor}" if host.processor else host.title
    return f"{host.name}, {host.slowdown:.3g} times as long as the reference: {on}"


def answers(s: Answer) -> Iterator[tuple[str, str]]:
    """What a reader asks first: how long, how sure, what bounds it, what to do. Of each line its
    label and text."""
    unfit = s.memory.fits is False
    if unfit:
        yield "fits", fits_text(s.memory)
        yield "to fit", to_fit_text(s.to_fit)
    where = ", were there enough memory" if unfit else ""
    yield "latency", f"{quantity(s.latency_s, 's', 4)}{where}, {throughput(s)}"
    if s.interval is not None:
        yield "interval", interval(s)
    bound = bounds(s.bounds, s.device_s) if s.device_s else ""
    if s.timeline.is_host_bound:
        yield "bound", f"the host, whose launches the device waits for; kernels: {bound}"
    elif s.device_s:
        yield "bound", f"{bound} of the kernels' time"
    if s.latency_s:
        yield "gains", gains_text(s.gains, s.latency_s)
    if s.timeline.is_host_bound:
        graphs = (name for name in s.software.alternatives if load_profile(name).host.graph)
        one = "".join(f"one launch for all (--profile {name}) or " for name in graphs)
        yield "try", f"{one}a larger batch (--crossover batch finds it) to hide the host"
    elif s.device_s:
        yield "try", "gpuir advise: changes that help; gpuir explain: one kernel's terms"


def head(s: Answer) -> Iterator[tuple[str, str]]:
    """What the answers rest on: of each line its label and text."""
    yield "profile", f"{s.profile}: {s.stack}"
    if s.software.host.call_s:
        yield "host", machine_text(s.software)
    if s.graph.mesh:
        mesh = ", ".join(f"{axis}={n}" for axis, n in s.graph.mesh)
        on = f" on {s.graph.cluster}" if s.graph.cluster else ", over links that nothing names"
        yield "ranks", f"{s.graph.ranks:,} ({mesh}){on}; this is one of them"
    if s.graph.cluster and s.timeline.traffic:
        yield "sends", "; ".join(map(traffic, s.timeline.traffic))
    if s.latency_s > s.timeline.busy_s * (1 + 1e-9):
        yield "device", host_text(s)
    parts = [f"{s.launches:,} launch{'es' * (s.launches != 1)}"]
    listed = sum(x.launches > 0 for x in s.kernels)
    if listed != s.launches:
        parts[0] += f" of {listed:,} kernels"
    if s.views:
        parts.append(f"{s.views:,} free view{'s' * (s.views > 1)}")
    if s.idle:
        parts.append(f"{s.idle:,} in branches not taken")
    yield "kernels", ", ".join(parts)
    if s.latency_s:
        flops = f"{quantity(s.flops, 'flop')} at {quantity(s.flops / s.latency_s, 'flop/s')}"
        moved = f"{quantity(s.bytes, 'bytes')} at {quantity(s.bytes / s.latency_s, 'bytes/s')}"
        yield "work", f"{flops}; reads and writes {moved}{dram_text(s)}"
    yield "memory", memory_text(s.memory)
    if s.memory.fits:
        yield "fits", fits_text(s.memory)
    yield "predictor", ", ".join(s.by) or "none: nothing to run"
    if s.interval is not None or s.unseen:
        yield "fitted on", fitted(s)
    if s.unfitted_s:
        yield "unfitted", unfitted(s)
    if not any(share.nodes for share in s.coverage[1:]):
        folded = f", {s.folded:,} of them folded away" if s.folded else ""
        yield "coverage", f"all {s.nodes:,} model nodes{folded}"


def dram_text(s: Answer) -> str:
    """`; 1.2 GB from or to device memory at 890 GB/s`, where that is not as much."""
    if s.dram_bytes == s.bytes:
        return ""
    if is_cached(s):
        return ", all of it within the caches"
    rate_text = quantity(s.dram_bytes / s.latency_s, "bytes/s")
    return f"; {quantity(s.dram_bytes, 'bytes')} from or to device memory at {rate_text}"


def is_cached(what: Answer | Total) -> bool:
    """Whether less goes from or to device memory than a formula for caches can tell from nothing:
    a thousandth."""
    return what.dram_bytes * 1000 <= what.bytes


def host_text(s: Answer) -> str:
    """`busy 37 % of the time, waits for the host 63 % (7.76 ms): host-bound`."""
    run = s.timeline
    text = f"busy {percent(run.busy_s, s.latency_s)} of the time"
    if run.gaps_s:
        share = percent(run.gaps_s, s.latency_s)
        text += f", waits for the host {share} ({quantity(run.gaps_s, 's')})"
    if run.copies_s:
        share = percent(run.copies_s, s.latency_s)
        text += f", copies {share} ({quantity(run.copies_s, 's')})"
    return f"{text}: host-bound" if run.is_host_bound else text


def traffic(x: Traffic) -> str:
    """`dp: 25 collectives of 3.52 ms, 80 % hidden behind kernels, 704 us exposed`."""
    text = f"{x.group}: {x.count:,} collective{'s' * (x.count != 1)} of {quantity(x.time_s, 's')}"
    hidden = percent(x.time_s - x.exposed_s, x.time_s)
    return f"{text}, {hidden} hidden behind kernels, {quantity(x.exposed_s, 's')} exposed"


def gains_text(gains: Sequence[Gain], whole: float) -> str:
    """`34 % without launches (638 us), 23 % without the host (443 us)`: causes that count."""
    listed = [x for x in gains if x.gain_s >= LEAST_GAIN * whole] or list(gains[:1])
    without = ((GONE.get(x.cause, x.cause), x.gain_s) for x in listed)
    return ", ".join(f"{percent(s, whole)} without {it} ({quantity(s, 's')})" for it, s in without)


def interval(s: Answer) -> str:
    """`88.1 us to 115 us in 80 % of cases`, and how much of the time is in it as it is."""
    low, high = s.interval or (s.latency_s, s.latency_s)
    text = f"{quantity(low, 's')} to {quantity(high, 's')} in 80 % of cases"
    if s.certain_s:
        text += f"; {percent(s.certain_s, s.device_s)} of the kernels' time has no interval"
    return text


def fitted(s: Answer) -> str:
    """Whether this GPU, and the dtypes of its kernels, were measured for what predicts."""
    groups: dict[tuple[tuple[str, ...], float], list[str]] = {}
    for u in (u for u in s.unseen if u.what != "kind"):
        what = NOT_MEASURED.get(u.what, f"this {u.what}")
        groups.setdefault((u.kinds, u.time_s), []).append(what)
    parts: list[str] = []
    for (kinds, time_s), what in groups.items():
        share = percent(time_s, s.device_s)
        of = "" if share == "100 %" else f" for {', '.join(kinds)} ({share} of the kernels' time)"
        parts.append(f"no measurements of {' or '.join(what)}{of}")
    other = "measurements of this GPU, in these dtypes"
    on_host_s = sum(x.time_s for x in s.kernels if x.runs and x.cost.on_host)
    if on_host_s:
        share = percent(on_host_s, s.device_s)
        parts.append(f"no measurements of the CPU, whose rates are assumed ({share} of that time)")
    elif s.unfitted_s >= s.device_s * (1 - 1e-9):
        other = "no measurements of these kinds of kernels"
    return "; ".join(parts) or other


def unfitted(s: Answer) -> str:
    """`62 % of the kernels' time, routine, pool: no measurements of such kernels; of it 40 % by
    library routines, 3 % by unknown operators`."""
    kinds = next((u.kinds for u in s.unseen if u.what == "kind"), ())
    share = percent(s.unfitted_s, s.device_s)
    text = f"{share} of the kernels' time, {', '.join(kinds)}: no measurements of such kernels"
    words = {"approximated": "library routines", "opaque": "unknown operators"}
    parts = [
        f"{percent(x.time_s, s.device_s)} by {words[x.status]}"
        for x in s.coverage
        if x.status in words and x.time_s
    ]
    return text + (f"; {', '.join(parts)}" if parts else "")


def memory_text(m: Memory) -> str:
    """`6.2 GB at the peak, in MatMul_3: weights 4.1 GB, activations 2.1 GB`."""
    held = sorted(m.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{kind} {quantity(n, 'bytes')}" for kind, n in held if n)
    return f"{quantity(m.peak_bytes, 'bytes')} at the peak, in {moment_name(m.peak)}: {parts}"


def fits_text(m: Memory) -> str:
    """`34.1 GB to spare: 7.7 GB reserved of 41.8 GB (allocator caching)`."""
    spare, has = m.spare_bytes or 0, m.available_bytes or 0
    room = quantity(abs(spare), "bytes")
    verdict = f"{room} to spare" if spare >= 0 else f"no, {room} short"
    reserved = f"{quantity(m.reserved_bytes, 'bytes')} reserved of {quantity(has, 'bytes')}"
    return f"{verdict}: {reserved} (allocator {m.allocator})"


def lacking(m: Memory) -> str:
    """`5.04 GB short`."""
    return f"{quantity(-(m.spare_bytes or 0), 'bytes')} short"


def to_fit_text(changes: Sequence[ToFit]) -> str:
    """`--dims batch=6 (1.2 GB to spare), or --target a100-sxm-80gb (41 GB to spare)`."""
    words = (
        f"{x.option} ({quantity(x.spare_bytes, 'bytes')} to spare)" if x.spare_bytes else x.option
        for x in changes
    )
    return ", or ".join(words) or (
        "nothing that was tried; `gpuir largest` and `gpuir plan` try more"
    )


def moment_name(moment: Moment) -> str:
    """The model node that a moment is named after."""
    if not moment.path:
        return "the first node"
    return node_name(moment.locs[-1]) if moment.locs else "/".join(moment.path)


def throughput(s: Answer) -> str:
    """Runs a second, and items a second where the batch is known."""
    if not s.latency_s:
        return "nothing runs"
    runs = f"{rate(1 / s.latency_s)} runs/s"
    return f"{runs} of batch {s.batch:,}: {rate(s.batch / s.latency_s)}/s" if s.batch else runs


def bounds(shares: Sequence[tuple[Bound, float]], whole: float) -> str:
    """`memory 61 %, compute 39 %`, the largest first."""
    largest = sorted(shares, key=lambda pair: -pair[1])
    return ", ".join(f"{name} {percent(part, whole)}" for name, part in largest if part)


def spread(x: KernelRow) -> str:
    """`-9 +14 %`: the ends of the interval, beside the time."""
    if x.cost.interval is None or not x.cost.time_s:
        return ""
    low, high = (100 * (end / x.cost.time_s - 1) for end in x.cost.interval)
    return f"{low:+.0f} {high:+.0f} %"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def _slowest(s: Answer, top: int) -> Table | None:
    """Equal kernels in a line, those of most time first."""
    groups = alike(s)
    if not groups[:top]:
        return None
    several = len({x.one.cost.by for x in groups[:top] if x.one.tile}) > 1
    rest = groups[top:]
    time, count = sum(x.time_s for x in rest), sum(len(x.kernels) for x in rest)
    more = f"{count:,} more take {quantity(time, 's')}, {percent(time, s.latency_s)}: see --top"

    def each_s(x: EqualKernels) -> float | None:
        return x.one.cost.time_s if x.runs != 1 else None

    def fact(title: str, name: str, text: Callable[[float], str], drop: int) -> Column:
        def cell(x: EqualKernels) -> str:
            value = x.one.cost.fact(name)
            return "" if value is None else text(value)

        return Column(title, "number", text=cell, drop=drop)

    return Table(
        groups,
        (
            Column("time", "s", value="time_s"),
            Column("share", "%", value=lambda x: share(x.time_s, s.latency_s)),
            Column("runs", "x", value="runs", drop=7),
            Column("each", "s", value=each_s, blank="", drop=1),
            Column("kernel", value="one.kind"),
            Column("bound", value="one.cost.bound", drop=8),
            Column("peak", "%", value="one.peak_share", blank="", drop=6),
            Column("80 %", "%", text=lambda x: spread(x.one), drop=5),
            fact("waves", "waves", _short, 4),
            fact("occup", "occupancy", percent, 3),
            Column("tile", text=lambda x: tile_text(x.one), drop=2),
            Column("by", text=lambda x: x.one.cost.by if several else "", drop=9),
            Column("layer", value=layer, least=22, elided=True),
        ),
        top=top,
        more=(more,) * bool(rest),
    )


def _totals(s: Answer, layout: Terminal) -> Table | None:
    """A row a kind of kernels, a phase of training, or a module."""
    match layout.group:
        case "kernel":
            named = [(total.kind, total) for total in s.totals]
        case "phase":
            named = [(total.kind, total) for total in s.phases]
        case "module":
            tree = [m for m in modules(s.running) if m.total.time_s >= LEAST_SHARE * s.latency_s]
            named = [("  " * m.depth + ".".join(m.path), m.total) for m in tree]
    if not named:
        return None
    differs = any(total.dram_bytes != total.bytes for _, total in named)

    def cached(x: tuple[str, Total]) -> int | None:
        return None if is_cached(x[1]) else x[1].dram_bytes

    return Table(
        named,
        (
            Column(layout.group, value=lambda x: x[0]),
            Column("launches", "count", value=lambda x: x[1].launches, drop=4),
            Column("time", "s", value=lambda x: x[1].time_s),
            Column("share", "%", value=lambda x: share(x[1].time_s, s.latency_s)),
            Column("flop", "flop", value=lambda x: x[1].flops or None, drop=3),
            Column("bytes", "bytes", value=lambda x: x[1].bytes or None, drop=2),
            *([Column("dram", "bytes", value=cached, drop=1)] if differs else []),
            Column("bound", value=lambda x: bounds(x[1].bounds, x[1].time_s)),
        ),
    )


def _peak(m: Memory) -> Table:
    """The peak by kind."""
    return Table(
        [(kind, n) for kind, n in m.parts.items() if n],
        (
            Column("at the peak", value=lambda x: x[0]),
            Column("bytes", "bytes", value=lambda x: x[1]),
            Column("share", "%", value=lambda x: share(x[1], m.peak_bytes)),
            Column("", text=lambda x: "#" * round(40 * x[1] / m.peak_bytes)),
        ),
    )


def holders(m: Memory, top: int) -> Table:
    """Who holds the most at the peak."""
    return Table(
        m.largest,
        (
            Column("bytes", "bytes", value="bytes"),
            Column("share", "%", value=lambda h: share(h.bytes, m.peak_bytes)),
            Column("held as", value="kind"),
            Column("by", value="name"),
        ),
        top=top,
    )


def _coverage(s: Answer) -> Iterator[Table]:
    """The ledger, where something is not modelled."""
    if any(x.nodes for x in s.coverage[1:]):
        yield coverage(s)


def coverage(s: Answer) -> Table:
    """A row a status: nodes, and the share of the time, flops and bytes; names of what is not
    modelled."""
    whole = sum(x.bytes for x in s.coverage)
    rows = [
        (
            x.status,
            x.nodes,
            percent(x.time_s, s.device_s),
            "?" if x.status == "opaque" and x.nodes else percent(x.flops, s.flops),
            percent(x.bytes, whole),
            ", ".join(f"{name} x{n}" if n > 1 else name for name, n in x.what),
        )
        for x in s.coverage
    ]
    if s.folded:
        rows.append(("folded", s.folded, "", "", "", "known at load, or no work left"))
    return Table(
        rows,
        (
            Column("coverage", value=lambda x: x[0]),
            Column("nodes", "count", value=lambda x: x[1]),
            Column("time", "%", text=lambda x: x[2]),
            Column("flop", "%", text=lambda x: x[3], drop=1),
            Column("bytes", "%", text=lambda x: x[4], drop=2),
            Column("", text=lambda x: x[5]),
        ),
    )


def _labelled(label: str, notes: Iterable[str]) -> Iterator[tuple[str, str]]:
    for i, text in enumerate(notes):
        yield "" if i else label, text.replace(": assumed: ", ": ")


# ---------------------------------------------------------------------------- several targets


def _compare(answers: Sequence[Answer], layout: Terminal) -> Iterator[Part]:
    first, runs = answers[0], list(zip(run_names(answers), answers, strict=True))
    yield Heading(f"{first.model} {of_what(answers)}")
    if unfit := [(name, s) for name, s in runs if s.memory.fits is False]:
        short = "does not fit on {}: {}{}"
        changes = (f"; {to_fit_text(s.to_fit)}" if s.to_fit else "" for _, s in unfit)
        lines = zip(unfit, changes, strict=True)
        yield Notes([("", short.format(n, lacking(s.memory), to)) for (n, s), to in lines], 0)
    compared = comparison(answers, layout.width)
    yield compared
    yield from _by_kind(answers, layout.width)
    yield from _coverage(first)
    rests = rests_on(runs, any(c.title == WAITS for c in compared.columns))
    yield Notes([(SLOWER, "share of cases in which it is slower than the fastest"), *rests])


def rests_on(
    runs: Sequence[tuple[str, Answer]], waits: bool = False, own: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """What runs with these names rest on; `own` is what is assumed of all together."""
    if waits:
        yield WAITS, "share of the time that the device waits for the host"
    yield (
        "predictor",
        ", ".join(dict.fromkeys(by for _, s in runs for by in s.by)) or ("none: nothing to run"),
    )
    known = {n: (fitted(s),) for n, s in runs if s.interval is not None or s.unseen}
    yield from _labelled("fitted on", _of_each(known))
    apart = {n: (unfitted(s),) if s.unfitted_s else () for n, s in runs}
    yield from _labelled("unfitted", _of_each(apart))
    yield from _labelled("assumed", [*own, *_of_each({n: s.assumed for n, s in runs})])
    yield from _labelled("warning", dict.fromkeys(w for _, s in runs for w in s.warnings))


def comparison(answers: Sequence[Answer], width: int = 80) -> Table:
    """A row a run."""
    fastest = min(s.latency_s for s in answers)
    what = "target" if len({s.device.name for s in answers}) > 1 else "profile"

    def of(title: str, unit: str, read: Callable[[Answer], object], drop: int = 0) -> Column:
        return Column(title, unit, value=lambda x: read(x[1]), drop=drop)

    def times(x: tuple[str, Answer]) -> str:
        return f"{x[1].latency_s / fastest:.2f}" if fastest else "-"

    odds = {id(s): p for s, p in zip(answers, slower_than_fastest(answers), strict=True)}
    waits = of(WAITS, "%", lambda s: share(s.timeline.gaps_s, s.latency_s))
    return Table(
        list(zip(run_names(answers), answers, strict=True)),
        (
            Column(what, value=lambda x: x[0], least=_names(width), elided=True),
            Column("latency", "s", value=lambda x: x[1].latency_s, digits=4),
            Column("80 % of cases", "s", text=lambda x: between(x[1].interval), drop=4),
            Column("x fastest", "number", text=times),
            of(SLOWER, "%", lambda s: odds[id(s)], 3),
            *([waits] * any(s.timeline.gaps_s > 0.01 * s.latency_s for s in answers)),
            of("runs/s", "1/s", lambda s: 1 / s.latency_s if s.latency_s else None, 2),
            of("launches", "count", lambda s: s.launches, 1),
            of("to spare", "bytes", lambda s: s.memory.spare_bytes, 3),
            of("bound", "", lambda s: bounds(s.bounds, s.device_s)),
        ),
    )


def _names(width: int) -> int:
    """How many characters a run's name keeps beside what it comes to."""
    return max(width - 52, 16)


def run_names(summaries: Sequence[Answer]) -> list[str]:
    """What tells the runs apart: `a100`, `eager`, or `a100 eager` where both differ."""
    given = [s.graph.target or s.device.name for s in summaries]
    names = [s.device.name for s in summaries]
    targets = names if len(set(names)) >= len(set(given)) else given
    profiles = [s.profile for s in summaries]
    if len(set(profiles)) == 1:
        return targets
    if len(set(targets)) == 1:
        return profiles
    return [f"{target} {profile}" for target, profile in zip(targets, profiles, strict=True)]


def of_what(summaries: Sequence[Answer]) -> str:
    """`on 3 targets`, `on a100 under 2 profiles`."""
    targets = {s.device.name: s.device for s in summaries}
    profiles = {s.profile for s in summaries}
    on = f"{len(targets)} targets" if len(targets) > 1 else next(iter(targets))
    under = f"{len(profiles)} profiles" if len(profiles) > 1 else next(iter(profiles))
    return f"on {on} under {under}"


def _of_each(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Each note once, behind the names of the targets that it is of."""
    own: dict[str, list[str]] = {}
    for name, texts in notes.items():
        for text in texts:
            own.setdefault(text, []).append(name)
    return [_whose(names, len(notes)) + text for text, names in own.items()]


def _whose(names: Sequence[str], of: int) -> str:
    """`a100, l4 and 3 more: `; nothing where it is said of all."""
    if len(names) == of:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}: "


def _by_kind(answers: Sequence[Answer], width: int) -> Iterator[Table]:
    """Time by kind of kernel: a column a target, or where those do not fit, a row."""
    kinds = tuple(dict.fromkeys(total.kind for s in answers for total in s.totals))
    names = run_names(answers)
    times = {
        (name, total.kind): total.time_s
        for name, s in zip(names, answers, strict=True)
        for total in s.totals
    }
    if not kinds:
        return
    if sum(max(len(name), 9) + GAP for name in names) + max(map(len, kinds)) <= width:
        cells = [Column(n, "s", value=lambda kind, n=n: times.get((n, kind))) for n in names]
        yield Table(kinds, (Column("kernel", value=str), *cells))
        return

    def of(kind: str, drop: int) -> Column:
        return Column(kind, "s", value=lambda n: times.get((n, kind)), drop=drop)

    order = zip(kinds, range(len(kinds), 0, -1), strict=True)
    target = Column("target", value=str, least=_names(width), elided=True)
    yield Table(names, (target, *(of(kind, drop % len(kinds)) for kind, drop in order)))
