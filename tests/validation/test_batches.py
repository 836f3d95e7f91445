"""Measured batches of prompts and tokens on several GPUs, as `gpuir eval models` reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from decoders import SERVED

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuir.cli.main import main
from validation import batches
from validation.batches import forecast, read, score
from validation.commands import Simulation

MEASURED = Path(__file__).parents[3] / "shared/data/serving/serving_cases.csv"
LINES = (
    "A100-SXM4-80GB,sglang,small,two,2,1,2,10,8,0.4,12",
    "A100-SXM4-80GB,vllm,small,two,1,1,2,10,,,20",
    "nobody's,sglang,small,two,1,1,2,10,8,0.4,12",
)


def table(folder: Path) -> Path:
    (folder / "workloads").mkdir()
    (folder / "workloads/models.json").write_text(json.dumps({"small": SERVED}))
    (folder / "workloads/two.csv").write_text("request,input_len\n0,100\n1,300\n")
    head = ",".join(batches.COLUMNS)
    (path := folder / "batches.csv").write_text("\n".join((head, *LINES)) + "\n")
    return path


def test_lines_are_batches_or_say_why_not(tmp_path: Path):
    found = read(table(tmp_path))
    assert found.count == 3 and sum(found.skipped.values()) == 1
    first, second = found.cases
    assert (first.prompts, first.output, first.tp, first.cluster) == ((100, 300), 10, 2, "dgx-a100")
    assert first.decode_s == pytest.approx(0.4e-3) and np.isnan(second.decode_s)


def test_prompts_of_one_length_have_the_tokens_and_their_squares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Simulation] = []

    def seconds(of: Simulation) -> np.ndarray:
        asked.append(of)
        return np.ones(3)

    monkeypatch.setattr(batches, "seconds", seconds)
    case = replace(read(table(tmp_path)).cases[0], prompts=(1000, 2000, 3000, 4000, 4000))
    (made,) = forecast([case], lambda _: None)
    prompts, (tokens, past) = asked[0].options["dims"], map(asked[1].options.get, ("dims", "past"))
    assert prompts["batch"] * prompts["seq"] == pytest.approx(14000, rel=1e-3)
    assert prompts["batch"] * prompts["seq"] ** 2 == pytest.approx(46e6, rel=0.15)
    assert tokens == {"batch": 5} and past == 2805
    assert made.total_s == pytest.approx(10)  # prompts, and nine tokens after the first


def test_a_table_is_scored(tmp_path: Path):
    result = CliRunner().invoke(main, ["eval", "models", str(table(tmp_path)), "--json", "-"])
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    of = {(r["op"], r["device"], r["ranks"]): r["n"] for r in rows}
    assert of["decode", "A100-SXM4-80GB", "tp2"] == 1 and of["total", "A100-SXM4-80GB", "tp1"] == 1
    assert ("decode", "A100-SXM4-80GB", "tp1") not in of


def test_two_ranks_take_more_than_half(tmp_path: Path):
    """Each computes half, and they add up what they have."""
    two = replace(read(table(tmp_path)).cases[0], prompts=(2000, 2000))
    one = replace(two, tp=1)
    a, b = forecast([one, two], lambda _: None)
    assert 0.5 * a.prefill_s[0] < b.prefill_s[0] < 1.5 * a.prefill_s[0]
    scores = score([a, b], "t").groups
    assert {dict(s.group.by)["ranks"] for s in scores} == {"tp1", "tp2"}


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured batches are not here")
def test_the_measured_batches_are_read():
    found = read(MEASURED)
    assert (found.count, len(found.cases), found.skipped) == (30, 30, {})
    assert {c.tp * c.pp for c in found.cases} == {1, 2, 4, 8}
