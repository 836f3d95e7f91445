"""`gpuir mig layouts` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["mig", "layouts", *args])


def test_geometries_of_a_gpu():
    result = run("a30", "--width", "80")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("NVIDIA A30 (a30): 4 geometries, 5 packed layouts\n")
    assert "2g.12gb+2x1g.6gb  |1|1|2  |         2   56     0      4/4     4/4" in result.stdout
    assert "1g.6gb+me, 2g.12gb+me: --profiles takes any" in result.stdout
    assert "9 geometries, 25 layouts" in run("a30", "--all").stdout


@pytest.mark.parametrize("width", ["60", "80", "120"])
@pytest.mark.parametrize("gpu", ["a30", "a100", "rtx-pro-6000", "b300-sxm-288gb"])
def test_lines_are_no_wider_than_asked(gpu, width):
    for more in ([], ["--all"], ["--place", "mig"]):
        text = run(gpu, "--width", width, *more).stdout
        assert max(map(len, text.splitlines())) <= int(width)


def test_profiles_that_are_named_alone():
    result = run("a100", "--profiles", "3g.20gb,1g.5gb+me", "--format", "json")
    names = [g["name"] for g in json.loads(result.stdout)["geometries"]]
    assert names == ["2x3g.20gb", "3g.20gb+1g.5gb+me"]


def test_one_layout_where_instances_go():
    result = run("a100", "--place", "3g.20gb/1c/2c + 2g.10gb+1g.5gb+me", "--width", "80")
    assert result.exit_code == 0, result.stderr
    for text in (
        "(a100-sxm-40gb): 3g.20gb+2g.10gb+1g.5gb+me",
        "| 1c 2c ",
        "a100-sxm-40gb:2g.10gb    4-5     14   28  10.5 GB      2/7",
        "of 3g.20gb@0: 1c.3g.20gb, 2c.3g.20gb; they share its memory",
        "24 of 108 SMs (10 of them no instance can have); 1 of 7 compute",
    ):
        assert text in result.stdout
    assert "no: a further instance fits" in run("a100", "--place", "1g.5gb").stdout


def test_json_of_one_layout():
    found = json.loads(run("h100", "--place", "2x3g.40gb", "--format", "json").stdout)
    assert found["schema"] == "gpuir.mig.layouts/1"
    assert (found["gpu"], found["sms"], found["mig_sms"]) == ("h100-sxm-80gb", 132, 132)
    (geometry,) = found["geometries"]
    assert (geometry["sms"], geometry["idle_sms"], geometry["packed"]) == (120, 12, True)
    assert [x["start"] for x in geometry["instances"]] == [0, 4]
    assert geometry["instances"][0]["target"] == "h100-sxm-80gb:3g.40gb"


def test_a_file_and_commands(tmp_path):
    text = run("a30", "--place", "2g.12gb+2x1g.6gb", "--format", "mig-parted").stdout
    assert text == (
        "version: v1\nmig-configs:\n  2g.12gb-2x1g.6gb:\n  - devices: all\n"
        "    mig-enabled: true\n    mig-devices: {2g.12gb: 1, 1g.6gb: 2}\n"
    )
    two = ("--devices", "0,1", "--format")
    assert "devices: [0, 1]" in run("a30", "--place", "4g.24gb", *two, "mig-parted").stdout
    assert "mig -i 1 -cgi 0:0 -C" in run("a30", "--place", "4g.24gb", *two, "nvidia-smi").stdout
    assert run("a30", "--format", "mig-parted").stdout.count("mig-enabled: true") == 4
    out = tmp_path / "a.svg"
    run("a30", "--place", "4g.24gb", "--format", "svg", "-o", str(out))
    assert out.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "args, said",
    [
        (("l4",), "has no MIG"),
        (("a100:3g.20gb",), "is a slice itself"),
        (("a100", "--place", "3gb.20gb"), "did you mean 3g.20gb"),
        (("a100", "--profiles", "5g.20gb"), "has no MIG profile 5g.20gb"),
        (("a100", "--place", "2x4g.20gb"), "too many instances of 4g.20gb"),
        (("a100", "--place", "4g.20gb+2x2g.10gb"), "more compute slices than the GPU"),
        (("a100", "--place", "4g.20gb+3x1g.10gb"), "two instances cannot share a memory slice"),
        (("rtx-pro-6000", "--place", "1g.24gb+me+1g.24gb+me.all"), "the media engines"),
        (("a100", "--place", "3g.20gb/2c/2c"), "the compute instances do not fit into 3g.20gb"),
        (("a100", "--place", "3g.20gb/0c"), "the compute instances do not fit into 3g.20gb"),
        (("a100", "--place", "0x1g.5gb"), "no GPU can have so many instances"),
        (("a100", "--place", "999x1g.5gb"), "no GPU can have so many instances"),
        (("a100", "--place", ""), "--place must be a list of instances"),
        (("a100", "--place", "1g.5gb", "--all"), "--place shows one layout, so --all and"),
        (("a100", "--format", "svg"), "shows one layout"),
        (("a100", "--devices", "0"), "--devices has no effect on this format"),
        (
            ("a100", "--format", "mig-parted", "--devices", "gpu0"),
            "--devices must be a list of numbers",
        ),
    ],
)
def test_errors_say_what_is_wrong(args, said):
    result = run(*args)
    assert result.exit_code == 2 and said in result.stderr


def test_no_such_command():
    result = CliRunner().invoke(main, ["mig", "layout"])
    assert result.exit_code == 2 and "did you mean layouts?" in result.stderr


def test_the_list_of_commands_needs_no_module_of_theirs():
    code = (
        "import sys; from click.testing import CliRunner; from gpuir.cli.main import main;"
        "CliRunner().invoke(main, ['mig', 'foo']);"
        "assert 'gpuir.cli.mig' in sys.modules and 'gpuir.cli.mig_layouts' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
