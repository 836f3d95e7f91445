"""What makes a model fit a target that it does not fit: changes of the command line, each tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from gpuir.cli import options
from gpuir.cli.output import note

if TYPE_CHECKING:
    import gpuir
    from gpuir.cli.options import ModelRun
    from gpuir.report.answer import Answer
    from gpuir.simulate.fitting import ToFit
    from gpuir.simulate.memory import Memory
    from gpuir.targets.cluster import Cluster

MOST_SEARCHED = 3  # targets that do not fit: of more, the next larger one alone is looked for
DEGREES = (2, 4, 8)  # of tensor parallelism: within one machine
HALVINGS = 6  # of the batch of a step


def with_fixes(asked: ModelRun, answers: list[Answer]) -> list[Answer]:
    """The answers, which look for what makes them fit when somebody asks."""
    unfit = sum(a.fits is False for a in answers)
    if not unfit or unfit > MOST_SEARCHED:
        return answers
    search = _Search(asked)
    return [a.with_details(fixes=_found(search, a.fixes)) for a in answers]


def fixes_of(asked: ModelRun, dims: Mapping[str, int]) -> tuple[ToFit, ...]:
    """What makes one run of the options fit, with some dimensions more."""
    from gpuir.cli.lowering import analyze

    loading = asked.loading
    past = dims.get("past") if loading.phase else None
    sizes = ((name, n) for name, n in dims.items() if past is None or name != "past")
    asked = replace(asked, loading=replace(loading.sized(*sizes), past=past or loading.past))
    (s,) = with_fixes(asked, analyze(asked, []))
    return s.to_fit


def _found(
    search: _Search, otherwise: Callable[[Answer], tuple[ToFit, ...]]
) -> Callable[[Answer], tuple[ToFit, ...]]:
    """What the search finds, and what is looked for without one."""
    return lambda s: (*search.of(s), *otherwise(s))


@dataclass(frozen=True)
class _Search:
    asked: ModelRun

    def of(self, s: Answer) -> tuple[ToFit, ...]:
        """The smallest change of the batch, or else of data types, or else of ranks."""
        if self.asked.costing.pipeline or not s.graph.target:
            return ()
        note(f"{s.model} does not fit {s.device.name}: looking for what does")
        for changes in (self.batch, self.dtypes, self.ranks):
            for found in changes(s):
                return (found,)
        return ()

    @property
    def how(self) -> gpuir.LoadOptions:
        return self.asked.loading.options(self.asked.loaded)

    def memory(self, s: Answer, how: gpuir.LoadOptions) -> Memory | None:
        """What the model needs with other options; None where it does not take them."""
        import gpuir
        from gpuir.ir.errors import GpuirError

        target = gpuir.load_target(str(s.graph.target))
        try:
            g = _loaded(self.asked, s.graph.profile, how)
            if g.level.name != "graph":  # lowered already, as it is
                return None
            lowered = gpuir.lower(g, profile=s.graph.profile, target=s.graph.target)
            return gpuir.memory(lowered, target)
        except GpuirError:
            return None

    def batch(self, s: Answer) -> Iterator[ToFit]:
        """The largest batch."""
        from gpuir.simulate.fitting import ToFit
        from gpuir.simulate.largest import largest

        how = self.how
        name, size = batch_of(how)
        if size < 2:
            return

        @cache
        def held(n: int) -> Memory | None:
            return self.memory(s, options.with_size(how, **{name: n}))

        found = largest(held, 1, size - 1, {size: s.memory})
        if found.value is not None:
            spare = found.tried[found.value].spare_bytes or 0
            yield ToFit("batch", f"--dims {name}={found.value}", spare)

    def dtypes(self, s: Answer) -> Iterator[ToFit]:
        """Half as many bits: of the weights and all else, of a cache, of a training step."""
        from gpuir.simulate.fitting import ToFit

        how, config = self.how, self.asked.model.startswith("hf:")
        is_wide = any(v.type.dtype.bits > 16 and v.type.dtype.is_float for v in s.graph.params)
        changes: list[tuple[bool, str, dict[str, Any]]] = [
            (config and is_wide, "--dtype bf16", {"dtype": "bf16"}),
            (
                bool(config and how.get("phase") and not how.get("cache_dtype")),
                "--cache-dtype f8e4m3",
                {"cache_dtype": "f8e4m3"},
            ),
            (
                bool(is_wide and how.get("train") and not how.get("autocast")),
                "--autocast bf16",
                {"autocast": "bf16"},
            ),
        ]
        for is_open, option, change in changes:
            if not is_open:
                continue
            made = how.copy()
            made.update(change)  # pyright: ignore[reportArgumentType, reportCallIssue]
            held = self.memory(s, made)
            if held is not None and held.fits:
                yield ToFit("dtype", option, held.spare_bytes or 0)

    def ranks(self, s: Answer) -> Iterator[ToFit]:
        """The fewest GPUs of one machine that share the weights."""
        import gpuir
        from gpuir.ir.errors import GpuirError
        from gpuir.simulate.fitting import ToFit

        machine = _machine_of(gpuir.load_target(str(s.graph.target)).name)
        if machine is None or s.graph.mesh:
            return
        most = (s.memory.reserved_bytes // (s.memory.available_bytes or 1), machine.node_gpus)
        for tp in (n for n in DEGREES if most[0] < n <= most[1]):
            try:
                g = _loaded(self.asked, s.graph.profile, self.how)
                parallel = gpuir.Parallel(tp=tp)
                step = gpuir.simulate_ranks(g, machine.name, parallel, profile=s.graph.profile)
            except GpuirError:
                continue
            if step.fits:
                option = f"gpuir simulate --cluster {machine.name} --tp {tp}"
                yield ToFit("tp", option, step.spare_bytes or 0)
                return


def _loaded(asked: ModelRun, profile: str | None, how: gpuir.LoadOptions) -> gpuir.Graph:
    stack: dict[str, Any] = {"profile": profile, "tf32": asked.costing.tf32}
    return asked.loading.load(asked.model, asked.loaded, lambda _: None, how, **stack)


def batch_of(how: Mapping[str, Any]) -> tuple[str, int]:
    """The one dimension that is called a batch, and its size; 0 where there is none."""
    dims: dict[str, int] = how.get("dims", {})
    found = [(name, n) for name, n in dims.items() if options.is_batch(name)]
    return found[0] if len(found) == 1 else ("", 0)


def _machine_of(gpu: str) -> Cluster | None:
    """A machine with several GPUs of a kind, the smallest that is known."""
    import gpuir

    known = (gpuir.load_cluster(name) for name in gpuir.cluster_names())
    found = [m for m in known if not m.kinds and m.nodes == 1 and m.target.name == gpu]
    return min(found, key=lambda m: (m.gpus < 2, m.gpus, m.name), default=None)
