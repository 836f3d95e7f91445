"""What a file of a design space states, and what is said where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpuir
from gpuir.ir.errors import GpuirError
from gpuir.plan.space.space import read_space, space_of
from gpuir.simulate.parallel import Parallel

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")
WHOLE = {
    "models": [ENCODER, {"path": ENCODER, "dims": {"seq": [16, 32, 64]}}],
    "dims": {"batch": [1, 8], "seq": 128},
    "dtypes": ["own", "f16"],
    "profiles": ["ort", "eager"],
    "targets": ["t4", "a30:*"],
    "hardware": {
        "base": ["a100", "l4"],
        "set": {"sms": [80, 108], "dram": {"bytes_per_s": {"from": 1e12, "to": 3e12, "count": 3}}},
    },
    "plans": [{"cluster": "dgx-h100", "tp": [1, 2], "dp": [1, 2]}],
    "load": {"train": True},
}


def test_points_are_numbered_and_all_choices_are_there():
    space = space_of(WHOLE, "space.toml")
    slices = sum(name.startswith("a30:") for name in space.targets)
    assert slices > 4
    assert space.jobs == (2 + 2 * 3) * 2 * 2
    assert space.devices == 1 + slices + 2 * 2 * 3
    assert len(space.plans) == 4
    assert space.plans[-1].parallel == Parallel(tp=2, dp=2)
    assert space.points == space.jobs * space.columns
    jobs = [space.job(i) for i in range(space.jobs)]
    assert len(set(jobs)) == len(jobs)
    assert jobs[0].dims == (("batch", 1), ("seq", 128))
    assert jobs[-1].dims == (("batch", 8), ("seq", 64))
    assert (jobs[-1].dtype, jobs[-1].profile, jobs[-1].items) == ("f16", "eager", 8)
    names = [space.column(i).name for i in range(space.devices)]
    assert len(set(names)) == len(names)
    assert names[-1] == "l4+sms=108+dram.bytes_per_s=3000000000000"
    assert gpuir.load_target(names[-1]).dram_bytes_per_s == 3e12


def test_paths_are_from_the_files_folder(tmp_path):
    (tmp_path / "m.onnx").write_bytes(Path(ENCODER).read_bytes())
    file = tmp_path / "space.toml"
    file.write_text('models = "m.onnx"\ntargets = "t4"\n[dims]\nbatch = 1\nseq = 8\n')
    assert read_space(str(file)).models[0].path == str(tmp_path / "m.onnx")


def without(key):
    return {name: value for name, value in WHOLE.items() if name != key}


BAD = {
    "an unknown key": (
        WHOLE | {"batch": [1]},
        "space.toml:batch: no key has the name 'batch' here",
    ),
    "no model": (without("models"), "space.toml:models: an axis is missing"),
    "an empty axis": (WHOLE | {"targets": []}, "space.toml:targets: an axis has no values"),
    "an empty size": (WHOLE | {"dims": {"seq": []}}, "space.toml:dims.seq: an axis has no values"),
    "an odd size": (WHOLE | {"dims": {"seq": 1.5}}, "space.toml:dims.seq: a size is not valid"),
    "a size in words": (WHOLE | {"dims": {"seq": "x"}}, "dims.seq: this must be a number"),
    "an unknown target": (WHOLE | {"targets": ["a1000"]}, "space.toml:targets: no target"),
    "no slices": (WHOLE | {"targets": ["t4:*"]}, "space.toml:targets"),
    "an unknown dtype": (WHOLE | {"dtypes": ["f17"]}, "dtypes: no dtype is called 'f17'"),
    "an unknown profile": (WHOLE | {"profiles": ["eagre"]}, "space.toml:profiles: no profile"),
    "no number of a target": (
        WHOLE | {"hardware": {"base": "a100", "set": {"smss": [1]}}},
        "space.toml:hardware.set.smss: set:smss: no number is called smss",
    ),
    "an impossible number": (
        WHOLE | {"hardware": {"base": "a100", "set": {"sms": [80, -1]}}},
        "space.toml:hardware.set.sms",
    ),
    "nothing set": (
        WHOLE | {"hardware": {"base": "a100"}},
        "hardware.set: the table changes no numbers",
    ),
    "an unknown cluster": (WHOLE | {"plans": [{"cluster": "dgx-h99"}]}, "plans[0].cluster"),
    "an odd degree": (
        WHOLE | {"plans": [{"cluster": "dgx-h100", "tp": [0]}]},
        "space.toml:plans[0].tp: this must be at least 1",
    ),
    "an unknown option": (WHOLE | {"load": {"trian": True}}, "load.trian: no key"),
    "an option of another type": (
        WHOLE | {"load": {"train": 1}},
        "load.train: the value has the wrong type",
    ),
    "the space has no targets": (
        {"models": [ENCODER]},
        "space.toml:targets: the space has no targets",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_with_its_place(name):
    raw, message = BAD[name]
    with pytest.raises(GpuirError) as caught:
        space_of(raw, "space.toml")
    assert message in str(caught.value)
    assert caught.value.fix or caught.value.expected or caught.value.found
