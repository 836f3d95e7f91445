"""Counts the lines of Python in each package, and how they changed since a revision.

    python tools/lines.py [REVISION]

The revision is the parent of the last commit if none is given. A folder of `gpuir/` is a package;
the modules beside them count together. Lines are counted as `wc -l` does.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import PurePath

PARENT = "HEAD~1"
OTHERS = ("validation", "tests", "tools", "benchmarks", "packages")


def package_of(path: str) -> str:
    """`gpuir/cost/nest.py` is of `gpuir/cost`, `gpuir/run/loading.py` of `gpuir/*.py`."""
    first, *inside = PurePath(path).parts[:-1] or ("",)
    if first != "gpuir":
        return first
    return f"gpuir/{inside[0]}" if inside else "gpuir/*.py"


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def lines_at(revision: str) -> Counter[str] | None:
    """Lines of each package at a revision; None if the repository does not have it."""
    empty = _git("hash-object", "-t", "tree", "/dev/null")
    if empty is None or _git("rev-parse", "--verify", "--quiet", f"{revision}^{{tree}}") is None:
        return None
    counted = _git("diff", "--numstat", "--no-renames", empty.strip(), revision, "--", "*.py")
    found: Counter[str] = Counter()
    for line in (counted or "").splitlines():
        added, _, path = line.split("\t")
        found[package_of(path)] += int(added)
    return found


def table(now: Counter[str], before: Counter[str] | None) -> str:
    """A row a package, then the sums of gpuir and of all."""
    core = sorted(name for name in now | (before or {}) if name.startswith("gpuir/"))
    rest = [name for name in OTHERS if now[name] or (before and before[name])]
    rows = [(name, [name]) for name in core]
    rows += [("gpuir", core), *((name, [name]) for name in rest), ("all", [*core, *rest])]
    width = max(len(title) for title, _ in rows)
    lines: list[str] = []
    for title, names in rows:
        count = sum(now[n] for n in names)
        change = "" if before is None else f"{count - sum(before[n] for n in names):+8,}"
        lines.append(f"{title:{width}} {count:8,}{change}".rstrip())
    return "\n".join(lines)


def main() -> None:
    revision = sys.argv[1] if len(sys.argv) > 1 else PARENT
    now = lines_at("HEAD")
    if now is None:
        sys.exit("tools/lines.py: run it in a git checkout with a commit")
    before = lines_at(revision)
    if before is None and len(sys.argv) > 1:
        sys.exit(f"tools/lines.py: there is no revision {revision!r} here")
    since = f"and the change since {revision}" if before else "without a parent commit here"
    print(f"lines of Python by package, {since}")
    print(table(now, before))


if __name__ == "__main__":
    main()
