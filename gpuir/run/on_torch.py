"""A PyTorch program run on the device at hand, node by node and as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from time import monotonic, perf_counter, thread_time
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from gpuir.fit.timing import HostWatch
from gpuir.frontends.torch import hf, program
from gpuir.frontends.torch.archive import open_program
from gpuir.frontends.torch.program import TorchProgram, traced_inputs, unheard
from gpuir.ir.errors import UsageError, raised
from gpuir.report.check import Check, DeviceRun, RanStep, checked
from gpuir.run.loading import LoadOptions, is_config
from gpuir.run.practice import MODELS
from gpuir.run.runs import analyze

Shapes = Mapping[str, tuple[int, ...]]
SCALE = 0.02  # standard deviation of weights that are made: sums stay small
STEPS_SHARE = 0.5  # of the time, for the steps one by one
MOST = 20  # rounds of them
ROUNDS = 3  # in which all small models are run
CHECKS = "_assert"  # operators that torch.export adds to the program
COMPILED = "## Call CompiledFxGraph"
ALLOCATED = ("aten::empty_strided", "aten::empty", "aten::as_strided")
RANDOM = "the weights are random numbers: {} has none that gpuir reads"
OWN = ("expert_skew", "converters", "strict", "channels_last")  # options of the graph alone


def run_torch(
    model: str,
    options: LoadOptions,
    shapes: Shapes,
    *,
    compiled: bool,
    device: str,
    threads: int,
    budget_s: float,
) -> DeviceRun:
    """The program that a path names, as PyTorch runs it eagerly or `compiled`: on `cuda`, or on so
    many threads of the CPU. A saved program gets inputs of these shapes, by name."""
    made, notes = live(model, options, device)
    if compiled:
        _check_compiler(device)
    torch.set_num_threads(threads)
    inductor: Any = import_module("torch._inductor.config")
    with torch.no_grad(), unheard(), inductor.patch({"cpp.enable_kernel_profile": True}):
        module, args, kwargs, graph = _parts(made, shapes, device)
        compiler: Any = torch
        call = compiler.compile(module) if compiled else module
        try:
            call(*args, **kwargs)
        except Exception as error:
            raise UsageError(
                "PyTorch cannot run the model", where=model, found=raised(error)
            ) from error
        watch = HostWatch(threads if device == "cpu" else 2)
        finish = torch.cuda.synchronize if device == "cuda" else _nothing

        def run() -> None:
            call(*args, **kwargs)
            finish()

        timing = watch(run, (1 - STEPS_SHARE) * budget_s)
        if compiled or device == "cuda":
            steps = profiled(run, device) if compiled else recorded(graph, args, kwargs)
        else:
            steps = timed(graph, (args, kwargs), threads, STEPS_SHARE * budget_s)
    by = f"PyTorch {torch.__version__}, {'compiled' if compiled else 'eager'}"
    return DeviceRun(
        timing.seconds, timing.spread, timing.repeats, steps=tuple(steps), by=by, notes=notes
    )


def _nothing() -> None:
    return None


def live(
    model: str, options: LoadOptions, device: str
) -> tuple[TorchProgram | ExportedProgram, tuple[str, ...]]:
    """The program with tensors that can be run, and what to say of its numbers."""
    given: dict[str, Any] = {k: v for k, v in options.items() if v and k not in OWN}
    if model.endswith(".pt2"):
        return open_program(model), (RANDOM.format(model),)
    if not is_config(model):
        made, _ = program.built(model, given.get("dims", {}), given.get("dtype", ""))
        return made, ()
    made = hf.program(model, device=device, **given)
    return made, (RANDOM.format(model),)


def _check_compiler(device: str) -> None:
    """UsageError where torch.compile has nothing to make code with."""
    if device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
        raise UsageError(
            "torch.compile needs a C++ compiler for a CPU, and there is none",
            expected="g++ or clang++ on the PATH",
            fix="install one, or check --profile eager",
        )


def _parts(
    made: TorchProgram | ExportedProgram, shapes: Shapes, device: str
) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any], fx.GraphModule]:
    """The module, its arguments, and the graph of its operators; all of it on the device."""
    if isinstance(made, TorchProgram):
        module = _filled(made.module, device)
        real = partial(_real, device=device)
        args, kwargs = tree_map(real, (tuple(made.args), dict(made.kwargs)))
        exported = replace(made, module=module, args=args, kwargs=kwargs).export()
        return module, args, kwargs, exported.module()
    for held in (made.state_dict, made.constants):
        for name, x in held.items():
            held[name] = _real(x, device)
    graph = made.module()
    given = made.example_inputs
    if given is None:
        flat = [
            _numbers(shapes.get(name, ()), x.dtype, device) if isinstance(x, torch.Tensor) else x
            for name, x in traced_inputs(made)
        ]
        spec: Any = made.call_spec.in_spec
        given = tree_unflatten(flat, spec)
    args, kwargs = tree_map(partial(_real, device=device), given)
    return graph, args, kwargs, graph


def _filled(module: nn.Module, device: str) -> nn.Module:
    """The module on the device; with random numbers where it was built without any."""
    held = [*module.parameters(), *module.buffers()]
    if any(x.is_meta for x in held):
        module = module.to_empty(device=device)
        for x in module.parameters():
            x.data = _real(torch.empty_like(x, device="meta"), device)
        for x in module.buffers():
            x.copy_(torch.ones_like(x))
    return module.to(device)


def _real(x: Any, device: str) -> Any:
    """A tensor on the device, with numbers in place of none."""
    if not isinstance(x, torch.Tensor):
        return x
    if not (x.is_meta or isinstance(x, FakeTensor)):
        return x.to(device)
    made = _numbers(tuple(int(n) for n in x.shape), x.dtype, device)
    return nn.Parameter(made) if isinstance(x, nn.Parameter) else made


def _numbers(shape: tuple[int, ...], kind: torch.dtype, device: str) -> torch.Tensor:
    """Random numbers; ones where they may name something, or say what there is."""
    if not kind.is_floating_point:
        return torch.ones(shape, dtype=kind, device=device)
    return (SCALE * torch.randn(shape, device=device)).to(kind)


def practised(target: str, threads: int, budget_s: float) -> Iterator[Check]:
    """The steps of small models on the CPU, beside what is predicted of them: each model in so many
    seconds. All are run one after another, again and again, so that a while in which others have
    the machine spoils no model; the fastest time of a step counts."""
    torch.set_num_threads(threads)
    torch.default_generator.manual_seed(0)
    made = {make.__name__: TorchProgram(*make()) for make in MODELS}
    with torch.no_grad():
        programs = {name: x.export() for name, x in made.items()}
        graphs = {name: x.module() for name, x in programs.items()}
        found: dict[str, list[list[RanStep]]] = {}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                steps = timed(graph, made[name].args, threads, budget_s / ROUNDS)
                found.setdefault(name, []).append(steps)
    for name, exported in programs.items():
        steps = [min(same, key=lambda x: x.seconds) for same in zip(*found[name], strict=True)]
        answer = replace(analyze(exported, target, profile="eager"), model=name)
        seconds = sum(x.seconds for x in steps)
        yield checked(answer, DeviceRun(seconds, 0.0, ROUNDS, steps=tuple(steps), by="PyTorch"))


# ---------------------------------------------------------------------------- steps


class Clocked(fx.Interpreter):
    """Runs a graph node by node, each within `around`."""

    def __init__(self, graph: fx.GraphModule, around: Callable[[str, Callable[[], Any]], Any]):
        super().__init__(graph)
        self.around = around

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or operator_of(n).startswith(CHECKS):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        return self.around(n.name, lambda: target(*args, **kwargs))


def operator_of(n: fx.Node) -> str:
    """`linear` of a call of `aten.linear.default`."""
    return str(getattr(n.target, "__name__", n.target)).partition(".")[0]


def _operators(graph: fx.GraphModule) -> dict[str, str]:
    """The operator of each node that calls one, by name, in order."""
    return {n.name: operator_of(n) for n in graph.graph.nodes if n.op == "call_function"}


def timed(graph: fx.GraphModule, given: Any, threads: int, budget_s: float) -> list[RanStep]:
    """Each node by the clock, as a CPU runs it before the call returns: the lower quartile."""
    clock = thread_time if threads == 1 else perf_counter
    found: dict[str, list[float]] = {}

    def around(name: str, call: Callable[[], Any]) -> Any:
        began = clock()
        result = call()
        found.setdefault(name, []).append(clock() - began)
        return result

    interpreter, inputs = Clocked(graph, around), tree_leaves(given)
    interpreter.run(*inputs)
    found.clear()
    ends, rounds = monotonic() + budget_s, 0
    while rounds < 2 or (rounds < MOST and monotonic() < ends):
        interpreter.run(*inputs)
        rounds += 1
    names = _operators(graph)
    return [RanStep(n, names[n], sorted(times)[len(times) // 4]) for n, times in found.items()]


def recorded(graph: fx.GraphModule, args: Any, kwargs: Any) -> list[RanStep]:
    """What the device takes for each node, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    def around(name: str, call: Callable[[], Any]) -> Any:
        with record_function(name):
            return call()

    interpreter, inputs = Clocked(graph, around), tree_leaves((args, kwargs))
    interpreter.run(*inputs)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        interpreter.run(*inputs)
        torch.cuda.synchronize()
    names = _operators(graph)
    events: Any = seen.key_averages()
    took: dict[str, float] = {e.key: e.device_time_total * 1e-6 for e in events if e.key in names}
    return [RanStep(name, op, took[name]) for name, op in names.items() if took.get(name)]


def profiled(run: Callable[[], None], device: str) -> list[RanStep]:
    """The kernels of a compiled program in order, by torch's profiler: on a CPU what its code
    calls, on a GPU what it launches."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=kinds) as seen:
        run()
    events: Any = seen.events()
    if device == "cuda":
        mine = [e for e in events if e.device_type.name == "CUDA"]
    else:
        mine = [e for e in events if e.cpu_parent and e.cpu_parent.name.startswith(COMPILED)]
    mine.sort(key=lambda e: e.time_range.start)
    ran = [(e.name, e.time_range.elapsed_us() * 1e-6) for e in mine if e.name not in ALLOCATED]
    return [RanStep(name, name.rpartition("::")[2], seconds) for name, seconds in ran]
