"""`gpuir analyze` of several sizes: a table of points."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gpuir
from gpuir.cli import options
from gpuir.cli.main import main

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")


def analyze(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, ("analyze", ENCODER, "--target", "a100", *args))
    assert done.exit_code == status, (done.output, done.exception)
    return done


def test_each_point_is_what_analyze_says_of_it():
    text = analyze("--dims", "batch=1,2,4..16,seq=16,24", "--format", "csv").stdout
    rows = list(csv.DictReader(StringIO(text)))
    sizes = [(int(r["batch"]), int(r["seq"])) for r in rows]
    assert sizes == [(b, s) for b in (1, 2, 4, 8, 16) for s in (16, 24)]
    for row, (batch, seq) in zip(rows, sizes, strict=True):
        alone = gpuir.analyze(ENCODER, "a100", dims={"batch": batch, "seq": seq})
        assert float(row["latency_s"]) == pytest.approx(alone.latency_s, rel=1e-12)
        assert (float(row["low_s"]), float(row["high_s"])) == pytest.approx(alone.interval)
        assert int(row["reserved_bytes"]) == alone.reserved_bytes


def test_a_table_for_each_stack():
    args = ("--dims", "batch=1..4", "--dims", "seq=16", "--profile", "ort,eager")
    text = analyze(*args).stdout
    assert text.count("batch  latency") == 2
    assert "under ort" in text and "under eager" in text and " us to " in text
    found = json.loads(analyze(*args, "--format", "json").stdout)
    assert found["axes"] == [{"dim": "batch", "values": [1, 2, 4]}] and len(found["points"]) == 6


def test_one_size_is_a_report():
    assert "kernels" in analyze("--dims", "batch=2,seq=16").stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--format", "schedule"), "of several sizes there is no format schedule"),
        (("--schedule", "a.sched"), "--schedule is for one size"),
        (("--dims", "seq=4..1"), "is not like NAME=8,NAME=128"),
        (("--dims", "seq=8,"), "nothing stands behind a comma"),
    ],
)
def test_what_is_wrong_is_said(args, says):
    assert says in analyze("--dims", "batch=1..4,seq=16", *args, status=2).stderr


def test_nothing_fits():
    args = ("--dims", "batch=16384,32768,seq=16", "--set", "dram.bytes=8e8")
    assert "does not fit" in analyze(*args, status=1).stdout


def test_sizes_by_name():
    read = options.SIZES.convert("batch=1,2,4..10,seq=8, past=3", None, None)
    assert read == (("batch", (1, 2, 4, 8, 10)), ("seq", (8,)), ("past", (3,)))
