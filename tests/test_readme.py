"""The README's promises that a reader would paste."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuir.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readme_test_command():
    command = next(line for line in README.splitlines() if line.endswith("-m pytest -n auto --all"))
    assert command in (ROOT / ".ci/run").read_text().splitlines()


def test_main_job_of_the_readme(monkeypatch: pytest.MonkeyPatch):
    line = next(line for line in README.splitlines() if ".venv/bin/gpuir analyze" in line)
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, shlex.split(line.split("gpuir ", 1)[1]))
    assert done.exit_code == 0, done.output
    assert "latency" in done.output


def lines_of(page: str) -> list[str]:
    """The commands of a page that name a model of the repository."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [line.removeprefix("gpuir ") for line in lines if " examples/" in line]


@pytest.mark.parametrize(
    "line",  # but for searches for a plan: a tutorial runs one
    [line for line in lines_of("docs/guide/parallel.md") if not line.startswith("plan")],
)
def test_commands_of_several_gpus_work_as_printed(line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, shlex.split(line))
    assert done.exit_code == 0, done.output
    assert done.stdout


@pytest.mark.parametrize("link", re.findall(r"\]\((docs/[^)]+)\)", README))
def test_links_lead_somewhere(link: str):
    assert (ROOT / link).exists()


def table(page: str, title: str) -> dict[str, dict[str, str]]:
    """The rows of the table of a page whose first column has this title, by that column."""
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in (ROOT / page).read_text().splitlines()
        if line.startswith("|")
    ]
    start = next(i for i, row in enumerate(lines) if row[0] == title and "unseen" in row)
    rows = takewhile(lambda row: len(row) == len(lines[start]), lines[start + 2 :])
    return {row[0]: dict(zip(lines[start], row, strict=True)) for row in rows}


ACCURACY = table("docs/validation/accuracy.md", "what")


STATED = table("README.md", "what")


@pytest.mark.parametrize("what", STATED)
def test_accuracy_in_the_readme_is_that_of_its_page(what: str):
    """Unseen stays unseen and known stays known, with as many rows and of the same day."""
    assert STATED[what] == {key: ACCURACY[what][key] for key in STATED[what]}


def test_accuracy_says_of_every_number_how_many_rows_and_when():
    for what, row in ACCURACY.items():
        assert row["unseen"] or row["known"], what
        assert re.fullmatch(r"\d[\d,]*(, \d[\d,]*)?", row["rows"]), what
        assert re.fullmatch(r"\d\d-\d\d(, \d\d-\d\d)?", row["date"]), what


NAMES = {"GEMM, f32": "GEMM, fp32", "convolution, f32": "convolution, fp32", "other": "other"}
NAMES |= {"GEMM on matrix units": "GEMM, matrix units", "fused attention": "attention"}


@pytest.mark.parametrize(
    "what", [x for x, row in ACCURACY.items() if "kernels.md" in row["details"]]
)
def test_accuracy_of_kernels_is_that_of_their_page(what: str):
    lines = (ROOT / "docs/validation/kernels.md").read_text().splitlines()
    tables = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    titles = next(row for row in tables if row[0] == "kernel" and "unseen GPU" in row)
    label = what.removesuffix(", f32").split(":")[0]
    names = (NAMES.get(what), NAMES.get(label), NAMES.get(label.split(",")[0]), label)
    row = next(row for row in tables if row[0] in names and len(row) == len(titles))
    found = dict(zip(titles, row, strict=True))
    stated = ACCURACY[what]
    assert (stated["unseen"], stated["known"]) == (found["unseen GPU"], found["known GPU"])
    assert stated["rows"] == found["rows"]


def test_transformers_on_unseen_gpus_are_those_of_their_page():
    """MI100 is in no unseen number: its products were always fitted."""
    page = (ROOT / "docs/validation/models.md").read_text()
    row = re.search(r"^\| NVIDIA's, without MI100 \| (\d+) \| (\S+) \| (\S+) \|", page, re.M)
    stated = ACCURACY["transformers in f32, eager, NVIDIA GPUs"]
    assert row and row.groups() == (stated["rows"], stated["known"], stated["unseen"])
    modes = re.findall(r"^\| eager \| \w+ \| \*\*all NVIDIA\*\* \|(.*)\|$", page, re.M)
    cases = [[float(x) for x in mode.split("|")[:4]] for mode in modes]  # count, known, p90, unseen
    count = sum(case[0] for case in cases)
    for column, value in ((1, stated["known"]), (3, stated["unseen"])):
        mean = sum(case[0] * case[column] for case in cases) / count
        assert mean == pytest.approx(float(value), abs=0.1)
