"""Layouts of MIG as pictures, files of mig-parted and commands of nvidia-smi."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from jsonschema import Draft202012Validator

from gpuir.backends.mig import Divided, counted, picture, strip, svg
from gpuir.backends.mig_parted import config_name, mig_parted, nvidia_smi
from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target
from gpuir.targets.mig import geometries, mig_of, mig_specs, place

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
SCHEMA = Draft202012Validator(json.loads((ROOT / "specs/mig-parted.schema.json").read_text()))


def divided(gpu: str, *names: str, number: int | None = None, parts=()) -> Divided:
    target = load_target(gpu)
    return Divided(target, place(mig_of(target), names, target.name), number, parts)


def entries(text: str) -> list[dict[str, object]]:
    found = yaml.safe_load(text)
    SCHEMA.validate(found)
    (listed,) = found["mig-configs"].values()
    return listed


def test_picture_of_a_gpu():
    mig = mig_of(load_target("a100"))
    layout = place(mig, ["3g.20gb", "2g.10gb", "1g.5gb+me"], "a100")
    assert picture(mig, layout, ["bert, 3 requests/s"], width=73) == [
        "0        1        2        3        4        5        6        7",
        "+-----------------------------------+-----------------+--------+........+",
        "| 3g.20gb                           | 2g.10gb         | 1g.5gb | idle   |",
        "| 42 SMs                            | 28 SMs          | +me    |        |",
        "| 21.1 GB                           | 10.5 GB         | 14 SMs |        |",
        "| bert, 3 requests/s                |                 | 5.10 GB|        |",
        "+-----------------------------------+-----------------+--------+........+",
    ]
    assert picture(mig, layout, width=40) == [
        "   +-----------------------------------+",
        "0  | 3g.20gb, 42 SMs, 21.1 GB          |",
        "1  |                                   |",
        "2  |                                   |",
        "3  |                                   |",
        "   +-----------------------------------+",
        "4  | 2g.10gb, 28 SMs, 10.5 GB          |",
        "5  |                                   |",
        "   +-----------------------------------+",
        "6  | 1g.5gb+me, 14 SMs, 5.10 GB        |",
        "   +...................................+",
        "7  | idle                              |",
        "   +...................................+",
    ]
    assert strip(mig, layout) == "|3      |2  |1|.|"
    assert counted([x.profile for x in layout]) == "3g.20gb+2g.10gb+1g.5gb+me"


@pytest.mark.parametrize("gpu", mig_specs())
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_pictures_have_straight_edges(gpu, width):
    mig = mig_of(load_target(gpu))
    for geometry in geometries(mig, packed=False):
        labels = ["a very long name of a model", "\x1b[31m模型", "x" * 300]
        first, *lines = picture(mig, geometry.layout, labels, width)
        assert {len(line) + sum(c in "模型" for c in line) for line in lines} == {len(lines[-1])}
        assert len(lines[-1]) <= width and len(first) <= width
        assert "\x1b" not in "".join(lines)
        for x in geometry.layout:
            assert x.profile.plain in "".join(lines)


@pytest.mark.parametrize("gpu", ["a30", "a100", "rtx-pro-6000"])
def test_svg_is_xml_with_every_instance(gpu):
    mig = mig_of(load_target(gpu))
    for geometry in geometries(mig, mig.profiles if gpu == "a30" else None):
        text = svg(mig, geometry.layout, ["<b>&"], "a title & more")
        assert text == svg(mig, geometry.layout, ["<b>&"], "a title & more")
        root = ElementTree.fromstring(text)
        idle = mig.grid - sum(x.profile.size for x in geometry.layout)
        boxes = root.findall("{http://www.w3.org/2000/svg}rect")
        assert len(boxes) >= len(geometry.layout) + bool(idle)
        assert "<b>&" in [e.text for e in root.iter()]


@pytest.mark.parametrize("gpu", mig_specs())
def test_every_geometry_is_a_file_of_mig_parted(gpu):
    target = load_target(gpu)
    mig = mig_of(target)
    found = geometries(mig)
    file = yaml.safe_load(
        mig_parted({config_name(g.profiles): [Divided(target, g.layout)] for g in found})
    )
    SCHEMA.validate(file)
    assert len(file["mig-configs"]) == len(found)  # no two have one name
    for g, (entry,) in zip(found, file["mig-configs"].values(), strict=True):
        assert entry["devices"] == "all" and entry["mig-enabled"] is True
        names = [name for name, n in entry["mig-devices"].items() for _ in range(n)]
        assert sorted(names) == sorted(p.name for p in g.profiles)


def test_gpus_that_are_alike_are_one_entry():
    gpus = [
        divided("a30", "1g.6gb", "2g.12gb", "1g.6gb", number=2),
        divided("a30", "4g.24gb", number=1),
        divided("a30", "2g.12gb", "1g.6gb", "1g.6gb", number=0),
        Divided(load_target("a30"), None, 3),
        Divided(load_target("l4"), None, 4),
    ]
    text = mig_parted({"node": gpus}, ["made by a test\nof two lines"])
    assert text.startswith("# made by a test?of two lines\nversion: v1\n")
    assert entries(text) == [
        {"devices": [0, 2], "mig-enabled": True, "mig-devices": {"2g.12gb": 1, "1g.6gb": 2}},
        {"devices": [1], "mig-enabled": True, "mig-devices": {"4g.24gb": 1}},
        {"devices": [3], "mig-enabled": False, "mig-devices": {}},
        {"devices": [4], "mig-enabled": False, "mig-devices": {}},
    ]


def test_compute_instances_are_counted_by_their_names():
    x = divided("a100", "3g.20gb", "2g.10gb", "1g.5gb", parts=((1, 1, 1), (), (1,)))
    assert entries(mig_parted({"a": [x]}))[0]["mig-devices"] == {
        "1c.3g.20gb": 3,
        "2g.10gb": 1,
        "1g.5gb": 1,
    }


@pytest.mark.parametrize(
    "broken",
    [
        {"version": "v2", "mig-configs": {"a": [{"devices": "all", "mig-enabled": False}]}},
        {"version": "v1", "mig-configs": {}},
        {"version": "v1", "mig-configs": {"a": []}},
        {"version": "v1", "mig-configs": {"a": [{"devices": "0", "mig-enabled": False}]}},
        {"version": "v1", "mig-configs": {"a": [{"devices": [0], "mig-enabled": True}]}},
        {
            "version": "v1",
            "mig-configs": {
                "a": [{"devices": [0], "mig-enabled": False, "mig-devices": {"1g.6gb": 1}}]
            },
        },
        {
            "version": "v1",
            "mig-configs": {
                "a": [{"devices": [0], "mig-enabled": True, "mig-devices": {"1g.6gb+me-me": 1}}]
            },
        },
    ],
)
def test_the_schema_refuses_what_mig_parted_does(broken):
    assert list(SCHEMA.iter_errors(broken))


def test_without_pyyaml_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError) as caught:
        mig_parted({"a": [divided("a30", "4g.24gb")]})
    assert "gpuir[mig]" in str(caught.value)


def test_commands_name_places():
    text = nvidia_smi([divided("a100", "3g.20gb", "2g.10gb", "1g.5gb", number=0)])
    lines = text.splitlines()
    assert "sudo nvidia-smi mig -i 0 -cgi 9:0,14:4,19:6 -C" in lines
    assert lines.index("sudo nvidia-smi -i 0 -mig 1") < lines.index(
        "sudo nvidia-smi mig -i 0 -dci || true"
    )
    assert "# The mode: resets the GPU." in lines
    assert "no reset" in nvidia_smi([divided("h100", "7g.80gb", number=0)])


def test_commands_run_in_a_shell(tmp_path):
    """With a `nvidia-smi` that answers as the guide shows, and a `sudo` that is none."""
    shell = shutil.which("sh")
    if shell is None:
        pytest.skip("no shell here")
    (tmp_path / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/said\n'
        'case "$*" in\n'
        "*-dci|*-dgi) exit 6 ;;\n"
        '*-cgi*) echo "Successfully created GPU instance ID  5 on GPU  1 using profile X";;\n'
        "esac\n"
    )
    for name in ("sudo", "nvidia-smi"):
        (tmp_path / name).chmod(0o755)
    gpus = [
        divided("a100", "3g.20gb", "3g.20gb", number=1, parts=((1, 2), ())),
        Divided(load_target("a100"), None, 2),
        Divided(load_target("l4"), None, 3),
    ]
    run = subprocess.run(
        [shell], input=nvidia_smi(gpus), text=True, capture_output=True, check=False,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "said").read_text().splitlines() == [
        "-i 1 -mig 1",
        "mig -i 1 -dci",
        "mig -i 1 -dgi",
        "mig -i 1 -cgi 9:4 -C",
        "mig -i 1 -cgi 9:0",
        "mig -i 1 -gi 5 -cci 1c.3g.20gb,2c.3g.20gb",
        "mig -i 1 -lgi",
        "mig -i 2 -dci",
        "mig -i 2 -dgi",
        "-i 2 -mig 0",
    ]
