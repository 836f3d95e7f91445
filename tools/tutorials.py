"""Runs the tutorials, and writes what their commands print into them.

usage: python tools/tutorials.py [docs/tutorials/PAGE.md ...]

A page's ```sh and ```python blocks run in order, in an empty folder that has the repository's
examples/. A shell block is one script of `gpuir` commands; the Python blocks of a page are one
program that grows. Where a line `<!-- output: N -->` follows a block, the ```text block behind it
becomes the first N lines of what the block printed. Pictures that a page shows (`![...](NAME.png)`)
are copied beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r"```(sh|python)\n(.*?)```\n(?:\n<!-- output: (\d+) -->\n```text\n(.*?)```\n)?", re.DOTALL
)
PICTURE = re.compile(r"!\[[^\]]*\]\(([\w-]+\.png)\)")
WIDTH = "96"


@dataclass(frozen=True)
class Ran:
    """A block that ran: where its output stands in the page, if anywhere, and what it printed."""

    span: tuple[int, int] | None
    lines: int
    output: str


def run(
    page: Path, folder: Path, change: Callable[[str], str] = lambda code: code
) -> Iterator[Ran]:
    """Every block of a page, changed, in `folder`. AssertionError where one fails."""
    folder.mkdir(exist_ok=True)
    if not (folder / "examples").exists():
        shutil.copytree(ROOT / "examples", folder / "examples")
    bin_ = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "COLUMNS": WIDTH}
    program, before = "", ""
    for block in BLOCK.finditer(page.read_text()):
        language, code, lines, _ = block.groups()
        code = change(code)
        if language == "sh":
            command, text = ["bash", "-euo", "pipefail", "-c", code], None
        else:
            program += code
            command, text = [sys.executable, "-W", "ignore", "-"], program
        done = subprocess.run(
            command, input=text, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise AssertionError(f"{page.name}: {code}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        output = done.stdout
        if language == "python":  # what the program printed before is in it again
            output, before = output.removeprefix(before), output
        yield Ran(block.span(4) if lines else None, int(lines or 0), output)


def shown(ran: Ran) -> str:
    """The first lines of an output, and an ellipsis where there are more."""
    lines = [line.rstrip() for line in ran.output.strip("\n").splitlines()]
    more = ["..."] if len(lines) > ran.lines else []
    return "\n".join([*lines[: ran.lines], *more]) + "\n"


def write(page: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name) / "tutorial", page.read_text()
        ran = [r for r in run(page, folder) if r.span]
        for r in reversed(ran):
            start, end = r.span or (0, 0)
            text = text[:start] + shown(r) + text[end:]
        page.write_text(text)
        for picture in PICTURE.findall(text):
            if (folder / picture).exists():
                shutil.copy(folder / picture, page.parent / picture)


if __name__ == "__main__":
    for page in [Path(p).resolve() for p in sys.argv[1:]] or PAGES:
        print(page.name)
        write(page)
