"""Applies the guides that change gpuir in a clone, and runs what their changes could break.

    python tools/guides.py                  # each guide of docs/contribute and docs/extend
    python tools/guides.py kernel-family    # one

A guide's diffs are applied to a copy of the checkout, and its other blocks run there. Then ruff and
the tests of the folders that the diffs touch, slow ones too, have to pass as they do without it.
It takes minutes; `tests/contribute` has the short part.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(diff|sh|python)\n(.*?)```", re.DOTALL)
TOUCHED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
ALWAYS = ("tests/test_complete.py", "tests/test_layers.py", "tests/test_style.py")


def guides() -> list[Path]:
    """The pages with examples to run."""
    folders = (ROOT / "docs/contribute", ROOT / "docs/extend")
    return [p for folder in folders for p in sorted(folder.glob("*.md")) if touched(p)]


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def touched(page: Path) -> list[str]:
    """The files that a guide's diffs change or add."""
    diffs = "".join(text for language, text in blocks(page) if language == "diff")
    return list(dict.fromkeys(TOUCHED.findall(diffs)))


def clone(to: Path, names: Sequence[str] = ()) -> None:
    """The checkout as it is, changes that are not committed included, or only some of its files."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "-z", *names]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def apply(page: Path, folder: Path) -> None:
    """A guide's diffs, in order; an error where one does not fit."""
    for language, text in blocks(page):
        if language == "diff":
            run(["patch", "-p1", "--fuzz=0", "-s"], folder, text)


def run(words: Sequence[str], folder: Path, text: str | None = None) -> str:
    """What a command prints; an error with it where the command fails."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(folder), "PATH": path}
    done = subprocess.run(
        words, input=text, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def follow(page: Path, folder: Path) -> None:
    """A guide from top to bottom: its diffs applied, its commands and programs run."""
    command = folder / "bin" / "gpuir"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuir "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    for language, text in blocks(page):
        match language:
            case "diff":
                run(["patch", "-p1", "--fuzz=0", "-s"], folder, text)
            case "sh":
                run(["bash", "-euo", "pipefail", "-c", text], folder)
            case _:
                run([sys.executable, "-"], folder, text)


def lint(names: Sequence[str], folder: Path) -> None:
    """ruff's rules and layout for some files."""
    sources = [name for name in names if name.endswith(".py")]
    for words in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        run([sys.executable, "-m", "ruff", *words, *sources], folder)


def tests_of(names: Sequence[str]) -> Iterator[str]:
    """The tests of the folders that files are in: gpuir/cost/scans.py, those of tests/cost."""
    yield from ALWAYS
    for name in names:
        top, room, *_ = Path(name).parts
        tests = f"tests/{Path(room).stem if top in ('gpuir', 'tests') else 'targets'}"
        yield from (path for path in (tests, f"tests/test_{Path(room).stem}.py") if exists(path))


def exists(path: str) -> bool:
    return (ROOT / path).exists()


def try_out(page: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone(folder)
        follow(page, folder)
        changed = touched(page)
        lint(changed, folder)
        tests = list(dict.fromkeys(tests_of(changed)))
        print(f"  {' '.join(tests)}", flush=True)
        run([sys.executable, "-m", "pytest", "--all", "-q", "-n", "auto", *tests], folder)


def main() -> None:
    known = {page.stem: page for page in guides()}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("guide", nargs="*", choices=[*known, []], help=", ".join(known))
    failed = 0
    for name in parser.parse_args().guide or known:
        print(f"{name}:", flush=True)
        try:
            try_out(known[name])
        except RuntimeError as error:
            failed += 1
            print(error)
        else:
            print("  passes")
    sys.exit(failed)


if __name__ == "__main__":
    main()
