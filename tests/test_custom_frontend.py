"""docs/extend/custom-frontends.md's module, as a package that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from packages import install, run

LAYERS = "input batch 1024\nlinear 4096\nrelu\nlinear 1024\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install("custom-frontends.md", "layers", tmp_path / "site")
    (tmp_path / "mlp.layers").write_text(LAYERS)
    return tmp_path / "site"


def gpuir(site: Path, command: str) -> CompletedProcess[str]:
    return run(site, site.parent, "-m", "gpuir", *command.split())


def test_its_models_are_analysed(site: Path):
    done = gpuir(site, "analyze mlp.layers --target a100 --dims batch=8 --dtype f16 --format json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["reports"]
    assert sum(x["flops"] for x in report["kernels"]) == 2 * 2 * 8 * 1024 * 4096 + 8 * 4096
    assert "mlp.layers:linear_4096_1" in done.stdout


def test_its_models_are_trained(site: Path):
    command = "analyze mlp.layers --target a100 --dims batch=8 --train --optimizer sgd"
    done = gpuir(site, f"{command} --format json")
    assert done.returncode == 0, done.stderr
    assert "/backward" in done.stdout and "/optimizer" in done.stdout


def test_an_option_that_it_does_not_name_is_refused(site: Path):
    done = gpuir(site, "analyze mlp.layers --target a100 --dims batch=8 --trip-count loop=3")
    assert done.returncode == 2
    assert "trip_counts cannot be given for a .layers file" in done.stderr
    assert "such a model takes dims, dtype" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input 8 16\nlinear 4 4\n", "mlp.layers:2: no such layer"),
        ("input batch 16\n", "--dims batch=1"),
        ("linear 4\n", "the frontend 'layers' failed"),
        ("input 8 16\nsolve\n", "solve"),
    ],
)
def test_what_goes_wrong_is_a_message(site: Path, text: str, said: str):
    (site.parent / "mlp.layers").write_text(text)
    done = gpuir(site, "analyze mlp.layers --target a100")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_frontend_that_gives_no_model(site: Path):
    (site / "layers.py").write_text("def load(path):\n    return path\n")
    done = gpuir(site, "analyze mlp.layers --target a100")
    assert done.returncode == 2 and "returns no model" in done.stderr


def test_a_file_that_is_not_there(site: Path):
    done = gpuir(site, "analyze other.layers --target a100")
    assert done.returncode == 2 and "other.layers: no such file" in done.stderr


def test_without_the_package(site: Path):
    done = run(None, site.parent, "-m", "gpuir", "analyze", "mlp.layers", "--target", "a100")
    assert done.returncode == 2 and "mlp.layers" in done.stderr
