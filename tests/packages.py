"""Packages that the documents show, as if they were installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def install(document: str, name: str, site: Path) -> None:
    """The document's Python as module `name` of a package in the folder `site`, with the entry
    points of its TOML, and other TOML as a file beside it."""
    text = (ROOT / "docs" / "extend" / document).read_text()
    (module,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    *data, points = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    points = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", points).replace('"', "")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(module)
    for file in data:
        (site / f"{name}.toml").write_text(file)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def run(site: Path | None, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A Python command in `folder`, with the packages of `site`."""
    path = f"{site}:{ROOT}" if site else str(ROOT)
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
