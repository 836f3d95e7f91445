"""`gpuir profiles`, and profiles of one's own, as a user meets them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main
from gpuir.targets.profile import load_profile, profile_names

ENCODER = str(Path(__file__).parents[2] / "tests/encoder.onnx")
MINE = (
    'base = "eager"\nname = "ours"\n[host]\nlaunch_s = 9e-6\n[sources]\n"host.launch_s" = "felt"\n'
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text(MINE, encoding="utf-8")
    (tmp_path / "mine.py").write_text('PROFILES = {"ours": "ours.toml"}\n', encoding="utf-8")
    return tmp_path


def gpuir(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


@pytest.mark.parametrize("width", ["60", "100"])
def test_all_are_listed_with_what_the_host_takes(width: str):
    rows = [line.split() for line in gpuir("profiles", "--width", width).stdout.splitlines()]
    listed = {row[0]: row for row in rows if row}
    assert {*profile_names()} <= {*listed}
    assert "18.5" in listed["eager"] and "18.5" not in listed["ort"]


def test_one_shows_every_number_and_who_says_so():
    text = gpuir("profiles", "eager", "--width", "100").stdout
    shown = [line.split()[0] for line in text.splitlines() if line[:1].isalpha()]
    assert {row.field for row in load_profile("eager").rows()} <= {*shown}
    assert (
        "validation/agreement/host_overheads.py" in text and "assumed: as a matrix product" in text
    )


def test_a_wrong_name_gets_the_nearest():
    assert "did you mean eager" in gpuir("profiles", "eagr", status=2).stderr


@pytest.mark.slow
def test_a_file_or_a_module_gives_ones_own(here: Path):
    args = ("analyze", ENCODER, "--target", "a100", "--dims", "batch=1,seq=8", "--format", "json")
    file = json.loads(gpuir(*args, "--profile", "ours.toml,eager").stdout)
    mine, eager = file["reports"]
    assert mine["profile"]["name"] == "ours" and mine["host_s"] > eager["host_s"]
    numbers = {n["field"]: n for n in mine["profile"]["numbers"]}
    assert (numbers["host.launch_s"]["value"], numbers["host.launch_s"]["source"]) == (9e-6, "felt")
    module = json.loads(gpuir(*args, "--profile", "ours", "--load", "mine.py").stdout)
    assert module["reports"][0]["latency_s"] == mine["latency_s"]
    assert "ours" in gpuir("profiles", "--load", "mine.py").stdout
    assert "felt" in gpuir("profiles", "ours", "--load", "mine.py").stdout
    assert "write ours.toml" in gpuir(*args, "--profile", "ours", status=2).stderr


GIVEN = ("analyze", ENCODER, "--dims", "batch=1,seq=16", "--target")


@pytest.mark.slow
def test_a_stack_on_a_device_it_does_not_run_on_is_said():
    text = " ".join(gpuir(*GIVEN, "mi210", "--profile", "ort").stdout.split())
    assert "the profile ort is for NVIDIA; it is used unchanged for this GPU" in text
    assert (
        "it is used unchanged for this GPU" not in gpuir(*GIVEN, "a100", "--profile", "ort").stdout
    )
    assert "NVIDIA sm_75+" in gpuir(*GIVEN, "mi210", "--profile", "tensorrt", status=2).stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('base = "eagre"', "mine.toml:base: no profile is called 'eagre'"),
        ('base = "eager"\npasses = "fuze,legalize"', "mine.toml: passes: no pass 'fuze'"),
        (
            'base = "eager"\npasses = "canonicalize"',
            "mine.toml: passes: the passes do not end with kernels",
        ),
        ('base = "eager"\nvendors = "AMD"', "vendors must be a list of text"),
        (
            'base = "eager"\nneeds = ["sm 7 5"]',
            "needs: this is not a maker with its lowest architecture",
        ),
        (
            'base = "eager"\ndtypes = ["bf16"]',
            "dtypes: this is not a dtype with its lowest architecture",
        ),
        ('base = "ort"\noperators = "cuda"', "operators: no list of operators is called cuda"),
    ],
)
def test_what_is_wrong_in_a_profile_is_said_with_its_file(here: Path, line: str, message: str):
    (here / "mine.toml").write_text(f'name = "mine"\ntitle = "x"\n{line}\n')
    assert message in gpuir(*GIVEN, "a100", "--profile", "mine.toml", status=2).stderr


@pytest.mark.slow
def test_a_package_names_profiles_by_entry_points(here: Path, monkeypatch: pytest.MonkeyPatch):
    """Paths, and functions that give one, of a package that is installed."""
    (here / "stack").mkdir()
    (here / "stack/__init__.py").write_text(
        "from pathlib import Path\nPATH = str(Path(__file__).parent.parent / 'ours.toml')\n"
        "def path():\n    return PATH\n"
    )
    info = here / "stack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stack\nVersion: 1.0\n")
    points = "[gpuir.profiles]\nours = stack:PATH\nagain = stack:path\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(here))
    assert "ours" in gpuir("profiles").stdout and "felt" in gpuir("profiles", "ours").stdout
    (here / "more.toml").write_text('base = "ours"\nname = "more"\n[sources]\n')
    args = ("analyze", ENCODER, "--target", "a100", "--dims", "batch=1,seq=8", "--format", "json")
    found = json.loads(gpuir(*args, "--profile", "ours,again,more.toml,eager").stdout)["reports"]
    assert [r["profile"]["name"] for r in found] == ["ours", "ours", "more", "eager"]
    assert found[0]["latency_s"] == found[1]["latency_s"] == found[2]["latency_s"]


def test_each_profile_is_compared_once_and_named_in_every_row(here: Path):
    args = ("analyze", ENCODER, "--target", "a100", "--dims", "batch=1,seq=8", "--format", "csv")
    rows = list(csv.DictReader(gpuir(*args, "--profile", "ort,eager,ort").stdout.splitlines()))
    names = [row["profile"] for row in rows]
    assert list(dict.fromkeys(names)) == ["ort", "eager"]
    assert len(set(zip(names, (row["kernel"] for row in rows), strict=True))) == len(rows)


@pytest.mark.parametrize(
    ("target", "title"),
    [
        ("a100", "ort: onnxruntime, CUDA provider"),
        (
            "mi300x",
            "ort: onnxruntime, MIGraphX provider; the numbers are those of onnxruntime",
        ),
        ("x86-64-v3", "ort: onnxruntime, CPU provider; the numbers are those of onnxruntime, CUDA"),
    ],
)
def test_the_header_names_the_provider_that_would_run(target: str, title: str):
    text = gpuir(*GIVEN, target, "--profile", "ort", "--width", "300").stdout
    assert f"\nprofile    {title}" in text
    report = json.loads(gpuir(*GIVEN, target, "--profile", "ort", "--format", "json").stdout)
    assert f"ort: {report['reports'][0]['profile']['title']}".startswith(title)


def test_a_stack_of_other_devices_says_whose_numbers_it_has():
    text = gpuir(*GIVEN, "mi300x", "--profile", "vllm", "--width", "300").stdout
    assert "vllm: vLLM, a server's step; the numbers are those of NVIDIA devices" in text
