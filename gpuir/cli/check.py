"""`gpuir check`: a model run on the device at hand, beside what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.lowering import analyze
from gpuir.cli.modules import Loaded
from gpuir.cli.output import note, show, warn
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.report.answer import Answer
    from gpuir.report.check import DeviceRun

RATE_S = 0.02  # to measure a rate of a CPU that no file describes
OF_TRAINING = "train recipe autodiff loss optimizer fused clip accumulate checkpoint"
OF_DTYPES = "autocast fast_norms fp16 int8 fp8 weights"
RUNS = ("eager", "compiled", "ort")  # profiles, by what they begin with, that can be run here


@dataclass(frozen=True)
class ModelCheck(options.Runs):
    model: str = ask(options.model)
    target: str | None = ask(
        options.target("The device of this machine: cpu, or its file.  [its GPU, or else cpu]")
    )
    loading: options.LoadingOptions = held(
        options.LoadingOptions, without=f"{OF_TRAINING} {OF_DTYPES}"
    )
    costing: options.Costing = held(
        options.Costing, without="settings predictor schedule pipeline cluster"
    )
    budget_s: float = option(
        "Run the model for about so many seconds.", type=options.Finite(0.1, 3600), default=10.0
    )
    format: str = ask(options.formats())
    top: int = option("Kernels listed.", type=click.IntRange(0), default=15)
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)
    verbose: bool = ask(options.verbose)


@request(ModelCheck)
def command(asked: ModelCheck) -> None:
    """Run MODEL here, and show measured beside predicted times.

    PyTorch runs programs and configs (--profile eager or compiled), onnxruntime runs ONNX files.
    The table has a row for each kernel. As CSV it is what `gpuir calibrate --table` reads.

    \b
    gpuir check model.onnx --target cpu --dims batch=1
    gpuir check my.module:build --target my-cpu.toml --profile compiled
    gpuir check hf:config.json --target my-cpu.toml --dims batch=1,seq=128 --format csv -o t.csv
    gpuir calibrate --target my-cpu.toml --table t.csv -o my-cpu.toml
    """
    from gpuir.backends.check import check_report
    from gpuir.fit.machine import check_at_hand
    from gpuir.ir.errors import UsageError
    from gpuir.report.check import checked

    with TemporaryDirectory() as folder:
        target = _target(asked.target, Path(folder))
        import gpuir

        device = check_at_hand(gpuir.load_target(target))
        warnings: list[str] = []
        answers = analyze(replace(asked.run, target=target), warnings)
        if len(answers) > 1:
            raise UsageError("one profile is checked at a time", fix="--profile eager")
        answer = answers[0]
        trial = _trial(asked, answer, device)
        for text in (*warnings, *trial.notes):
            warn(text)
        report = check_report(checked(answer, trial), asked.top)
        show(report, asked.format, asked.width, asked.output)


def _target(name: str | None, folder: Path) -> str:
    """The target to predict for. A CPU that no file describes is measured now, for seconds."""
    import gpuir
    from gpuir.cli.calibrate import OWN
    from gpuir.fit.machine import Machine, cpu_level, cpu_numbers, cpu_title, gpu_name, sees_gpu
    from gpuir.targets.load import dump_difference

    if name is None:
        name = gpu_name() if sees_gpu() else OWN
    if name != OWN:
        return name
    base = gpuir.load_target(cpu_level())
    machine = Machine.of(base)
    note(f"measuring the rates of {cpu_title(machine)}; `gpuir calibrate` keeps them in a file")
    numbers = cpu_numbers(machine, base.isa, RATE_S)
    head = {"base": base.name, "name": "this-cpu", "title": cpu_title(machine)}
    path = folder / "this-cpu.toml"
    path.write_text(dump_difference(head, numbers, {", ".join(numbers): "measured now"}))
    return str(path)


def _trial(asked: ModelCheck, answer: Answer, device: str) -> DeviceRun:
    """The model as the answer's profile has it run here."""
    import gpuir
    from gpuir.ir.errors import UsageError
    from gpuir.run.loading import is_onnx

    stack = next((name for name in RUNS if answer.profile.startswith(name)), "")
    by_onnx = is_onnx(asked.model)
    if asked.model.endswith(".gir") or asked.model == "-":
        raise UsageError("IR text cannot be run: it is no program of a framework")
    if not stack or (stack == "ort") != by_onnx:
        raise UsageError(
            f"a model like this cannot be run here under the profile {answer.profile}",
            where=asked.model,
            expected="ort" if by_onnx else "eager, compiled",
        )
    threads = gpuir.load_target(str(answer.graph.target)).sms if device == "cpu" else 1
    if by_onnx:
        from gpuir.run.on_ort import run_ort

        return run_ort(asked.model, answer.graph, device, threads, asked.budget_s)
    from gpuir.fit.machine import torch_here

    torch_here()
    from gpuir.run.on_torch import run_torch

    how = asked.loading.options(asked.loaded)
    return run_torch(
        asked.model,
        how,
        {v.name: v.type.shape for v in answer.graph.inputs},
        compiled=stack == "compiled",
        device=device,
        threads=threads,
        budget_s=asked.budget_s,
    )
