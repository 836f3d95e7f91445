"""tools/mutations.py: each mutation of the list can be made, and a test that fails is found."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("m", mutations.mutations(), ids=lambda m: f"{m.number} {m.path}")
def test_the_text_stands_once_and_changes(m: mutations.Mutation):
    assert (ROOT / "gpuir" / m.path).read_text().count(m.old) == 1
    assert m.new and m.new != m.old
    named = " ".join(mutations.tests_of(m.path)).split()
    assert all((ROOT / word).exists() for word in named if not word.startswith("--"))


def test_a_mutation_is_made_caught_and_taken_back(tmp_path: Path):
    file = tmp_path / "gpuir" / "store.py"
    file.parent.mkdir()
    file.write_text("N = 1 + 1\n")
    (file.parent / "__init__.py").touch()
    (tmp_path / "tests").mkdir()
    option = "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
    (tmp_path / "tests" / "conftest.py").write_text(option)
    test = tmp_path / "tests" / "test_store.py"
    test.write_text("from gpuir.store import N\n\ndef test_n():\n    assert N == 2\n")
    wrong = mutations.Mutation(1, "store.py", "1 + 1", "1 + 2")
    assert mutations.judged(wrong, tmp_path, None, 60).test == "tests/test_store.py::test_n"
    same = mutations.Mutation(1, "store.py", "1 + 1", "1 * 2")
    assert mutations.judged(same, tmp_path, None, 60).test == ""
    assert file.read_text() == "N = 1 + 1\n"
