"""The README's promises that a reader would paste."""

from __future__ import annotations

import re
import shlex
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
