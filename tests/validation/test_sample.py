"""What the documentation says of accuracy, on the sample of measurements that is shipped."""

from __future__ import annotations

import re

import pytest
import sample

ROW = re.compile(r"^\| (\w+) \| (\w+) \| (\S+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)
STATED = ROW.findall((sample.SAMPLE / "README.md").read_text())
FILES = sorted({row[0] for row in STATED})
ROUNDING = 0.15  # percent
NEAR = 2.0  # of the full table's error, that of a sample of at least `MANY` rows is: times, at most
MANY = 70


def test_every_table_is_there_and_stated():
    assert {path.stem for path in sample.SAMPLE.glob("*.parquet")} == set(FILES)
    assert len(STATED) > 30


@pytest.mark.parametrize("name", FILES)
def test_the_sample_has_the_errors_that_its_readme_states(name: str):
    found = sample.errors(sample.SAMPLE / f"{name}.parquet")
    stated = {(op, dtype): (int(n), float(e)) for f, op, dtype, n, _, e in STATED if f == name}
    assert {key: n for key, (n, _) in found.items()} == {key: n for key, (n, _) in stated.items()}
    for key, (_, error) in stated.items():
        assert found[key][1] == pytest.approx(error, abs=ROUNDING), key


def test_the_sample_is_like_the_full_tables():
    for name, op, dtype, n, full, error in STATED:
        if int(n) >= MANY:
            assert float(error) < NEAR * float(full) + 1, (name, op, dtype)


@pytest.mark.parametrize(
    ("label", "key"),
    [
        ("softmax", ("neusight_softmax", "softmax", "fp32")),
        ("layer norm", ("neusight_layernorm", "layernorm", "fp32")),
    ],
)
def test_headline_errors_are_those_of_the_page_of_kernels(label: str, key: tuple[str, str, str]):
    """Kernels on known GPUs: what the page's table of families states, the sample shows."""
    (error,) = (float(e) for f, op, dtype, _, _, e in STATED if (f, op, dtype) == key)
    page = (sample.ROOT / "docs" / "validation" / "kernels.md").read_text()
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    head = next(x for x in lines if "known GPU" in x)
    row = next(x for x in lines if x[0] == f"| {label}" and len(x) == len(head))
    assert error == pytest.approx(float(row[head.index("known GPU")]), rel=0.25)
