"""`gpuir eval mig`: what is read, compared and counted, and the public table where it is there."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuir.backends.table import FORMATS
from gpuir.backends.terminal import Terminal
from gpuir.cli.main import main
from gpuir.cost import tensor
from gpuir.cost.learned import factors, shipped
from gpuir.cost.nest import IDLE_SHARE
from gpuir.cost.power import bend, drawn
from gpuir.cost.reading import work_of
from gpuir.ir.errors import UsageError
from gpuir.ir.types import i8
from gpuir.ops import kernel as k
from gpuir.targets.load import load_target
from validation import mig, mig_rows, slices, zoo

SHARED = "shared/data/hardware/mig_measurements.csv"
A30_SLICE = "a30:1g.6gb"
REAL = Path(__file__).resolve().parents[3] / SHARED

EMPTY = dict.fromkeys(mig_rows.COLUMNS, "")
ROW = {**EMPTY, "mode": "mig", "scope": "per instance", "phase": "infer", "n_gpus": "1"}
ROW |= {"quality": "ok", "instances_active_per_gpu": "1", "co_runners": "none"}
ROW |= {"metric": "latency", "unit": "ms", "framework": "PyTorch", "precision": "FP16"}
A30 = {**ROW, "series": "mlperf20", "gpu": "A30", "profile": "1g.6gb", "model": "bert-99.9"}
A30 |= {"framework": "TensorRT", "metric": "throughput", "unit": "samples/s"}
A30 |= {"quality": "official submission", "co_runners": "other instances idle"}
WHOLE = {**A30, "mode": "full", "profile": "", "scope": "one GPU", "co_runners": "none"}
BUSY = {**A30, "co_runners": "all other instances busy with other MLPerf models"}
BUSY |= {"instances_active_per_gpu": "all (4)"}
SAME = {**A30, "co_runners": "same workload on every instance", "scope": "aggregate"}
SAME |= {"n_gpus": "8", "instances_active_per_gpu": "4"}
A100 = {**ROW, "series": "migperf40", "gpu": "A100-40GB", "profile": "1g.5gb"}
A100 |= {"model": "bert-base-multilingual-cased", "batch": "8", "seq_len": "64", "precision": ""}
JOB = {**ROW, "series": "redhat", "gpu": "A100-SXM4-40GB", "mode": "full", "phase": "train"}
JOB |= {"model": "ssd-resnet34 (COCO 2017)", "batch": "114", "n_gpus": "8"}
JOB |= {"metric": "throughput (median)", "unit": "images/s"}
TOGETHER = {**ROW, "series": "jobs", "gpu": "A30", "model": "bert (base)", "phase": "train"}
TOGETHER |= {"metric": "relative throughput", "unit": "ratio", "relative_to": "4x 1g.6gb"}
TOGETHER |= {"workload": "SQuAD", "precision": "AMP", "scope": "aggregate of 4 models"}
H100 = {**ROW, "series": "lab", "gpu": "H100-80GB", "gpu_sku": "H100-SXM5-80GB"}
H100 |= {"profile": "1g.10gb", "model": "bert-base-uncased", "batch": "8", "seq_len": "128"}
A100_80 = {**ROW, "series": "lab", "gpu": "A100-80GB", "gpu_sku": "A100-SXM4-80GB|A100-PCIE-80GB"}
A100_80 |= {"profile": "3g.40gb", "model": "ResNet-50", "batch": "32"}
A100_80 |= {"metric": "throughput", "unit": "images/s"}


def table(folder: Path, *rows: dict[str, str], columns: Sequence[str] = mig_rows.COLUMNS) -> Path:
    """A table of these rows, numbered from 0."""
    path = folder / "mig.csv"
    lines = [",".join(columns)]
    for i, row in enumerate(rows):
        cells = {**row, "id": row["id"] or str(i)}
        lines.append(",".join(f'"{cells.get(name, "more")}"' for name in columns))
    path.write_text("\n".join(lines) + "\n")
    return path


def plain(found: mig.Found) -> list[mig.Case]:
    return [c for c in found.cases if not c.op.endswith(mig.SCALED)]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch):
    """Every job takes 4 s on a slice and 1.25 s on a GPU, fits nowhere, and draws 50 W."""

    def seconds(_: slices.Job, target: str) -> float:
        return 4.0 if ":" in target else 1.25

    def rate(job: slices.Job, target: str, count: int, mode: str | None) -> float:
        return count if mode is None else {"serial": 1.0, "time-slicing": 0.8, "mps": 1.6}[mode]

    monkeypatch.setattr(slices, "seconds", seconds)
    monkeypatch.setattr(slices, "wanted_w", lambda *_: 0.001)
    monkeypatch.setattr(slices, "fits", lambda *_: False)
    monkeypatch.setattr(slices, "steps_per_s", rate)


# ---------------------------------------------------------------------------- reading


def test_columns_are_read_and_what_is_blank_is_none(tmp_path: Path):
    columns = [*reversed(mig_rows.COLUMNS), "notes", "spread"]
    rows = ({**A30, "value": "246.7"}, {**A100, "value": "3"})
    first, second = mig_rows.read(table(tmp_path, *rows, columns=columns))
    assert (first.value, first.batch, first.n_gpus) == (246.7, 0, 1)
    assert (second.batch, second.seq_len, second.profile) == (8, 64, "1g.5gb")
    assert not first.odd and math.isnan(first.ratio)


@pytest.mark.parametrize("text", ["", "id,series\n", "\n\n", "\x00\x01", "id\n1\n"])
def test_a_file_that_is_no_table_is_an_error_that_says_what_is_expected(tmp_path: Path, text: str):
    path = tmp_path / "mig.csv"
    path.write_text(text)
    result = CliRunner().invoke(main, ["eval", "mig", str(path)])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    for word in (str(path), "expected:", "found:", "fix:"):
        assert word in result.stderr.replace("\n            ", "")


def test_text_where_numbers_belong_is_counted(tmp_path: Path):
    rows = [{**H100, "value": "12", name: "many"} for name in ("batch", "seq_len", "n_gpus")]
    rows += [{**H100, "value": "12", "batch": text} for text in ("-3", "0.5", "inf", "1e30")]
    rows += [{**H100, "value": text} for text in ("fast", "nan", "inf", "", "-1", "0")]
    found = mig.evaluate(table(tmp_path, *rows))
    assert not found.cases and sum(found.skipped.values()) == len(rows) == found.count
    assert found.skipped["batch is no size: many"] == 1
    assert found.skipped["value is no number: fast"] == 1
    assert found.skipped["no value is stated"] == 3
    assert not mig.evaluate(table(tmp_path)).cases


def test_another_table_is_refused(tmp_path: Path):
    path = tmp_path / "gemm.csv"
    path.write_text("device,m,n,k,latency_us\na100,1,1,1,2\n")
    with pytest.raises(UsageError, match="not a table of MIG measurements"):
        mig_rows.read(path)
    result = CliRunner().invoke(main, ["eval", "mig"])
    assert result.exit_code and "Missing argument 'FILES...'" in result.stderr


# ---------------------------------------------------------------------------- what rows say


def row(of: dict[str, str], **given: str) -> mig_rows.Row:
    cells: dict[str, Any] = {**of, **given}
    cells |= {n: int(cells[n] or 0) for n in ("n_gpus", "batch", "seq_len")}
    cells |= {n: float(cells[n] or "nan") for n in ("value", "ratio")}
    return mig_rows.Row(**cells)


@pytest.mark.parametrize(
    ("sku", "profile", "target"),
    [
        ("A100-SXM4-40GB|A100-PCIE-40GB", "1g.5gb", "a100-sxm-40gb:1g.5gb"),
        ("A100-PCIE-80GB", "1c.3g.40gb", "a100-pcie-80gb:1c.3g.40gb"),
        ("H100-SXM5-80GB", "MIG 1g.10gb+me", "h100-sxm-80gb:1g.10gb+me"),
        ("H200-SXM-141GB", "7g.141gb", "h200-sxm-141gb:7g.141gb"),
        ("A30-24GB", "2g.12gb", "a30:2g.12gb"),
        ("H100-SXM5-80GB", "1g.11gb", "h100-sxm-80gb has no MIG profile 1g.11gb"),
        ("T4", "1g.5gb", "t4 has no MIG"),
        ("Z9000", "1g.5gb", "no target is called Z9000"),
    ],
)
def test_targets_are_those_that_the_row_names(sku: str, profile: str, target: str):
    try:
        found = mig_rows.target_of(row(ROW, gpu_sku=sku, profile=profile))
    except mig_rows.NotScored as why:
        found = str(why)
    assert found == target


def test_models_go_by_many_names():
    for text, name in {
        "ResNet-50 v1.5": "resnet50",
        "resnet50_moco": "resnet50",
        "bert-99.9": "bert-large",
        "google/vit-base-patch16-224": "vit-base-16",
        "vit_l_32": "vit-large-32",
        "deit-small-patch16-224": "vit-small-16",
        "albert-base-v2": "albert-base",
        "mobilenet_v2_1.0_224": "mobilenet-v2",
        "openai-community/gpt2-xl": "gpt2-xl",
    }.items():
        assert zoo.name_of(text) == name
    for text in ("", "bert-base-chinese", "llama-2-7b", "unet", "resnet", "mobilenet", "vit-giant"):
        assert zoo.name_of(text) is None


def test_software_is_what_framework_and_precision_say():
    def of(**given: str) -> tuple[Any, ...]:
        job = mig_rows.job_of(row(H100, **given))
        return job.stack, job.dtype, job.tf32, job.autocast, job.narrow

    assert of() == ("eager@2.11", "f16", None, "", "")
    assert of(precision="FP32") == ("eager@2.11", "f32", None, "", "")
    assert of(precision="FP32, TF32 off") == ("eager@2.11", "f32", False, "", "")
    assert of(precision="AMP (bf16)") == ("eager@2.11", "f32", True, "bf16", "")
    assert of(phase="train") == ("eager@2.11", "f32", True, "f16", "")
    assert of(framework="torch.compile")[0] == "compiled"
    assert of(framework="ONNX Runtime", precision="mixed")[:2] == ("ort", "f16")
    assert of(framework="Triton + TensorRT", precision="INT8") == (
        "tensorrt",
        "f16",
        None,
        "",
        "i8",
    )
    for given in (
        {"framework": "TensorFlow"},
        {"framework": "TensorRT-LLM"},
        {"framework": ""},
        {"precision": "INT8"},
        {"precision": "INT4"},
        {"phase": "train", "framework": "TensorRT"},
        {"phase": "serve"},
        {"seq_len": ""},
        {"batch": ""},
    ):
        with pytest.raises(mig_rows.NotScored):
            of(**given)


@pytest.mark.parametrize(
    ("metric", "unit", "value", "seconds", "which"),
    [
        ("latency", "ms", "20", 0.02, ""),
        ("latency p99", "s", "2", 2, "p99"),
        ("95th percentile latency", "us", "20", 2e-5, "p95"),
        ("p50 latency (ms)", "", "20", 0.02, ""),
        ("step time", "ms/iter", "20", 0.02, ""),
        ("latency", "ms/image", "2", 0.016, ""),
        ("throughput", "images/s", "400", 0.02, ""),
        ("throughput", "seq per sec", "400", 0.02, ""),
        ("throughput", "it/s", "50", 0.02, ""),
        ("iterations per second", "", "50", 0.02, ""),
        ("throughput", "fps", "400", 0.02, ""),
    ],
)
def test_times_and_rates_are_seconds_of_a_step(
    metric: str, unit: str, value: str, seconds: float, which: str
):
    some = row(H100, metric=metric, unit=unit, value=value)
    found = mig_rows.step_s(some, mig_rows.job_of(some))
    assert found == (pytest.approx(seconds), which)
    both = replace(some, scope="aggregate", instances_active_per_gpu="2")
    if "/s" in unit or unit == "fps":
        assert mig_rows.step_s(both, mig_rows.job_of(some))[0] == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    ("metric", "unit", "reason"),
    [
        ("energy", "J", "metric energy: not predicted"),
        ("GPU utilisation", "%", "metric GPU utilisation: not predicted"),
        ("latency standard deviation", "ms", "metric latency standard deviation: not predicted"),
        ("latency", "furlongs", "unit furlongs of latency: not known here"),
        ("throughput", "requests/s", "unit requests/s of throughput: not known here"),
        ("throughput", "tokens/s", mig_rows.TOKENS),
        ("server throughput", "queries/s", mig_rows.SERVER),
        ("time to threshold", "s", mig_rows.AGAIN),
    ],
)
def test_other_metrics_are_counted_by_name(metric: str, unit: str, reason: str):
    some = row(H100, metric=metric, unit=unit, value="2")
    with pytest.raises(mig_rows.NotScored) as why:
        mig_rows.step_s(some, mig_rows.job_of(some))
    assert str(why.value) == reason


def test_who_shares_a_gpu_is_read_from_the_co_runners():
    def of(text: str, mode: str = "full", scope: str = "per job"):
        return mig_rows.sharing(row(H100, co_runners=text, mode=mode, scope=scope))

    assert of("4 processes share the whole GPU without MIG") == (4, "time-slicing")
    assert of("none, 4 models one after another") == (4, "serial")
    assert of("seven processes under MPS") == (7, "mps")
    assert of("24 jobs, three per GPU") == (3, "time-slicing")
    assert of("8 jobs, one per GPU") is None and of("none") is None
    assert of("3 identical jobs, one per instance", "mig") is None
    assert of("two jobs per instance", "mig") == (2, "time-slicing")
    with pytest.raises(mig_rows.NotScored, match="how many is not stated"):
        of("others share the GPU")


# ---------------------------------------------------------------------------- rows scored


def test_a_whole_gpu_is_the_one_measured_alone_else_its_part_of_several(tmp_path: Path):
    several = {**WHOLE, "n_gpus": "8", "scope": "aggregate"}
    bert = {**WHOLE, "model": "bert-99"}
    rows = mig_rows.read(
        table(
            tmp_path,
            {**several, "value": "8000"},
            {**several, "model": "bert-99", "value": "16000"},
            {**bert, "value": "1900"},
            {**bert, "metric": "latency p90", "unit": "ms", "value": "2.2"},
            {**bert, "metric": "latency p90", "gpu": "A2", "value": "9"},
        )
    )
    wholes = [mig.whole_gpu(r, "a30", rows) for r in rows]
    assert wholes == [1000, 1900, 1900, 2.2, None]


def test_every_row_is_scored_or_counted(tmp_path: Path, times: None):
    path = table(
        tmp_path,
        {**WHOLE, "n_gpus": "8", "scope": "aggregate", "value": "8000"},
        {**A30, "value": "300"},
        {**BUSY, "value": "250"},
        {**SAME, "value": "7800"},
        {**A30, "metric": "server throughput", "value": "100"},
        {**A30, "model": "rnnt", "value": "100"},
        {**A100, "value": "14.4"},
        {**A100, "profile": "2g.10gb", "value": "12"},
        {**A100, "quality": mig.HOST_BOUND, "value": "11"},
        {**JOB, "co_runners": "2 jobs, one per GPU", "value": "1200"},
        {**JOB, "co_runners": "999 jobs", "quality": mig.HOST_BOUND, "value": "95"},
        {**JOB, "mode": "mig", "profile": "1g.5gb", "metric": "fits in memory", "value": "0"},
        {**JOB, "metric": "time to threshold", "value": "4775"},
        {**TOGETHER, "profile": "1g.6gb", "instances_active_per_gpu": "4", "value": "1"},
        {**A30, "quality": "smells odd", "value": "1"},
    )
    found = mig.evaluate(path)
    cases = plain(found)
    assert len(cases) + len(found.fits) + sum(found.skipped.values()) == found.count == 15
    alone, busy, same = cases[:3]
    assert (alone.measured, alone.predicted) == (1.2, 1.25)
    assert alone.error == pytest.approx(100 * (1.25 / 1.2 - 1))
    assert busy.op == "one instance, others busy"
    assert (same.measured, same.op) == (pytest.approx(0.975), "all instances")
    assert [f.predicted for f in found.fits] == [False]
    held = next(c for c in cases if c.apart)
    assert held.predicted == pytest.approx(1e3 * 114 * 999 / mig.NODES["redhat"])
    assert found.skipped["quality: smells odd"] == 1
    text = json.loads(str(FORMATS["json"](mig.report([found]), Terminal())))
    (alone_row,) = [r for r in text["rows"] if r["op"] == "one instance, others idle"]
    assert (alone_row["target"], alone_row["n"], alone_row["model"]) == ("a30", 1, "bert-99.9")
    assert text["kind"] == "mig" and not text["fits"][0]["measured"]
    assert not any(r["suspect"] for r in text["totals"])


def test_slices_of_another_gpu_are_as_many_as_fit(tmp_path: Path, times: None):
    engine = {name: A30[name] for name in ("framework", "metric", "unit", "co_runners")}
    slice_ = {**H100, **engine, "model": "resnet50", "batch": "", "precision": "INT8"}
    whole = {**slice_, "mode": "full", "profile": "", "scope": "one GPU"}
    found = mig.evaluate(
        table(
            tmp_path,
            {**whole, "value": "7000"},
            {**slice_, "value": "1000"},
            {**slice_, "profile": "1c.3g.40gb", "value": "1000"},
            {**slice_, "profile": "2g.20gb", "value": "2000", "gpu_sku": "H100-PCIE-80GB"},
        )
    )
    assert [c.measured for c in found.cases] == pytest.approx([1.0, 6 / 7])
    assert found.skipped["no whole GPU has resnet50, throughput"] == 1


def test_jobs_together_are_compared_with_the_reference_of_the_row(tmp_path: Path, times: None):
    ones = {"profile": "1g.6gb", "instances_active_per_gpu": "4", "value": "1", "ratio": "1"}
    full = {**TOGETHER, "mode": "full"}
    found = mig.evaluate(
        table(
            tmp_path,
            {**full, "co_runners": "4 processes share the GPU", "value": "0.25", "ratio": "0.25"},
            {**TOGETHER, **ones},
            {**full, "co_runners": "none, 4 models one after another", "value": "0.2"},
            {**full, "co_runners": "4 clients of MPS", "value": "50", "unit": "%"},
            {**full, "relative_to": "another", "value": "0.2"},
        )
    )
    made = {c.op: (c.measured, c.predicted) for c in found.cases}
    assert made == {
        "four slices over four jobs at once, A30": (4.0, 5.0),
        "four slices over four jobs one after another, A30": (5.0, 4.0),
        "four slices over four jobs under MPS, A30": (2.0, 2.5),
    }
    assert found.skipped == {
        "four slices: what is compared with the rest": 1,
        "relative to another: no such row": 1,
    }


def test_rows_of_other_gpus_and_models(tmp_path: Path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    columns = ["notes", *reversed(mig_rows.COLUMNS)]
    h100 = {**H100, "model": "bert-tiny"}
    rows = (
        {**h100, "value": "6"},
        {**h100, "mode": "full", "profile": "", "scope": "one GPU", "value": "5"},
        {**A100_80, "value": "1500"},
        {**A100_80, "mode": "full", "profile": "", "scope": "one GPU", "value": "3000"},
        {**h100, "model": "rnnt", "value": "6"},
        {**h100, "profile": "5g.50gb", "value": "6"},
        {**h100, "metric": "energy", "unit": "J", "value": "6"},
        {**h100, "seq_len": "4096", "value": "6"},
    )
    found = mig.evaluate(table(tmp_path, *rows, columns=columns))
    cases = plain(found)
    assert [(c.target, c.op) for c in cases] == [
        ("h100-sxm-80gb:1g.10gb", "inference"),
        ("h100-sxm-80gb", "inference"),
        ("a100-sxm-80gb:3g.40gb", "inference"),
        ("a100-sxm-80gb", "inference"),
    ]
    assert cases[2].measured == pytest.approx(1e3 * 32 / 1500)
    assert cases[2].predicted > 1.5 * cases[3].predicted > 0
    assert found.skipped == {
        "rnnt is not built here": 1,
        "h100-sxm-80gb has no MIG profile 5g.50gb": 1,
        "metric energy: not predicted": 1,
        "bert-tiny: there are more tokens than position embeddings in the model": 1,
    }
    scaled = [c for c in found.cases if c.op.endswith(mig.SCALED)]
    assert len(scaled) == 4 and math.prod(c.predicted / c.measured for c in scaled[:2]) == (
        pytest.approx(1)
    )


def test_one_scale_a_model_leaves_the_shape():
    cases = [
        mig.Case(row(A100, value=value), "inference", "a100:1g.5gb", "ms", float(value), predicted)
        for value, predicted in (("10", 5.0), ("20", 10.0), ("41", 20.0))
    ]
    shape = mig.scaled(cases)
    assert all(abs(c.error) < 2 for c in shape)
    assert mig.scaled(cases[:1]) == []
    apart = [replace(c, apart=mig.HOST_BOUND) for c in cases]
    assert mig.scaled(apart) == []
    elsewhere = replace(cases[0], row=replace(cases[0].row, series="another"))
    assert len(mig.scaled([*cases, elsewhere])) == 3


# ---------------------------------------------------------------------------- power


def gemm(m: int = 4096) -> k.Gemm:
    from gpuir.ir.graph import Value
    from gpuir.ir.types import TensorType, f16, f32
    from gpuir.ops import tensor as t

    a, b = (Value(name, TensorType((m, m), f16)) for name in "ab")
    return k.Gemm.of(t.Matmul(a, b, f32))


def test_what_kernels_draw_is_their_energy_over_their_time():
    a30, work = load_target("a30:1g.6gb"), work_of(gemm())
    flops = 2 * 4096**3

    def each(bits: int) -> float:
        p = factors(tensor.FAMILY, a30, shipped())
        return float(tensor.flop_joules(a30, p, bits))

    joules = each(16) * flops
    assert drawn([(work, 0.01)], a30) == pytest.approx(joules / 0.01, rel=1e-3)
    assert drawn([(work, 0.01), (work, 0.03)], a30) == pytest.approx(joules / 0.02, rel=1e-3)
    narrow = replace(work, dtype=i8)
    assert drawn([(narrow, 0.01)], a30) == pytest.approx(each(8) * flops / 0.01, rel=1e-3)
    assert drawn([], a30) == 0


def test_neighbours_slow_a_slice_once_they_want_more_than_the_board_has(monkeypatch):
    engine = slices.Job("bert-large", 1)
    monkeypatch.setattr(slices, "seconds", lambda *_: 0.01)
    monkeypatch.setattr(slices, "wanted_w", lambda *_: 50.0)
    board = 165.0 * (1 - IDLE_SHARE)
    assert slices.beside(engine, A30_SLICE, ()) == 0.01
    assert slices.beside(engine, A30_SLICE, (board - 50.0,)) == pytest.approx(0.01)
    clock = (board / 200.0) ** bend(load_target("a30"))
    assert slices.beside(engine, A30_SLICE, (50.0,) * 3) == pytest.approx(0.01 / clock)


def test_a_factor_of_power_is_no_calibration():
    from gpuir.cost.local import calibrated
    from gpuir.targets.target import FrozenTable

    a30, work = load_target("a30"), work_of(gemm())
    assert list(a30.factors) == ["tensor.joules mma"]
    assert not calibrated(work, "tensor", a30)
    more = FrozenTable({**a30.factors, "tensor.l2 share mma": 1.1})
    assert calibrated(work, "tensor", replace(a30, factors=more))


def test_the_a30_slows_down_under_products_and_its_lone_slice_does_not():
    from gpuir.cost.tile import predict

    work = work_of(gemm(8192))
    whole, lone, fourth = (
        float(predict(work, load_target(f"a30{name}")).time_s[0])
        for name in ("", ":1g.6gb", ":1g.6gb+tdp_w=41.25")
    )
    assert 1.1 < 4 * whole / lone < 1.35
    assert 0.9 < 4 * whole / fourth < 1.1


# ---------------------------------------------------------------------------- models


def test_models_are_as_large_as_published():
    """Boxes and operations: 8.2, 433 and 947 GFLOP of ResNet-50, SSD and the U-Net (MLPerf)."""
    pytest.importorskip("torch")
    import torch

    from validation import mig_models

    places, classes = mig_models.ssd_resnet34(300)(torch.zeros(1, 3, 300, 300))
    assert places.shape == (1, 4, 8732) and classes.shape == (1, mig_models.CLASSES, 8732)
    assert mig_models.boxes(300) == 8732 and mig_models.boxes(1200) == 15130
    for name, giga in (("ssd-resnet34", 433), ("3d-unet", 947)):
        engine = slices.Job(name, 1, narrow="i8")
        nodes = slices.answered(engine, "a30").graph.nodes
        ran = [n.op for n in nodes if isinstance(n.op, k.Gemm | k.Conv)]
        products = sum(float(work_of(op).products) for op in ran)
        assert products / 1e9 == pytest.approx(giga, rel=0.03)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("swin-tiny", 28.3),
        ("efficientnet-b0", 5.3),
        ("mobilenet-v2", 3.5),
        ("densenet121", 8.0),
        ("albert-base", 11.1),
        ("gpt2", 124.4),
    ],
)
def test_params_are_as_many_as_published(name: str, millions: float):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tokens = 16 if zoo.MODELS[name].reads_text else 0
    g = slices.program(slices.Job(name, 1, tokens, dtype="f32"))
    assert sum(p.type.nbytes for p in g.params) / 4e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.skipif(not REAL.exists(), reason=f"../{SHARED} is not there")
def test_slices_of_the_public_table():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    rows = mig_rows.read(REAL)
    mine = [r for r in rows if r.model == "bert-99.9" and r.mode == "mig"]
    found = [mig.ratio(r, rows) for r in mine if r.metric == "throughput"]
    errors = {c.op: abs(c.error) for c in found}
    assert set(errors) == {
        "one instance, others idle",
        "one instance, others busy",
        "all instances",
    }
    assert max(errors.values()) < 8
