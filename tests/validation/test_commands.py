"""What `gpuir eval ... --commands` prints gives the number that is scored: command lines are run,
calls of Python made, for rows of a small table of each exam and of the measured ones."""

from __future__ import annotations

import csv
import json
import random
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from decoders import SERVED

pytest.importorskip("torch")

from gpuir.cli.exam import ScoredRow
from gpuir.cli.main import main
from gpuir.fit.tables import MeasuredTable

SHARED = Path(__file__).parents[3] / "shared/data"


def given_by(row: ScoredRow) -> float:
    """The number that a row's command line prints, or that its call returns."""
    if not row.text.startswith("gpuir "):
        import gpuir

        import_module("gpuir.tune.published")  # where calls of tuned kernels begin

        return float(eval(row.text, {"gpuir": gpuir}))
    _, *args = shlex.split(row.text)
    result = CliRunner().invoke(main, [*args, "--format", "json"])
    assert result.exit_code == 0, f"{row.text}\n{result.output}"
    found: Any = json.loads(result.stdout)
    for name in row.field.split("."):
        found = found[int(name) if name.isdecimal() else name]
    return float(found)


def check(rows: Iterable[ScoredRow]) -> None:
    rows = list(rows)
    assert rows
    for row in rows:
        assert given_by(row) == pytest.approx(row.number, rel=1e-9), row.text


def written(path: Path, lines: Sequence[Mapping[str, object]]) -> Path:
    """A table of some lines, with the columns of all."""
    names = dict.fromkeys(name for line in lines for name in line)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(lines)
    return path


def shallow(models: Path, path: Path) -> Path:
    """The models of a measured table with two layers each, of which all are alike: a command says
    of these what it says of the whole."""
    found: dict[str, dict[str, object]] = json.loads(models.read_text())
    path.write_text(json.dumps({n: m | {"layers": 2} for n, m in found.items() if "layers" in m}))
    return path


def drawn(path: Path, count: int, wanted: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    """Lines of a measured table, drawn; the test is skipped where it does not stand."""
    if not path.exists():
        pytest.skip(f"no measurements at {path}")
    with path.open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if wanted(line)]
    return random.Random(0).sample(lines, min(count, len(lines)))


# ---- kernels -------------------------------------------------------------------------------------

EXTENTS: dict[str, object] = {
    **dict.fromkeys(("m", "n", "k"), 256),
    "b": 4,
    "batch": 8,
    "channels": 64,
    "size": 28,
    "filters": 128,
    "window": 3,
    "stride": 2,
    "groups": 1,
    "heads": 16,
    "kv_heads": 4,
    "queries": 512,
    "keys": 1024,
    "head": 64,
    "cells": 100_000,
    "rows": 2048,
    "cols": 1024,
    "table": 10_000,
    "bag": 4,
    "picks": 16,
    "tokens": 64,
    "hidden": 1024,
    "inter": 512,
    "topk": 2,
    "experts": 8,
    "steps": 16,
    "features": 128,
}
KERNEL: dict[str, object] = {"device": "a100", "op": "softmax", "dtype": "f16", "latency_us": 50}
# Operators whose kernels gpuir.kernel has no kind for: single cells of each row, a product with a
# scale, products in a loop.
UNSAID = {"gather", "dequantise", "lstm", "gru", "rnn"}


def timed(table: MeasuredTable, count: int | None = None) -> list[tuple[str, ScoredRow]]:
    """Rows of a table of kernels with their operators; of each batch so many, drawn."""
    import numpy as np

    from gpuir.cli.eval import commanded

    found: list[tuple[str, ScoredRow]] = []
    rng = random.Random(0)
    for batch in table.batches:
        few = range(len(batch)) if count is None else rng.sample(range(len(batch)), count)
        found += [(batch.op, row) for row in commanded(batch.take(np.array(few)).alone())]
    return found


def test_kernels(tmp_path: Path):
    from gpuir.fit.benchmarks import BENCHMARKS
    from gpuir.fit.tables import read_table

    lines: list[dict[str, object]] = []
    for op, benchmark in BENCHMARKS.items():
        sizes = {c: EXTENTS[c] for c in benchmark.columns}
        lines += [KERNEL | {"op": op, "dtype": dtype} | sizes for dtype in benchmark.dtypes]
    depthwise = {"op": "conv", "channels": 32, "filters": 32, "groups": 32, "device": "h100"}
    lines.append(KERNEL | EXTENTS | depthwise)
    found = timed(read_table(written(tmp_path / "kernels.csv", lines)))
    assert len(found) == len(lines)
    assert {op for op, row in found if not row.text} == UNSAID
    assert all(row.field for _, row in found if not row.text)
    check(row for _, row in found if row.text)


