"""Which parallel plan of a model is quickest on a cluster: what is tried, in which order, and why
the others lose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isnan, isqrt, nan
from typing import Any

from gpuir.ir.errors import GpuirError, UsageError
from gpuir.report.answer import Answer
from gpuir.simulate.parallel import Parallel
from gpuir.simulate.step import SharedByTp

MICROBATCH = (1, 2, 4, 8)  # sequences of a rank that are tried
INTERLEAVED = 2  # chunks a rank that are tried beside one


@dataclass(frozen=True)
class Choice:
    """A plan that may be tried: degrees, and whether blocks are computed again in the backward
    pass."""

    parallel: Parallel
    recompute: bool = False

    @property
    def share(self) -> float:
        """The part of a step's batch that a rank takes at a time."""
        p = self.parallel
        return 1 / (p.dp * p.ep * p.microbatches)

    def is_part_of(self, other: Choice) -> bool:
        """Whether kernels of a microbatch are those of another choice, cut into smaller ones, or
        these and more of them."""
        p, q = self.parallel, other.parallel
        smaller = p.tp >= q.tp and p.cp >= q.cp and p.ep >= q.ep and self.share <= other.share
        alike = q.cp == 1 or p.exchange == q.exchange  # a ring has kernels of its own
        return smaller and alike and self.recompute >= other.recompute

    def is_cut_as(self, other: Choice) -> bool:
        """Whether each layer is cut over as many ranks as in another choice."""
        p, q = self.parallel, other.parallel
        return (p.tp, p.cp, p.ep) == (q.tp, q.cp, q.ep)

    def __str__(self) -> str:
        p = self.parallel
        words = [str(p), f"{p.microbatches} microbatch{'es' * (p.microbatches != 1)}"]
        if p.pp > 1:
            words.append(p.schedule)
        return ", ".join(words) + (", recomputed" if self.recompute else "")


@dataclass(frozen=True)
class ModelBounds:
    """What bounds need of a model: flops of a step's products, bytes of weights and of the
    optimizer's states, the items of a batch; and of the GPUs: how many, how many share the fastest
    links, the peak of one, what one has for allocations. Where they are not `alike`, both are those
    of the GPU with most, and what one choice takes on its GPUs bounds no other. The rest are names.
    """

    model: str
    target: str
    profile: str
    cluster: str
    flops: float
    weight_bytes: int
    state_bytes: int
    batch: int
    gpus: int
    node_gpus: int
    peak_flops_per_s: float
    available_bytes: int
    alike: bool = True

    def left_out(
        self, choice: Choice, why: str, least_s: float = nan, least_bytes: int = 0
    ) -> Tried:
        """A choice that was not simulated, and the least that it takes; or one that cannot be."""
        answer = Answer(
            self.model,
            self.target,
            self.profile,
            batch=self.batch,
            latency_s=least_s,
            reserved_bytes=least_bytes,
            available_bytes=self.available_bytes,
            why=why,
            cluster=self.cluster,
            plan=str(choice.parallel),
        )
        return Tried(choice, answer)


@dataclass(frozen=True)
class Tried:
    """What a step of a choice comes to. `why` of its answer says why it cannot be, or that it was
    not simulated: the time and the memory are then the least that they can be."""

    choice: Choice
    answer: Answer
    mfu: float = 0.0
    kernels_s: float = 0.0
    exposed_s: float = 0.0
    idle_s: float = 0.0
    microbatch_s: float = 0.0
    waits_s: float = 0.0
    activations: int = 0
    tp_shared: SharedByTp | None = None

    @property
    def wins(self) -> bool:
        return not self.answer.why


