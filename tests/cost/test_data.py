"""The tables of numbers: they are read and checked, and each says where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

import pytest

from gpuir.cost import collective, grouped, kriging, lanes, simt, steps, tensile
from gpuir.cost.data import (
    KnownGpu,
    LibraryTile,
    OfArchitecture,
    known_gpus,
    nearest,
    of_isa,
    parsed,
    table,
)
from gpuir.cost.sheet import Factor
from gpuir.fit import clock
from gpuir.targets.load import load_target, target_names
from gpuir.tune import templates

ROWS = {
    "cost": {
        "architectures": OfArchitecture,
        "collective_factors": collective.CollectiveFactor,
        "collective_parts": kriging.CurvePart,
        "experts": grouped.Implementation,
        "functions": lanes.Function,
        "gemm_kernels": simt.GemmKernel,
        "gemm_rules": simt.GemmRule,
        "known_gpus": KnownGpu,
        "matrices": steps.OfMatrix,
        "powers": lanes.Power,
        "tensile_sizes": tensile.TunedSize,
        "tiles": LibraryTile,
    },
    "fit": {"eager_calls": clock.EagerCall},
    "tune": {"spaces": templates.TriedValues},
}


def names(place: Traversable, before: str = "") -> list[str]:
    found = [before + f.name.removesuffix(".csv") for f in place.iterdir() if f.name[-4:] == ".csv"]
    folders = [f for f in place.iterdir() if f.is_dir() and not f.name.startswith("_")]
    return sorted(found + [n for f in folders for n in names(f, f"{before}{f.name}/")])


TABLES = [(room, name) for room in ROWS for name in names(files("gpuir").joinpath(room, "data"))]


@pytest.mark.parametrize(("room", "name"), TABLES)
def test_every_table_is_read_and_has_a_source(room: str, name: str):
    kind = Factor if name.startswith("factors/") else ROWS[room][name]
    rows = table(name, kind, room)
    assert rows and table(name, kind, room) is rows
    assert len(set(rows)) == len(rows)


@dataclass(frozen=True)
class Made:
    name: str
    count: int
    share: float = 0.5
    source: str = ""


GOOD = "# What it holds.\n#\n# source: a paper,\n#   table 2\nname,count,share,source\n"


def test_a_source_is_the_tables_or_the_rows():
    one, two = parsed(GOOD + "a,1,,\nb,2,0.25,another\n", Made, "made.csv")
    assert (one, two) == (Made("a", 1, 0.5, "a paper, table 2"), Made("b", 2, 0.25, "another"))
    (three,) = parsed("name,count,source\nc,3,seen\n", Made, "made.csv")
    assert three == Made("c", 3, 0.5, "seen")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,count\na,1\n", "made.csv:2: nothing says where the numbers are from"),
        ("name,count,source\na,1,\n", "made.csv:2: nothing says where"),
        ("# source: x\nname,number\na,1\n", "made.csv: the columns are"),
        ("# source: x\nname\na\n", "made.csv: the columns are"),
        (GOOD + "a,1.5,,\n", "made.csv:6: invalid literal for int"),
        (GOOD + "a,,,\n", "made.csv:6: invalid literal for int"),
        (GOOD + "a,1\n", "made.csv:6: zip"),
    ],
)
def test_what_a_table_may_not_say(text: str, said: str):
    with pytest.raises(ValueError, match=f"^{said}"):
        list(parsed(text, Made, "made.csv"))


def test_the_longest_start_of_an_architectures_name_counts():
    rows = [OfArchitecture("q", isa, 0.0, "made") for isa in ("", "sm_1", "sm_10", "sm_103")]
    found = [nearest(rows, isa)[0].isa for isa in ("sm_103", "sm_100", "sm_120", "gfx942")]
    assert found == ["sm_103", "sm_10", "sm_1", ""]


def test_every_architecture_has_each_quantity():
    quantities = {q.quantity for q in table("architectures", OfArchitecture)}
    for isa in {load_target(name).isa for name in target_names()}:
        assert all(of_isa(q, isa) >= 0 for q in quantities)


def test_the_known_gpus_are_of_their_architectures():
    for kernels in ("gemm", "generated"):
        for isa, known in known_gpus(kernels).items():
            target = load_target(known.gpu)
            assert (target.isa, target.sms) == (isa, known.sms)
