"""`gpuir eval mig`: what is read, compared and counted, and the public table where it is there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuir.cli.main import main
from gpuir.cost.power import IDLE_SHARE, bend, drawn
from gpuir.cost.reading import work_of
from gpuir.ir.errors import UsageError
from gpuir.ir.types import i8
from gpuir.ops import kernel as k
from gpuir.targets.load import load_target
from validation import mig, slices

SHARED = "shared/data/hardware/mig_measurements.csv"
REAL = Path(__file__).resolve().parents[3] / SHARED

EMPTY = dict.fromkeys(mig.COLUMNS, "")
A30 = {**EMPTY, "series": "mlperf20", "gpu": "A30", "mode": "mig", "profile": "1g.6gb"}
A30 |= {"scope": "per instance", "model": "bert-99.9", "phase": "infer", "precision": "FP16"}
A30 |= {"metric": "throughput", "quality": "official submission", "n_gpus": "1"}
WHOLE = {**A30, "mode": "full", "profile": "", "scope": "one GPU", "co_runners": "none"}
A100 = {**EMPTY, "series": "migperf40", "gpu": "A100-40GB", "mode": "mig", "profile": "1g.5gb"}
A100 |= {"scope": "per instance", "model": "bert-base-multilingual-cased", "phase": "infer"}
A100 |= {"metric": "latency", "quality": "ok", "n_gpus": "1", "batch": "8", "seq_len": "64"}
JOB = {**EMPTY, "series": "redhat", "gpu": "A100-SXM4-40GB", "mode": "full", "phase": "train"}
JOB |= {"model": "ssd-resnet34 (COCO 2017)", "precision": "FP16", "quality": "ok"}
JOB |= {"batch": "114", "n_gpus": "8", "metric": "throughput (median)"}


def table(folder: Path, *rows: dict[str, str]) -> Path:
    """A table of these rows, numbered from 0."""
    path = folder / "mig.csv"
    lines = [",".join(mig.COLUMNS)]
    for i, row in enumerate(rows):
        lines.append(",".join(f'"{row[name] or i * (name == "id")}"' for name in mig.COLUMNS))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_columns_are_read_and_what_is_blank_is_none(tmp_path: Path):
    path = table(
        tmp_path, {**A30, "co_runners": mig.IDLE, "value": "246.7"}, {**A100, "value": "3"}
    )
    first, second = mig.read(path)
    assert (first.beside, first.value, first.batch, first.gpus) == (mig.IDLE, 246.7, 0, 1)
    assert (second.batch, second.seq, second.profile) == (8, 64, "1g.5gb")


def test_another_table_is_refused(tmp_path: Path):
    path = tmp_path / "gemm.csv"
    path.write_text("device,m,n,k,latency_us\na100,1,1,1,2\n")
    with pytest.raises(UsageError, match="not a table of MIG measurements"):
        mig.read(path)
    result = CliRunner().invoke(main, ["eval", "mig"])
    assert result.exit_code and "no table is given" in result.stderr


def test_a_whole_gpu_is_the_one_measured_alone_else_its_part_of_several(tmp_path: Path):
    several = {**WHOLE, "n_gpus": "8", "scope": "aggregate"}
    path = table(
        tmp_path,
        {**several, "value": "8000"},
        {**several, "model": "bert-99", "value": "16000"},
        {**WHOLE, "model": "bert-99", "value": "1900"},
        {**WHOLE, "model": "bert-99", "metric": "latency p90", "value": "2.2"},
    )
    wholes = mig.whole_gpus(mig.read(path))
    assert wholes["bert-99.9", "throughput"] == 1000
    assert wholes["bert-99", "throughput"] == 1900
    assert wholes["bert-99", "latency p90"] == 2.2


def test_every_row_is_scored_or_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slices, "seconds", lambda _, target: 4.0 if ":" in target else 1.25)
    monkeypatch.setattr(slices, "wanted_w", lambda *_: 50.0)
    ran = slices.Ran(0.02, fits=False)
    monkeypatch.setattr(slices, "ran", lambda *_: ran)
    path = table(
        tmp_path,
        {**WHOLE, "n_gpus": "8", "scope": "aggregate", "value": "8000"},
        {**A30, "co_runners": mig.IDLE, "value": "300"},
        {**A30, "co_runners": mig.BUSY, "value": "250"},
        {**A30, "co_runners": mig.SAME, "scope": "aggregate", "n_gpus": "8", "value": "7800"},
        {**A30, "co_runners": mig.IDLE, "metric": "server throughput", "value": "100"},
        {**A30, "co_runners": mig.IDLE, "model": "rnnt", "value": "100"},
        {**A100, "value": "14.4"},
        {**A100, "profile": "2g.10gb", "value": "12"},
        {**A100, "quality": mig.HOST_BOUND, "value": "11"},
        {**JOB, "co_runners": "2 jobs, one per GPU", "value": "1200"},
        {**JOB, "co_runners": "80 jobs", "quality": mig.HOST_BOUND, "value": "95"},
        {**JOB, "mode": "mig", "profile": "1g.5gb", "metric": "fits in memory", "value": "0"},
        {**JOB, "metric": "time to threshold", "value": "4775"},
        {**A30, "series": "a30blog", "quality": "published ratio", "value": "1.39"},
    )
    found = mig.evaluate(path)
    plain = [c for c in found.cases if not c.op.endswith("one scale a model")]
    assert len(plain) + len(found.fits) + sum(found.skipped.values()) == found.count == 14
    alone, busy, same = plain[:3]
    assert (alone.measured, alone.predicted) == (1.2, 1.25)
    assert alone.error == pytest.approx(100 * (1.25 / 1.2 - 1))
    assert busy.op == mig.BESIDE
    assert (same.measured, same.op) == (pytest.approx(0.975), "all instances")
    assert [f.predicted for f in found.fits] == [False]
    held = next(c for c in plain if c.apart)
    assert held.predicted == pytest.approx(1e3 * 114 * 80 / mig.NODE_IMAGES_PER_S)
    text = json.loads(mig.json_text([found]))
    (alone_row,) = [r for r in text["rows"] if r["op"] == "one instance, others idle"]
    assert (alone_row["target"], alone_row["n"], alone_row["model"]) == ("a30", 1, "bert-99.9")
    assert text["kind"] == "mig" and not text["fits"][0]["measured"]
    assert not any(r["suspect"] for r in text["totals"])


def test_one_scale_a_model_leaves_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = mig.read(table(tmp_path, *({**A100, "value": v} for v in ("10", "20", "41"))))
    cases = [
        mig.Case(row, "inference", "a100-sxm-40gb:1g.5gb", "ms", row.value, predicted)
        for row, predicted in zip(rows, (5.0, 10.0, 20.0), strict=True)
    ]
    shape = mig.scaled(cases)
    assert all(abs(c.error) < 2 for c in shape)
    assert mig.scaled(cases[:1]) == []
    apart = [replace(c, apart=mig.HOST_BOUND) for c in cases]
    assert mig.scaled(apart) == []


# ---------------------------------------------------------------------------- power


def gemm(m: int = 4096) -> k.Gemm:
    from gpuir.ir.graph import Value
    from gpuir.ir.types import TensorType, f16

    a, b = (Value(name, TensorType((m, m), f16)) for name in "ab")
    return k.Gemm(a, b)


def test_what_kernels_draw_is_their_energy_over_their_time():
    a30, work = load_target("a30:1g.6gb"), work_of(gemm())
    flops = 2 * 4096**3
    joules = a30.factors["tensor.joules mma"] * 1e-12 * flops
    assert drawn([(work, 0.01)], a30) == pytest.approx(joules / 0.01, rel=1e-3)
    assert drawn([(work, 0.01), (work, 0.03)], a30) == pytest.approx(joules / 0.02, rel=1e-3)
    narrow = slices.narrowed(work, i8)
    assert drawn([(narrow, 0.01)], a30) == pytest.approx(joules / 0.02, rel=1e-3)
    assert drawn([], a30) == 0


def test_neighbours_slow_a_slice_once_they_want_more_than_the_board_has(monkeypatch):
    engine = slices.Engine("bert-large", 1, False)
    monkeypatch.setattr(slices, "seconds", lambda *_: 0.01)
    monkeypatch.setattr(slices, "wanted_w", lambda *_: 50.0)
    board = 165.0 * (1 - IDLE_SHARE)
    assert slices.beside(engine, slices.SLICE, ()) == 0.01
    assert slices.beside(engine, slices.SLICE, (board - 50.0,)) == pytest.approx(0.01)
    clock = (board / 200.0) ** bend(load_target("a30"))
    assert slices.beside(engine, slices.SLICE, (50.0,) * 3) == pytest.approx(0.01 / clock)


def test_a_factor_of_power_is_no_calibration():
    from gpuir.cost.local import calibrated
    from gpuir.targets.target import Table

    a30, work = load_target("a30"), work_of(gemm())
    assert list(a30.factors) == ["tensor.joules mma"]
    assert not calibrated(work, "tensor", a30)
    more = Table({**a30.factors, "tensor.l2 share mma": 1.1})
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
    for name, giga in (("ssd-resnet34", 433), ("3d-unet-99", 947)):
        engine = replace(slices.ENGINES[name], batch=1)
        products = sum(float(x.work.products) for x in slices.launches(engine, "a30"))
        assert products / 1e9 == pytest.approx(giga, rel=0.03)


@pytest.mark.skipif(not REAL.exists(), reason=f"../{SHARED} is not there")
def test_slices_of_the_public_table():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    rows = [r for r in mig.read(REAL) if r.series == "mlperf20"]
    mine = [r for r in rows if r.model == "bert-99.9"]
    cases, _ = mig.ratios(mine)
    errors = {c.op: abs(c.error) for c in cases}
    assert errors["one instance, others idle"] < 8
    assert errors[mig.BESIDE] < 8 and errors["all instances"] < 8
