"""A user's file is read, or an error says which it is and why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuir.files import Folder, read_json, read_text, read_toml, write_folder
from gpuir.ir.errors import GpuirError, ModelError, UsageError


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


def test_what_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A device, a file or a stream of more than a text may have: only so much is read."""
    monkeypatch.setattr("gpuir.files.LARGEST_TEXT", 1 << 20)
    for kind in (UsageError, ModelError):
        with pytest.raises(kind, match="the target is too large") as error:
            read_text("/dev/zero", "the target", kind)
        assert "at most 1 MiB" in error.value.expected
    for read in (read_json, read_toml):
        with pytest.raises(UsageError, match="too large"):
            read("/dev/zero", "the report")


def test_a_file_of_just_the_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpuir.files.LARGEST_TEXT", 10)
    (tmp_path / "a").write_text("x" * 10)
    (tmp_path / "b").write_text("x" * 11)
    assert read_text(tmp_path / "a", "the report") == "x" * 10
    with pytest.raises(UsageError, match="too large"):
        read_text(tmp_path / "b", "the report")


def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot read the report") as error:
        read_text(tmp_path / "pipe", "the report")
    assert "a pipe with no writer" in error.value.found


def test_a_pipe_is_read_to_its_end(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # so that writing may begin
    with (tmp_path / "pipe").open("wb", buffering=0) as writer:
        writer.write(b'{"a": 1}')
        found = os.open(f"/dev/fd/{reader}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(found)
    assert read_json(f"/dev/fd/{reader}", "the report") == {"a": 1}
    os.close(reader)


def test_a_folder_is_whole_or_as_it_was(tmp_path: Path):
    place = tmp_path / "out"
    write_folder(place, Folder([("a", b"1"), ("b", b"2")]))

    def breaking() -> Iterator[tuple[str, bytes]]:
        yield "a", b"3"
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        write_folder(place, Folder(breaking()))
    assert {x.name: x.read_bytes() for x in place.iterdir()} == {"a": b"1", "b": b"2"}
    write_folder(place, Folder([("a", b"4"), ("b", b"5"), ("c", b"6")]))
    assert {x.name: x.read_bytes() for x in place.iterdir()} == {"a": b"4", "b": b"5", "c": b"6"}
    with pytest.raises(UsageError, match="other files"):
        write_folder(place, Folder([("a", b"7")]))
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot write the folder"):
        write_folder(tmp_path / "no" / "such", Folder([("a", b"1")]))
