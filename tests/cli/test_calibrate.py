"""`gpuir calibrate` and `gpuir collect` as a user meets them, on this CPU and on tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main
from gpuir.cost.tile import predict
from gpuir.fit.benchmarks import works_of
from gpuir.targets.load import load_target

pytestmark = pytest.mark.slow

PLAN = """\
[[grid]]
op = ["add", "softmax"]
dtypes = ["f32"]
cells = 4096
"""
FEW = """\
[[rows]]
op = "linear"
dtypes = ["f32"]
columns = ["m", "n", "k"]
rows = [[64, 64, 64], [128, 256, 64], [1, 512, 512]]
[[grid]]
op = "add"
dtypes = ["f32"]
cells = [1024, 65536]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.toml").write_text(FEW)
    return tmp_path


@pytest.fixture
def few(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped plans are short, and one model is run."""
    monkeypatch.setattr("gpuir.fit.campaign.shipped_plan", lambda name: folder / "few.toml")
    if find_spec("torch"):
        from gpuir.run import on_torch, practice

        monkeypatch.setattr(on_torch, "MODELS", (practice.dense,))


def run(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def recorded(path: Path, factor: float, device: str = "a100-pcie", noise: float = 0.0) -> None:
    """A table of pointwise kernels in `factor` times what the model says, 40 us of them host."""
    rng = np.random.default_rng(0)
    target, lines = load_target(device), ["device,op,b,h,latency_us"]
    for op in ("add", "relu"):
        for b in (4096, 16384, 65536, 131072):
            for h in (1024, 2048, 4000):
                cells = {"cells": np.array([float(b * h)])}
                time_s = sum(predict(w, target).time_s[0] for w in works_of(op, "f32", cells))
                time_s *= np.exp(rng.normal(0, noise))
                lines.append(f"{device},{op},{b},{h},{18 + factor * time_s * 1e6:.3f}")
        lines += [f"{device},{op},1,{h},40" for h in range(8, 128, 8)]
    path.write_text("\n".join(lines) + "\n")


# ---------------------------------------------------------------------------- calibrate


def test_a_table_becomes_a_target(folder: Path):
    recorded(folder / "mine.csv", 1.25)
    done = run("calibrate", "--target", "a100-pcie", "--table", "mine.csv", "-o", "my-a100.toml")
    assert "my-a100.toml: target my-a100" in done.stdout
    target = load_target("my-a100.toml")
    assert (target.name, target.base) == ("my-a100", "a100-pcie-40gb")
    assert target.factors and all(0.4 < v < 1.6 for v in target.factors.values())
    source = target.source(f"factors.{next(iter(target.factors))}")
    assert source.startswith("calibrated on 22 kernels, of mine.csv, ")
    assert "mean error, each row by a calibration on others" in source
    work = works_of("add", "f32", {"cells": np.array([6.7e7])})[0]
    times = [predict(work, t).time_s[0] for t in (target, load_target("a100-pcie"))]
    assert times[0] / times[1] == pytest.approx(1.25, rel=0.05)


def test_a_file_says_how_far_off_its_own_kernels_were(folder: Path):
    """Noise of 60 %: intervals as wide, in the table, the file, `targets` and `explain`."""
    recorded(folder / "mine.csv", 1.0, noise=0.6)
    done = run("calibrate", "--target", "a100-pcie", "--table", "mine.csv", "-o", "my-a100.toml")
    assert "80 % within" in done.stdout
    target = load_target("my-a100.toml")
    low, high = (target.backtest[f"stream.{end}"] for end in ("low", "high"))
    assert 0.2 < low < 0.8 and 1.4 < high < 5
    assert target.source("backtest.stream.low").startswith("calibrated on ")
    assert "backtest.stream.low" in run("targets", "my-a100.toml", "--width", "120").stdout
    work = works_of("add", "f32", {"cells": np.array([6.7e7])})[0]
    found = predict(work, target)
    assert found.low_s[0] <= low * found.time_s[0] < high * found.time_s[0] <= found.high_s[0]
    (folder / "wrong.toml").write_text(Path("my-a100.toml").read_text().replace("stream", "strem"))
    done = run("targets", "wrong.toml", "--check", status=2)
    assert "no family of kernels is called 'strem'" in done.stderr


def test_a_family_left_as_it_was_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Here the only one, of a table: a calibration that is worse writes nothing; one that is as
    good a file that says how far off kernels are."""
    from gpuir.fit.calibrate import WAYS

    recorded(folder / "mine.csv", 1.0, noise=0.6)
    args = ("calibrate", "--target", "a100-pcie", "--table", "mine.csv", "-o", "mine.toml")
    assert "not calibrated, as no calibration" in run(*args).stderr.replace("\n", " ")
    assert not load_target("mine.toml").factors
    Path("mine.toml").unlink()
    monkeypatch.setattr("gpuir.fit.calibrate.chosen", lambda errors, wary: WAYS[2])
    assert "is not written" in run(*args, status=2).stderr
    assert not Path("mine.toml").exists()


def test_such_a_target_is_one_like_any_other(folder: Path):
    recorded(folder / "mine.csv", 1.25)
    run("calibrate", "--target", "a100-pcie", "--table", "mine.csv", "-o", "my-a100.toml")
    assert "factors." in run("targets", "my-a100.toml", "--width", "120").stdout
    assert "none doubtful" in run("targets", "my-a100.toml", "--check").stdout
    (folder / "tables").mkdir()
    args = ("--table", "mine.csv", "--target", "my-a100.toml", "-o", "tables/again.toml")
    run("calibrate", *args)
    assert 'base = "../my-a100.toml"' in (folder / "tables/again.toml").read_text()
    assert load_target("tables/again.toml").device == "a100-pcie-40gb"


def test_what_a_calibrated_base_says_does_not_stay(folder: Path):
    """Calibrated again, from its own file, on kernels that take what the shipped target says."""
    recorded(folder / "slow.csv", 1.25)
    recorded(folder / "plain.csv", 1.0)
    run("calibrate", "--target", "a100-pcie", "--table", "slow.csv", "-o", "slow.toml")
    run("calibrate", "--target", "slow.toml", "--table", "plain.csv", "-o", "again.toml")
    work = works_of("add", "f32", {"cells": np.array([6.7e7])})[0]
    names = ("a100-pcie", "slow.toml", "again.toml")
    plain, slow, again = (predict(work, load_target(name)).time_s[0] for name in names)
    assert slow / plain == pytest.approx(1.25, rel=0.05)
    assert again / plain == pytest.approx(1.0, rel=0.02)


def test_without_a_file_the_target_is_on_stdout(folder: Path):
    recorded(folder / "mine.csv", 1.1)
    done = run("calibrate", "--target", "a100-pcie", "--table", "mine.csv")
    Path("from-stdout.toml").write_text(done.stdout)
    assert load_target("./from-stdout.toml").name == "a100-pcie-40gb-mine"
    assert "mean absolute error" in done.stderr


def test_a_name_of_two_lines_is_refused(folder: Path):
    """It stands in a comment of the file, too."""
    recorded(folder / "mine.csv", 1.1)
    args = ("--target", "a100-pcie", "--table", "mine.csv", "--name", "a\nsms = 1")
    assert "cannot be the name of a target" in run("calibrate", *args, status=2).stderr


def test_a_table_of_other_gpus_is_refused(folder: Path):
    recorded(folder / "mine.csv", 1.1)
    done = run("calibrate", "--target", "h100", "--table", "mine.csv", "-o", "x.toml", status=2)
    assert "no row was measured on h100-sxm-80gb\n  found:    a100-pcie" in done.stderr
    assert not Path("x.toml").exists()


def test_a_target_is_not_its_own_base(folder: Path):
    recorded(folder / "mine.csv", 1.1)
    args = ("calibrate", "--table", "mine.csv", "-o", "x.toml")
    run(*args, "--target", "a100-pcie")
    before = Path("x.toml").read_text()
    assert "the output file is also an input" in run(*args, "--target", "x.toml", status=2).stderr
    assert Path("x.toml").read_text() == before


def test_measurements_are_not_written_over(folder: Path):
    recorded(folder / "mine.csv", 1.1)
    before = Path("mine.csv").read_text()
    args = ("--target", "a100-pcie", "--table", "mine.csv", "-o", "./mine.csv")
    assert "the output file is also an input" in run("calibrate", *args, status=2).stderr
    assert Path("mine.csv").read_text() == before


def test_factors_that_do_not_exist_fail_the_check(folder: Path):
    text = 'base = "a100"\nname = "mine"\n[factors.stream]\n"hbm sahre" = 1.1\n'
    Path("mine.toml").write_text(text + '[sources]\nfactors = "made up"\n')
    done = run("targets", "mine.toml", "--check", status=2)
    assert "no factor is called 'hbm sahre'" in done.stderr and "hbm share" in done.stderr


def test_a_changed_target_is_no_base(folder: Path):
    recorded(folder / "mine.csv", 1.1)
    args = ("calibrate", "--target", "a100-pcie+sms=98", "--table", "mine.csv")
    assert "a target with changed numbers" in run(*args, status=2).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-o", "gone/x.toml"), "there is no such folder"),
        (("-o", "."), "cannot write the file"),
        (("-o", "x.toml", "--name", "Mine!"), "cannot be the name of a target"),
    ],
)
def test_what_cannot_be_written_is_said_first(folder: Path, args: tuple[str, ...], message: str):
    assert message in run("calibrate", "--target", "cpu", *args, status=2).stderr
    assert not (folder / "x.toml").exists()