def test_kernels_by_clock(tmp_path: Path):
    """A floor, a lead, and kernels without their launches stand in the call."""
    import numpy as np

    from gpuir.cli.eval import commanded
    from gpuir.fit.batch import Clock
    from gpuir.fit.tables import read_table

    path = written(tmp_path / "k.csv", [KERNEL | {"rows": 64, "cols": 128}])
    (batch,) = read_table(path).batches
    for clock in (Clock(1e-3, 1e-6), Clock(1e-9, 7e-6), Clock(launches=False)):
        (row,) = commanded(replace(batch, clock=clock, which=np.array([0])))
        check([row])


def test_kernels_command(tmp_path: Path):
    path = str(written(tmp_path / "k.csv", [KERNEL | {"rows": 64, "cols": 128}]))
    result = CliRunner().invoke(main, ["eval", "kernels", path, "--commands"])
    number, _, call = result.stdout.strip().split(maxsplit=2)
    check([ScoredRow(float(number), "s", call)])
    result = CliRunner().invoke(main, ["eval", "kernels", path, "--commands", "--calibrate", "1"])
    assert result.exit_code and "--calibrate" in result.output


@pytest.mark.parametrize(
    "name", ["attention_decode", "mla", "mla_bmm", "mlp_ops", "quantize", "gemm", "moe"]
)
def test_measured_kernels(name: str):
    pytest.importorskip("pyarrow")
    from validation.readers import read_table

    path = SHARED / f"kernels/{name}.parquet"
    if not path.exists():
        pytest.skip(f"no measurements at {path}")
    found = timed(read_table(path), 2)
    # These were measured again and again, which a user's kernel is not.
    assert any(row.text for _, row in found) == (name not in ("gemm", "moe"))
    for _, row in found:
        assert row.text or row.field
        if row.text:
            check([row])


# ---- tuning --------------------------------------------------------------------------------------

SWEPT: dict[str, object] = {"kernel": "gemm", "gpu": "a100-pcie-40gb", "status": "ok"}
WINNER: dict[str, object] = {
    "kernel": "w8a8_block_gemm",
    "gpu": "h100-sxm5-80gb",
    "dtype": "fp8_w8a8",
    "space": "s",
    "in_space": 1,
    "block_n": 128,
    "m": 64,
    "n": 512,
    "k": 1024,
    "experts": "",
    "topk": "",
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 8,
    "num_warps": 4,
    "num_stages": 2,
}
SPACE: dict[str, list[int]] = {
    "BLOCK_SIZE_M": [16, 64],
    "BLOCK_SIZE_N": [64, 128],
    "BLOCK_SIZE_K": [128],
    "GROUP_SIZE_M": [1, 8],
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}


def tuned(path: Path, most: int = 9) -> list[ScoredRow]:
    from validation.tuned import read
    from validation.tuning import commanded

    problems, _ = read([str(path)])
    some = random.Random(0).sample(problems, min(most, len(problems)))
    return [row for p in some for row in commanded(p)]


def test_tuning(tmp_path: Path):
    from gpuir.tune.published import TEMPLATES

    small = {n: v[0] for n, v in TEMPLATES["clblast.xgemm"].parameters.items()}
    sizes = {"MWG": 64, "NWG": 64, "KWG": 32, "MDIMC": 16, "NDIMC": 16, "MDIMA": 16, "NDIMB": 16}
    lines = [SWEPT | small | sizes | {"VWM": n, "KWI": 2, "median_ms": 4} for n in (1, 2, 4)]
    found = tuned(written(tmp_path / "sweep.csv", [*lines, lines[0] | {"MWG": 100}]))
    assert [bool(row.text) for row in found] == [True, True, True, False]
    check(found[:3])


def test_winners(tmp_path: Path):
    (tmp_path / "space_triton.json").write_text(json.dumps({"s": SPACE}))
    moe = {"kernel": "fused_moe", "experts": 8, "topk": 2, "block_n": "", "dtype": "int8_w8a16"}
    found = tuned(written(tmp_path / "won.csv", [WINNER, WINNER | {"m": 7}, WINNER | moe]))
    assert sorted(row.text.count("gpuir.predict") for row in found) == [1, 1, 2]
    check(found)