@dataclass(frozen=True)
class FoundChoices:
    """The choices, the quickest that fit first, and how many were `simulated`, those among them
    that an earlier search has `kept`."""

    tried: tuple[Tried, ...]
    simulated: int
    kept: int = 0

    @property
    def best(self) -> tuple[Tried, ...]:
        return tuple(x for x in self.tried if x.wins)

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Why choices lost, and how many each, the most first."""
        return Counter(x.answer.why for x in self.tried if not x.wins).most_common()


def space(
    model: ModelBounds,
    degrees: Mapping[str, Sequence[int]],
    recompute: Sequence[bool] = (False, True),
    schedules: Sequence[str] = ("1f1b", "interleaved"),
) -> Iterator[Choice]:
    """The choices for all GPUs of a cluster. `degrees` limits "tp", "pp", "cp", "ep", "dp", "zero"
    and "microbatch" (sequences of a rank at a time) to some numbers; what it leaves out is any that
    divides: of tp as many as share the fastest links, of cp and ep one.
    """
    for base in bases(model, degrees):
        yield from _choices(model, base, degrees, recompute, schedules)


def bases(model: ModelBounds, degrees: Mapping[str, Sequence[int]]) -> Iterator[Parallel]:
    """Degrees of which the product is all GPUs."""
    for tp in _allowed(degrees, "tp", divisors(model.node_gpus)):
        for cp in _allowed(degrees, "cp", (1,)):
            for ep in _allowed(degrees, "ep", (1,)):
                left, rest = divmod(model.gpus, tp * cp * ep)
                for pp in _allowed(degrees, "pp", divisors(left)) if not rest else ():
                    if left % pp == 0 and left // pp in _allowed(degrees, "dp", (left // pp,)):
                        base = Parallel(left // pp, tp, pp, cp, ep, sequence=tp > 1)
                        yield base
                        if cp > 1:
                            yield replace(base, exchange="ring")


def _choices(
    model: ModelBounds,
    base: Parallel,
    degrees: Mapping[str, Sequence[int]],
    recompute: Sequence[bool],
    schedules: Sequence[str],
) -> Iterator[Choice]:
    stages = (0, 1) if base.pp > 1 else (0, 1, 3)
    for zero in _allowed(degrees, "zero", stages) if base.dp > 1 else (0,):
        for size in _allowed(degrees, "microbatch", MICROBATCH):
            count, rest = divmod(model.batch, base.dp * base.ep * size)
            if rest or not count:
                continue
            made = replace(base, zero=zero, microbatches=count)
            for again in recompute:
                yield from (Choice(p, again) for p in _ordered(made, schedules))


def _ordered(p: Parallel, schedules: Sequence[str]) -> Iterator[Parallel]:
    if p.pp == 1:
        yield p
        return
    for name in schedules:
        chunks = INTERLEAVED if name == "interleaved" else 1
        if name != "interleaved" or p.microbatches % p.pp == 0:
            yield replace(p, schedule=name, chunks=chunks)


def _allowed(
    degrees: Mapping[str, Sequence[int]], name: str, usual: Sequence[int]
) -> Sequence[int]:
    return degrees.get(name) or usual


def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return tuple(dict.fromkeys((*small, *(n // d for d in reversed(small)))))


# ---- bounds ------------------------------------------------------------------------------------


def least_bytes(choice: Choice, model: ModelBounds, known: Iterable[Tried] = ()) -> int:
    """What a rank holds at least: weights and states, as evenly as can be, and what forward passes
    leave for backward ones, as `known` choices have it: of a part of their batch, or of their
    sequences and weights, as much less."""
    p = choice.parallel
    shared = p.tp * p.pp * p.ep
    weights = model.weight_bytes / (shared * (p.dp if p.zero > 2 else 1))
    states = model.state_bytes / (shared * (p.dp if p.zero else 1))
    left = 0.0
    for x in known if model.alike else ():
        # other schedules than 1f1b keep more passes than `in_flight` says
        if x.choice.parallel.pp > 1 and x.choice.parallel.schedule != "1f1b":
            continue
        if x.activations and choice.is_part_of(x.choice) and choice.recompute == x.choice.recompute:
            cut = in_flight(p) / in_flight(x.choice.parallel) * choice.share / x.choice.share
            q = x.choice.parallel
            left = max(left, cut * x.activations * (q.tp * q.cp) / (p.tp * p.cp))
    return int(weights + states + left)


def in_flight(p: Parallel) -> float:
    """How many forward passes of the whole model the first part of a pipeline keeps, at least."""
    return min(p.microbatches, p.pp) / p.pp


def least_s(choice: Choice, model: ModelBounds, known: Iterable[Tried] = ()) -> float:
    """What a step takes at least: its products at the GPUs' peak, or the kernels of a microbatch as
    `known` ones have them, on each part's rank one microbatch after another; and until the last
    part of a pipeline has something to do, and the first has its last gradient.

    Kernels that are cut into smaller ones are taken for no quicker together than they were, and so
    are the collectives between them that they wait for, where as many ranks share a layer.
    """
    p = choice.parallel
    alone = model.flops / (p.ranks * model.peak_flops_per_s)
    for x in known if model.alike else ():
        if x.microbatch_s and choice.is_part_of(x.choice):
            q = x.choice.parallel
            cut = (q.tp * q.cp) / (p.tp * p.cp) * choice.share / x.choice.share
            took = x.microbatch_s + (x.waits_s if choice.is_cut_as(x.choice) else 0.0)
            alone = max(alone, cut * took * p.microbatches / p.pp)
    waits = (p.pp - 1) / (p.chunks * p.microbatches)
    return alone * (1 + (waits if p.schedule != "zero-bubble" else 0.0))


# ---- the search --------------------------------------------------------------------------------


def search(
    choices: Iterable[Choice],
    model: ModelBounds,
    simulate: Callable[[Choice], Answer],
    *,
    exhaustive: bool = False,
    known: Mapping[str, Tried] | None = None,
    done: Callable[[Tried], None] = lambda _: None,
) -> FoundChoices:
    """The quickest choice that fits, and why the others lose.

    Those that cannot fit are left out at once. The rest is simulated in the order of the least time
    that each can take, until that is more than the quickest takes: none that is left out can be
    quicker. That time is known better with each simulation: kernels of a microbatch are the same
    in all plans that cut it alike. `known` choices, by name, are not simulated again;
    `done` gets each that was. `exhaustive` simulates all.
    """
    found: list[Tried] = []
    left: list[Choice] = []
    for choice in choices:
        held = least_bytes(choice, model)
        if held > model.available_bytes and not exhaustive:
            why = "memory: weights and states"
            found.append(model.left_out(choice, why, least_s(choice, model), held))
        else:
            left.append(choice)
    simulated = kept = 0
    while left:
        full = [c for c in left if least_bytes(c, model, found) > model.available_bytes]
        if full and not exhaustive:
            found += [_too_full(c, model, found) for c in full]
            left = [c for c in left if c not in full]
            continue
        bounds = [least_s(c, model, found) for c in left]
        i = min(range(len(left)), key=lambda i: (bounds[i], left[i].recompute, -left[i].share))
        if bounds[i] > quickest_of(found) and not exhaustive:
            break
        choice = left.pop(i)
        tried = (known or {}).get(str(choice))
        simulated += 1
        if tried is None:
            tried = _tried(choice, model, simulate)
            done(tried)
        else:
            kept += 1
        found.append(tried)
    for choice in left:
        least = least_s(choice, model, found)
        waits = least_s(without_waits(choice), model, found) <= quickest_of(found)
        why = "time: bubble of the pipeline" if waits else "time: kernels alone take longer"
        found.append(model.left_out(choice, why, least, least_bytes(choice, model)))
    ordered = sorted(found, key=lambda x: (not x.wins, _seconds(x)))
    return FoundChoices(tuple(ordered), simulated, kept)


def _too_full(choice: Choice, model: ModelBounds, known: Sequence[Tried]) -> Tried:
    why = "memory: activations, as similar plans showed"
    least = least_s(choice, model, known)
    return model.left_out(choice, why, least, least_bytes(choice, model, known))


def quickest_of(found: Iterable[Tried]) -> float:
    return min((x.answer.latency_s for x in found if x.wins), default=inf)


def _seconds(x: Tried) -> float:
    return inf if isnan(x.answer.latency_s) else x.answer.latency_s


def without_waits(choice: Choice) -> Choice:
    """The choice without the waits of its pipeline."""
    return replace(choice, parallel=replace(choice.parallel, schedule="zero-bubble"))


def _tried(choice: Choice, model: ModelBounds, simulate: Callable[[Choice], Answer]) -> Tried:
    try:
        found = simulate(choice)
    except GpuirError as error:
        return model.left_out(choice, f"cannot be split: {str(error).splitlines()[0]}")
    step, why = found.step, "" if found.fits else "memory: activations, with weights and states"
    return Tried(
        choice,
        replace(found, batch=model.batch, why=why, over=None),
        mfu=step.mfu,
        kernels_s=step.slowest.kernels_s,
        exposed_s=step.exposed_s,
        idle_s=step.idle_s,
        microbatch_s=step.microbatch_s,
        waits_s=step.waits_s,
        activations=dict(step.fullest.holds).get("activations", 0),
        tp_shared=step.tp_shared,
    )


# ---- a search that goes on ---------------------------------------------------------------------


def written(tried: Tried) -> str:
    """A choice that was simulated, as JSON."""
    return json.dumps(asdict(tried))


def read(texts: Mapping[str, str], where: str) -> dict[str, Tried]:
    """What an earlier search has simulated, by name, from what it wrote into a file."""
    found: dict[str, Tried] = {}
    for name, text in texts.items():
        try:
            found[name] = _read(json.loads(text))
            if name != str(found[name].choice):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(
                f"the plan {name!r} does not come from an earlier search",
                where=where,
                found=text[:60],
                fix="use another file, or delete this one",
            ) from error
    return found


def _read(raw: dict[str, Any]) -> Tried:
    choice, answer, shared = (raw.pop(name) for name in ("choice", "answer", "tp_shared"))
    numbers = ("latency_s", "reserved_bytes", "available_bytes")
    given: dict[str, Any] = {**answer, "dims": (), "why": str(answer["why"])}
    given |= {name: answer[name] + 0 for name in numbers}
    if answer["interval"] is not None:
        given["interval"] = tuple(map(float, answer["interval"]))
    return Tried(
        Choice(Parallel(**choice["parallel"]), choice["recompute"]),
        Answer(**given),
        tp_shared=None if shared is None else SharedByTp(**shared),
        **{key: x + 0 for key, x in raw.items()},  # TypeError where one is no number
    )
