"""tools/lines.py counts the lines of each package at two commits."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "lines.py"


def _git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def _commit(folder: Path, files: dict[str, int]) -> None:
    for path, lines in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("x = 1\n" * lines)
    _git(folder, "add", "-A")
    _git(folder, "commit", "-m", "x")


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *words]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


def test_lines_are_counted_by_package_and_since_the_parent(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    _commit(tmp_path, {"gpuir/cost/a.py": 10, "gpuir/b.py": 3, "tests/c.py": 4})
    alone = _run(tmp_path)
    assert "without a parent" in alone.stdout
    _commit(tmp_path, {"gpuir/cost/a.py": 6, "gpuir/plan/d.py": 2, "notes.txt": 9})
    rows = {line.split()[0]: line.split()[1:] for line in _run(tmp_path).stdout.splitlines()[1:]}
    assert rows == {
        "gpuir/*.py": ["3", "+0"],
        "gpuir/cost": ["6", "-4"],
        "gpuir/plan": ["2", "+2"],
        "gpuir": ["11", "-2"],
        "tests": ["4", "+0"],
        "all": ["15", "-2"],
    }


def test_an_unknown_revision_is_an_error(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    _commit(tmp_path, {"gpuir/b.py": 3})
    done = _run(tmp_path, "nowhere")
    assert done.returncode and "no revision 'nowhere'" in done.stderr