@pytest.mark.parametrize("name", ["sweeps_gemm", "sweeps_dedispersion", "best_triton"])
def test_measured_tuning(name: str):
    pytest.importorskip("pyarrow")
    path = SHARED / f"tuning/{name}.parquet"
    if not path.exists():
        pytest.skip(f"no measurements at {path}")
    found = [row for row in tuned(path, 4) if row.text]
    check(random.Random(0).sample(found, 40))


# ---- recommenders --------------------------------------------------------------------------------

STEP: dict[str, object] = {
    "id": "a",
    "model": "dlrm-mine",
    "gpu": "A100-SXM4-80GB",
    "gpus": 1,
    "gpus_per_node": 8,
    "dtype": "tf32",
    "placement": "",
    "global_batch": 4096,
    "step_time_s": 0.002,
}
TABLE: dict[str, object] = {
    "count": 2,
    "features_per_table": 1,
    "lookups_per_feature": [1, 10],
    "rows": 1000,
    "width": 16,
}
PERCEPTRONS: dict[str, object] = {
    "numerical_features": 13,
    "bottom_mlp": [32, 16],
    "top_mlp": [64, 1],
    "mlp_sizes": [64, 1],
    "interact_stride": None,
}


def stepped(path: Path) -> list[ScoredRow]:
    from validation import dlrm

    return [row for t in dlrm.evaluate([str(path)]) for row in dlrm.rows(t)]


def test_sharded_steps(tmp_path: Path):
    model = {"tables": [TABLE, TABLE | {"rows": 500_000}], **PERCEPTRONS}
    text = json.dumps({"mine": model, "synthetic-mine": model})
    (tmp_path / "embedding_models.json").write_text(text)
    many = {"gpus": 8, "model": "synthetic-mine"}
    lines = [STEP, STEP | many, STEP | many | {"gpus": 16}, STEP | {"gpus": 8}]
    lines.append(STEP | many | {"gpu": "V100-SXM2-32GB", "gpus": 16})
    found = stepped(written(tmp_path / "steps.csv", lines))
    assert len(found) == 3 + 4 * 4
    # 16 V100 are no cluster with a name; DLRM on many GPUs is placed another way.
    assert sum(row.field == "time_s" for row in found) == 3
    assert sum("gpuir.collective" in row.text for row in found) == 3
    check(row for row in found if row.text)


def test_iterations_have_no_command():
    from validation import dlrm

    case = dlrm.Case("a", "a", "DLRM_x", 1, 1.0, 0.5, 10, 5)
    (row,) = dlrm.rows(dlrm.Table("t", (dlrm.Result(case, 1.0, 0.5, None, 1),), {}))
    assert not row.text and "idle GPU" in row.field


@pytest.mark.slow
def test_measured_sharded_steps(tmp_path: Path):
    path = SHARED / "training/embedding_sharding.csv"

    def is_small(line: dict[str, str]) -> bool:
        return line["model"] in ("synthetic-tiny", "synthetic-medium", "dlrm-criteo-t3")

    found = written(tmp_path / "steps.csv", drawn(path, 3, is_small))
    models = (path.parent / "embedding_models.json").read_bytes()
    (tmp_path / "embedding_models.json").write_bytes(models)
    check(row for row in stepped(found) if row.text)


# ---- training -----------------------------------------------------------------------------------

SMALL: dict[str, object] = {
    "kind": "MoE decoder",
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 1024,
    "gated": True,
    "vocab": 2048,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "tied_embedding": False,
    "bias": False,
    "dense_layers": 1,
    "moe_ffn": 128,
    "experts": 8,
    "top_k": 2,
}
RUN: dict[str, object] = {
    "id": "t",
    "model": "small",
    "task": "pretrain",
    "seq": 256,
    "gpus": 8,
    "gpu": "A100-SXM4-80GB",
    "gpus_per_node": 8,
    "dp": 8,
    "tp": 1,
    "pp": 1,
    "vp": 1,
    "cp": 1,
    "ep": 1,
    "micro_batch": 2,
    "global_batch": 32,
    "dtype": "bf16",
    "step_time_s": 0.5,
    "sharding": "FSDP",
    "framework": "llm-foundry / Composer / PyTorch FSDP",
    "notes": "",
    "activation_checkpointing": "full",
    "version": "1",
    "doubt": "",
    "interconnect": "",
    "grad_accum": "",
}
CORE = {"framework": "NeMo / Megatron Core", "sharding": "", "activation_checkpointing": ""}


def trained(path: Path) -> Iterable[ScoredRow]:
    from validation import training

    return (f.row for f in training.evaluate(str(path), None).forecasts)


