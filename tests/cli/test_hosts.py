"""`gpuir hosts`, `--host` and hosts of one's own, as a user meets them."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from time import sleep

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main
from gpuir.fit.host import measured_host
from gpuir.targets.host import host_names, load_host

ENCODER = str(Path(__file__).parents[2] / "tests/encoder.onnx")
RUN = ("analyze", ENCODER, "--target", "t4", "--dims", "batch=1,seq=8")


def gpuir(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def reports(*args: str) -> list[dict]:
    return json.loads(gpuir(*RUN, "--format", "json", *args).stdout)["reports"]


@pytest.mark.parametrize("width", ["60", "100"])
def test_all_are_listed(width: str):
    rows = [line.split() for line in gpuir("hosts", "--width", width).stdout.splitlines()]
    listed = {row[0]: row[1] for row in rows if len(row) > 1}
    assert all(listed[name] == f"{load_host(name).slowdown:.2f}" for name in host_names())


def test_one_shows_every_number_and_who_says_so():
    text = gpuir("hosts", "dgx-1", "--width", "100").stdout
    assert "1.28" in text and "2,141" in text and "E5-2698 v4" in text and "PassMark's list" in text


def test_a_wrong_name_gets_the_nearest():
    assert "did you mean dgx-1" in gpuir("hosts", "dgx1", status=2).stderr
    assert "did you mean dgx-1" in gpuir(*RUN, "--host", "dgx1", status=2).stderr


def test_the_report_says_which_and_the_host_takes_as_much_longer():
    text = gpuir(*RUN, "--profile", "eager").stdout
    assert "host       aws-g4dn, 1.31 times as long as the reference: " in text
    there, reference = (
        {r["profile"]["name"]: r for r in reports("--profile", "eager,ort", *host)}
        for host in ((), ("--host", "reference"))
    )
    for name in ("eager", "ort"):
        assert there[name]["profile"]["machine"] == "aws-g4dn"
        assert reference[name]["profile"]["machine"] == "reference"
        assert there[name]["device_s"] == reference[name]["device_s"]
    ratio = there["eager"]["host_s"] / reference["eager"]["host_s"]
    assert ratio == pytest.approx(load_host("aws-g4dn").slowdown)


def test_a_host_alone_is_one_for_the_default_profile():
    (one,) = reports("--host", "aws-p3")
    assert (one["profile"]["name"], one["profile"]["machine"]) == ("ort", "aws-p3")


def test_ideal_has_no_host():
    assert "host  " not in gpuir(*RUN, "--profile", "ideal", "--host", "dgx-1").stdout


def test_this_one_is_measured(tmp_path: Path):
    pytest.importorskip("torch")
    file = tmp_path / "my-host.toml"
    done = gpuir("calibrate", "--host", "--budget-s", "10", "-o", str(file))
    host = load_host(file)
    assert host.name == "my-host" and host.slowdown > 0
    assert "a subtraction of 16 elements takes" in host.source("slowdown")
    assert ("driver's calls" in done.stderr) == (host.uncertainty > 1.1)
    (one,) = reports("--host", str(file))
    assert one["profile"]["machine"] == str(file)


def test_a_measured_host_is_called_as_its_processor_without_a_name():
    pytest.importorskip("torch")
    assert measured_host("", 0.01).host.name


def test_a_host_is_measured_alone():
    assert "leave out --target" in gpuir("calibrate", "--host", "--target", "cpu", status=2).stderr


def test_rounds_that_differ_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A busy machine: a warning that says what to do, and an interval that holds the rounds."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("the rounds of a GPU are events")
    from gpuir.fit.timing import HostWatch, Timing

    rounds = cycle((1.6e-6, 3.2e-6, 6.4e-6, 8e-6))

    def restless(self: HostWatch, work: object, budget_s: float) -> Timing:
        sleep(budget_s)
        return Timing(next(rounds), 1.6e-6, 0.1, 5)

    monkeypatch.setattr(HostWatch, "__call__", restless)
    monkeypatch.setattr("gpuir.cli.calibrate.HOST_S", 0.05)
    done = gpuir("calibrate", "--host", "-o", str(tmp_path / "mine.toml"))
    text = done.stderr.replace("\n", " ")
    assert "rounds of the same operation differ by" in text and "end other programs" in text
    host = load_host(str(tmp_path / "mine.toml"))
    assert (host.slowdown, host.uncertainty) == (1.0, pytest.approx(5.0, rel=0.1))
    assert host.source("uncertainty").startswith("measured: 80 % of the rounds")
    monkeypatch.setattr(HostWatch, "__call__", lambda *_: Timing(1.7e-6, 1.6e-6, 0.1, 5))
    done = gpuir("calibrate", "--host", "-o", str(tmp_path / "mine.toml"))
    assert "rounds" not in done.stderr
    assert load_host(str(tmp_path / "mine.toml")).uncertainty == 1.3