def test_a_file_that_cannot_name_a_target(folder: Path):
    recorded(folder / "mine.csv", 1.25)
    run("calibrate", "--target", "a100-pcie", "--table", "mine.csv", "-o", "わが.toml")
    assert load_target("./わが.toml").name == "a100-pcie-40gb-mine"


def test_no_gpu_is_said(folder: Path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for command in (("calibrate", "--target", "a100"), ("collect", "--target", "a100")):
        stderr = run(*command, "-o", "x.csv", status=2).stderr
        assert "torch finds no GPU" in stderr and "cpu" in stderr
    for name in ("calibrate", "collect"):
        assert "--target cpu" in run(name, status=2).stderr
    assert list(folder.glob("x*")) == []


def test_without_torch_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("gpuir.fit.machine.import_module", absent)
    for command in ("calibrate", "collect"):
        stderr = run(command, "--target", "cpu", status=2).stderr
        assert "fix:      pip install 'gpuir[torch]'" in stderr


@pytest.fixture
def one_core() -> Iterator[None]:
    """Torch computes on one core: the time that its thread works is then the time it would take
    alone. Of several, one waits for another that a busy machine holds up."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_this_cpu_becomes_a_target(folder: Path, few: None, one_core: None):
    done = run("calibrate", "--target", "cpu", "-o", "mine.toml", "--budget-s", "60")
    assert "5/5" in done.stderr and "dense: 8 kernels among others" in done.stderr
    assert "family" in done.stdout and "cpu" in done.stdout
    target = load_target("mine.toml")
    assert target.is_cpu and target.device in ("x86-64-v3", "x86-64-v4")
    assert target.notes.startswith("PyTorch runs 1 thread; its own loops with ")
    assert target.source("dram.bytes_per_s").startswith("measured by gpuir calibrate on x86-64")
    assert "none doubtful" in run("targets", "mine.toml", "--check").stdout
    model = str(Path(__file__).parents[2] / "tests" / "encoder.onnx")
    args = ("--target", "mine.toml", "--dims", "batch=1,seq=16", "--format", "json")
    (told,) = json.loads(run("analyze", model, *args).stdout)["reports"]
    assert told["target"]["name"] == "mine"
    low_s, high_s = told["interval_s"]
    assert 1e-3 < low_s < told["latency_s"] < high_s < 10


def test_a_busy_machine_is_said(
    folder: Path, few: None, one_core: None, monkeypatch: pytest.MonkeyPatch
):
    """Repeats that differ, in a campaign."""
    from gpuir.fit.timing import HostWatch, Timing

    def restless(self: HostWatch, work: object, budget_s: float) -> Timing:
        return Timing(1e-5, 1e-6, 0.8, 5)

    monkeypatch.setattr(HostWatch, "__call__", restless)
    done = run("collect", "--target", "cpu", "--plan", "few.toml", "-o", "busy.csv")
    assert "repeats of the same kernel differ by 80 %" in done.stderr


# ---------------------------------------------------------------------------- collect


def test_a_campaign_goes_on(folder: Path):
    pytest.importorskip("torch")
    args = (
        "collect",
        "--target",
        "cpu",
        "--plan",
        "few.toml",
        "-o",
        "c.csv",
        "--budget-s",
        "0.001",
    )
    assert "5 of 5 rows to measure, about" in run(*args, "--dry-run").stdout
    assert not Path("c.csv").exists()
    assert run(*args).stdout == "c.csv: 5 rows added, 0 were there\n"
    assert run(*args).stdout == "c.csv: 0 rows added, 5 were there\n"
    assert "linear" in run("eval", "kernels", "c.csv").stdout


def test_a_campaign_in_parquet(folder: Path):
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    args = ("--target", "cpu", "--plan", "few.toml", "-o", "c.parquet", "--budget-s", "0.001")
    run("collect", *args)
    assert {p.name for p in folder.glob("c.*")} == {"c.parquet", "c.parquet.csv"}
    assert "c.parquet: 0 rows added" in run("collect", *args).stdout
    assert "linear" in run("eval", "kernels", "c.parquet").stdout
    (folder / "c.parquet.csv").unlink()  # the rows of somebody else are not written over
    assert "the table does not belong to a campaign that" in run("collect", *args, status=2).stderr
    assert (folder / "c.parquet").stat().st_size


def test_a_wrong_plan_is_refused(folder: Path):
    (folder / "wrong.toml").write_text(PLAN)
    stderr = run("collect", "--target", "cpu", "--plan", "wrong.toml", status=2).stderr
    assert "wrong.toml:grid[0]: no extent has the name cells" in stderr