def test_training(tmp_path: Path):
    (tmp_path / "models.json").write_text(json.dumps({"small": SMALL}))
    old = {"framework": "Megatron-LM", "version": "May 2022", "sharding": "", "dtype": "fp16"}
    lines = [
        RUN | {"dtype": "fp8"},
        RUN | {"notes": "PURE", "activation_checkpointing": "none"},
        RUN | old | {"pp": 2, "dp": 2, "tp": 2},
        RUN | CORE | {"version": "NeMo container 24.07", "dtype": "fp8", "gpu": "H100-SXM5-80GB"},
        RUN | CORE | {"dp": 4, "tp": 2, "ep": 2, "micro_batch": "", "dtype": "mxfp8"},
    ]
    check(trained(written(tmp_path / "runs.csv", lines)))


@pytest.mark.slow
def test_measured_training(tmp_path: Path):
    path = SHARED / "training/llm_training.csv"

    def is_small(line: dict[str, str]) -> bool:
        return line["model"] in ("mpt-760m", "gpt2-mlm2020-1b")

    found = written(tmp_path / "runs.csv", drawn(path, 2, is_small))
    shallow(path.parent / "models.json", tmp_path / "models.json")
    check(trained(found))


# ---- whole models -------------------------------------------------------------------------------

BATCH: dict[str, object] = {
    "gpu": "A100-SXM4-80GB",
    "engine": "sglang",
    "model": "small",
    "workload": "two",
    "tp": 2,
    "pp": 1,
    "batch": 2,
    "output_len": 10,
    "prefill_ms": 8,
    "decode_ms": 0.4,
    "total_ms": 12,
}


def served(path: Path) -> Iterable[ScoredRow]:
    from validation import batches

    found = batches.forecast(batches.read(path).cases, lambda _: None)
    return (row for f in found for row in f.rows)


def test_batches(tmp_path: Path):
    pytest.importorskip("transformers")
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads/models.json").write_text(json.dumps({"small": SERVED}))
    (tmp_path / "workloads/two.csv").write_text("request,input_len\n0,100\n1,300\n")
    lines = [BATCH, BATCH | {"engine": "vllm", "tp": 1, "gpu": "H100-SXM5-80GB"}]
    check(served(written(tmp_path / "batches.csv", lines)))


@pytest.mark.slow
def test_measured_batches(tmp_path: Path):
    pytest.importorskip("transformers")
    path = SHARED / "serving/serving_cases.csv"
    lines = drawn(path, 1, lambda line: line["tp"] != "1")
    (tmp_path / "workloads").mkdir()
    for file in (path.parent / "workloads").glob("*.csv"):
        (tmp_path / "workloads" / file.name).symlink_to(file)
    shallow(path.parent / "workloads/models.json", tmp_path / "workloads/models.json")
    check(served(written(tmp_path / "batches.csv", lines)))


def test_labels(tmp_path: Path):
    pytest.importorskip("transformers")
    from validation.models import read_labels, results
    from validation.whole import predictor, row_of

    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    label: dict[str, object] = {
        "device": "Tesla_T4",
        "model": "small",
        "mode": "inf",
        "seqlen": 64,
        "batch": 2,
        "option": "",
        "e2e_ms": 10,
        "fw_ms": 10,
        "bwall_ms": "",
    }
    table = written(tmp_path / "labels.csv", [label, label | {"mode": "train", "option": "fusion"}])
    configs = {"small": config}
    found = results(read_labels(str(table), configs).cases, predictor(configs, None))
    rows = [row_of(r, config) for r in found]
    assert [bool(row.text) for row in rows] == [True, False]
    check(rows[:1])


# ---- collectives --------------------------------------------------------------------------------

COLLECTIVE: dict[str, object] = {
    "system": "h100_sxm",
    "library": "nccl",
    "mode": "eager_loop",
    "op": "all_reduce",
    "dtype": "fp16",
    "world_size": 8,
    "bytes": 1024,
    "latency_us": 20,
    "gpus_per_node": 8,
    "rep_spread": 0.1,
    "library_version": "2.21.5",
    "source": "",
}


def communicated(path: Path) -> list[ScoredRow]:
    from gpuir.cost.collective import weights
    from gpuir.fit import collectives as fit
    from validation import collectives

    return list(collectives.rows(fit.shipped(fit.read(path).series, weights())))


