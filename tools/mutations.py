"""Changes gpuir in one place, as a mistake would, and looks whether the tests of the package fail.

    python tools/mutations.py [NUMBER ...] [--known FILE] [--timeout SECONDS] [--jobs N]

Each line of `mutations.txt` is a mutation. In a copy of the checkout, each is made alone, and the
tests of its package run until one fails: first without those marked slow, then those. A row says
which test failed, and after how many seconds. FILE is the JSON of an earlier run: the test that
failed then runs first (a folder of tests or a file will do, too). It is written anew, with what
this run found. SECONDS are of CPU, for one run of pytest. The exit status is 1 if
a mutation is not caught. The whole list takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
LIST = HERE.with_suffix(".txt")
COPIED = ("gpuir", "specs", "tests", "tools", "docs", "examples", "validation", "benchmarks")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
CPU_S = 300
# Tests of a path of gpuir/, by its first words; tests/PACKAGE of any other.
GOLDEN = "tests/test_golden.py"
TESTS = {
    "backends": ("tests/backends",),
    "frontends/onnx": (
        *("tests/frontends --ignore=tests/frontends/torch", "tests/test_real_models.py"),
        "tests/test_conformance.py",
    ),
    "frontends/torch": ("tests/frontends/torch", "tests/test_torch.py"),
    "interp": ("tests/test_interp.py", "tests/test_laws.py", "tests/passes", "tests/frontends"),
    "ops": ("tests/ops", "tests/test_laws.py", "tests/cost"),
    "passes": (GOLDEN, "tests/passes"),
    "fusion": (GOLDEN, "tests/fusion", "tests/passes", "tests/stacks"),
    "run": ("tests/run", "tests/test_ranks.py"),
    "stacks": (GOLDEN, "tests/stacks"),
    "store": ("tests/test_store.py",),
    "text": ("tests/test_text.py", GOLDEN),
}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in a file of gpuir/, becomes `new`."""

    number: int
    path: str
    old: str
    new: str

    def change(self, root: Path) -> str:
        """Writes the file with the mutation; its text before."""
        file = root / "gpuir" / self.path
        before = file.read_text()
        file.write_text(before.replace(self.old, self.new))
        return before


@dataclass(frozen=True)
class Outcome:
    """Which test caught a mutation, or "" for none, and how long that took."""

    test: str
    seconds: float


def mutations() -> tuple[Mutation, ...]:
    """Those of the list, numbered from 1."""
    lines = (x for x in LIST.read_text().splitlines() if not x.startswith("#"))
    found: list[Mutation] = []
    for number, line in enumerate(lines, 1):
        path, _, change = line.partition(": ")
        old, _, new = change.partition(" ==> ")
        found.append(Mutation(number, path, old, new))
    return tuple(found)


def tests_of(path: str) -> tuple[str, ...]:
    """What pytest is told to run for a file of gpuir/."""
    known = next((tests for words, tests in TESTS.items() if path.startswith(words)), None)
    return known or (f"tests/{path.partition('/')[0]}",)


def runs(mutation: Mutation, before: str | None) -> Iterator[list[str]]:
    """The arguments of pytest for each try: the test that caught it before, the quick ones of the
    package, its slow ones."""
    if before:
        yield [before, "--all"]
    words = " ".join(tests_of(mutation.path)).split()
    yield [*words, "-m", "not slow", "--all"]
    yield [*words, "-m", "slow", "--all"]


def caught_by(copy: Path, words: Sequence[str], cpu_s: int) -> str:
    """The first test that fails, "" if all pass, or if time is over before one fails."""
    limited = ("bash", "-c", f'ulimit -t {cpu_s}; exec "$@"', "pytest")
    command = (*limited, sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        (*command, *words), cwd=copy, env=env, capture_output=True, text=True, check=False
    )
    if failed := FAILED.search(done.stdout):
        return failed[1]
    if done.returncode in (0, 4, 5):  # 4: there is no such test, 5: none was chosen
        return ""
    if done.returncode < 0:
        print(f"    over {cpu_s} s of CPU: {' '.join(words)}", flush=True)
        return ""
    return f"pytest: {done.stdout[-300:]}{done.stderr[-300:]}"


def judged(mutation: Mutation, copy: Path, before: str | None, cpu_s: int) -> Outcome:
    begun = time.monotonic()
    kept = mutation.change(copy)
    try:
        tries = (caught_by(copy, words, cpu_s) for words in runs(mutation, before))
        test = next((test for test in tries if test), "")
    finally:
        (copy / "gpuir" / mutation.path).write_text(kept)
    if "::" in test and caught_by(copy, [test, "--all"], cpu_s):
        print(f"    fails without it, too: {test}", flush=True)
        test = ""
    return Outcome(test, time.monotonic() - begun)


def copied(to: Path) -> Path:
    """A copy of what tests need, as it stands in the checkout."""
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, to)
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    parser.add_argument("--known", type=Path, metavar="FILE")
    parser.add_argument("--timeout", type=int, default=CPU_S, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    asked = parser.parse_args()
    chosen = [m for m in mutations() if not asked.numbers or m.number in asked.numbers]
    known: dict[str, str] = {}
    if asked.known and asked.known.exists():
        known = json.loads(asked.known.read_text())
    missed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(asked.jobs):
            copies.put(copied(Path(folder) / str(i)))

        def tried(m: Mutation) -> Outcome:
            copy = copies.get()
            try:
                return judged(m, copy, known.get(_key(m)), asked.timeout)
            finally:
                copies.put(copy)

        for m, found in zip(chosen, pool.map(tried, chosen), strict=True):
            missed += not found.test
            print(
                f"{m.number:3} {found.seconds:6.1f} s  {m.path:32} {found.test or 'NOT CAUGHT'}",
                flush=True,
            )
            if asked.known:
                known[_key(m)] = found.test
                asked.known.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{len(chosen) - missed} of {len(chosen)} are caught")
    sys.exit(missed > 0)


def _key(m: Mutation) -> str:
    return f"{m.path}: {m.old}"


if __name__ == "__main__":
    main()
