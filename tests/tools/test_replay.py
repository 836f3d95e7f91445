"""tools/replay.py keeps what commands print, and finds what differs."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "replay.py"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *words], check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("replay") / "kept.zip"
    done = _run("run", str(file), "--only", "analyze odd", "--jobs", "1")
    assert not done.returncode, done.stderr
    return file


def _changed(kept: Path, to: Path, change: float) -> Path:
    """A copy in which the first latency is another."""
    with zipfile.ZipFile(kept) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            read = json.loads(old.read(name))
            read["answer"]["reports"][0]["latency_s"] *= change
            new.writestr(name, json.dumps(read))
    return to


def test_every_kernel_of_a_model_is_kept(kept: Path) -> None:
    with zipfile.ZipFile(kept) as file:
        (name,) = file.namelist()
        read = json.loads(file.read(name))
    assert read["status"] == 0
    assert '"kernels"' in json.dumps(read)


def test_the_last_digit_may_differ_and_no_other(kept: Path, tmp_path: Path) -> None:
    near = _changed(kept, tmp_path / "near.zip", 1 + 1e-15)
    assert _run("compare", str(kept), str(near)).returncode == 0
    far = _changed(kept, tmp_path / "far.zip", 1 + 1e-9)
    done = _run("compare", str(kept), str(far))
    assert "1 differences" in done.stdout
    assert "latency_s" in done.stdout