def test_collectives(tmp_path: Path):
    lines = [
        COLLECTIVE,
        COLLECTIVE | {"op": "all_gather", "bytes": 1 << 26, "world_size": 4, "dtype": "fp32"},
        COLLECTIVE | {"op": "sendrecv", "world_size": 2, "dtype": "int8"},
        COLLECTIVE | {"op": "alltoall", "world_size": 32, "gpus_per_node": 8},
        COLLECTIVE | {"world_size": 8, "gpus_per_node": 4, "mode": "kernel_trace"},
        COLLECTIVE | {"library": "vllm", "mode": "cuda_graph", "system": "a100_sxm"},
        COLLECTIVE | {"dtype": "int8", "library_version": "unknown"},
    ]
    found = communicated(written(tmp_path / "collectives.csv", lines))
    assert len(found) == len(lines)
    check(found)


def test_measured_collectives():
    pytest.importorskip("pyarrow")
    path = SHARED / "kernels/collectives.parquet"
    if not path.exists():
        pytest.skip(f"no measurements at {path}")
    check(random.Random(0).sample(communicated(path), 200))


# ---- MIG ----------------------------------------------------------------------------------------

SLICE: dict[str, object] = {
    "id": "1",
    "series": "t",
    "gpu": "A100-SXM4-40GB",
    "gpu_sku": "",
    "mode": "mig",
    "profile": "1g.5gb",
    "instances_active_per_gpu": "1",
    "co_runners": "others idle",
    "scope": "",
    "workload": "",
    "model": "alexnet",
    "phase": "inference",
    "framework": "PyTorch 2.1",
    "precision": "fp16",
    "metric": "latency",
    "unit": "ms",
    "relative_to": "",
    "quality": "ok",
    "n_gpus": 1,
    "batch": 4,
    "seq_len": "",
    "value": 5,
    "ratio": "",
}


@pytest.fixture
def small_nets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every ResNet has a block a stage: a command says of it what it says of the whole."""
    from validation import slices, zoo

    def forget() -> None:
        for kept in (slices._program, slices.answered, slices.alone):
            kept.cache_clear()

    for name in (name for name in zoo.MODELS if name.startswith("resnet")):
        monkeypatch.setitem(zoo.MODELS, name, zoo._resnet("basic", 1, 1, 1, 1))
    forget()
    yield
    forget()


def sliced(path: Path) -> list[ScoredRow]:
    from validation import mig

    return [mig.commanded(c) for c in mig.evaluate(path).cases if not c.op.endswith(mig.SCALED)]


def test_mig(tmp_path: Path, small_nets: None):
    pytest.importorskip("transformers")
    lines = [
        SLICE,
        SLICE | {"framework": "PyTorch 2.1, channels last", "precision": "tf32", "batch": 2},
        SLICE | {"phase": "training", "precision": "amp", "mode": "full"},
        SLICE | {"model": "bert-tiny", "seq_len": 32, "framework": "PyTorch 1.12"},
        SLICE | {"mode": "full", "profile": "", "co_runners": "4 processes share the whole GPU"},
    ]
    engine = SLICE | {"framework": "TensorRT", "model": "resnet50", "batch": ""}
    engine |= {"n_gpus": 1, "metric": "latency p90"}
    lines += [engine, engine | {"mode": "full", "profile": ""}]
    lines += [line | {"precision": "int8"} for line in lines[-2:]]
    found = sliced(written(tmp_path / "mig.csv", lines))
    assert [bool(row.text) for row in found] == [True, True, True, True, False, True, True]
    check(row for row in found if row.text)
    assert all(row.field for row in found if not row.text)


@pytest.mark.slow
def test_measured_mig(tmp_path: Path, small_nets: None):
    pytest.importorskip("transformers")
    path = SHARED / "hardware/mig_measurements.csv"

    def is_small(line: dict[str, str]) -> bool:
        return "resnet" in line["model"].lower() and "torch" in line["framework"].lower()

    found = sliced(written(tmp_path / "mig.csv", drawn(path, 3, is_small)))
    check(row for row in found if row.text)


# ---- the field ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_measured_field(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    from validation import field

    folder = SHARED / "field"

    def is_small(line: dict[str, str]) -> bool:
        return "hf:bert-base" in line["command"] or "kernels.py" in line["command"]

    ids = {line["id"] for line in drawn(folder / "points.csv", 3, is_small)}
    rows = [row for row in field.read(str(folder / "points.csv")) if row.id in ids]
    questions = [q for row in rows for q in row.questions]
    found = field.ask_all(questions, str(folder / "inputs"), 1)
    monkeypatch.chdir(folder / "inputs")
    monkeypatch.syspath_prepend(str(folder / "inputs"))
    check(field.commanded(q, found[q]) for q in questions)
