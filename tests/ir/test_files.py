"""A user's file is read, or an error says which it is and why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuir.ir.errors import GpuirError, ModelError, UsageError
from gpuir.ir.files import read_json, read_text, read_toml


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_bytes('\ufeff{"é": [1]}'.encode())
    assert read_text(file, "the report") == '{"é": [1]}'
    assert read_json(file, "the report") == {"é": [1]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "cannot read the report"),
        (b"\xff\xfe{}", "not a text file"),
        (b"{", "not a JSON file"),
        (b"[" * 200_000, "not a JSON file"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, data: bytes | None, says: str):
    file = tmp_path / "a.json"
    if data is not None:
        file.write_bytes(data)
    for kind in (UsageError, ModelError):
        with pytest.raises(GpuirError, match=says) as error:
            read_json(file, "the report", kind)
        assert type(error.value) is kind and error.value.where == str(file) and error.value.found


def test_paths_that_no_file_has():
    for path in ("a\0b", "a" * 5000, "."):
        with pytest.raises(UsageError, match="cannot read the report"):
            read_text(path, "the report")


def test_wrong_toml_is_shown(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text("a = 1\nb = \n")
    with pytest.raises(ModelError, match="not valid TOML") as error:
        read_toml(file, "the plan", ModelError)
    assert error.value.where == f"{file}:2" and error.value.found.startswith("b = \n    ^ ")
