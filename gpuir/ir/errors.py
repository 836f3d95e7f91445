"""What can go wrong, and whose problem it is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class GpuirError(Exception):
    """Where, what, expected, found, fix: the five things a reader needs to go on.

    `where` is a model node, a file, or a line of text; `what` is one sentence; the other three are
    left out of the message when empty. The command line prints `str(error)` and exits with 2.
    """

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", found: str = "", fix: str = ""
    ):
        super().__init__(what)
        self.what, self.where = what, where
        self.expected, self.found, self.fix = expected, found, fix

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        for label in ("expected", "found", "fix"):
            if text := getattr(self, label):
                head, *rest = text.splitlines()
                lines.append(f"  {label + ':':9} {head}")
                lines += [" " * 12 + line for line in rest]
        return "\n".join(lines)


class ModelError(GpuirError):
    """The model file, or a value given for it, cannot be used."""


class TargetError(GpuirError):
    """A target, cluster or profile cannot be used."""


class TextError(GpuirError):
    """Text does not parse; `where` holds file and line, `found` the line with a caret."""


class UsageError(GpuirError):
    """A name or option given by the user is not one we know."""


class VerifyError(GpuirError):
    """A graph breaks a promise of its level: a bug in the pass or frontend that made it."""


class PluginError(GpuirError):
    """Something that a module of the user's adds did not work: a bug there, not here."""


def reason(error: BaseException) -> str:
    """The first lines of what somebody else's code says, and its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def raised(error: BaseException) -> str:
    """The reason, and below it the line of the user's code that it comes from."""
    return "\n".join(filter(None, (reason(error), line_of(error))))


def line_of(error: BaseException) -> str:
    """`at model.py:7: return self.lin(x)`: the innermost line that is neither ours nor Python's nor
    of an installed package; where all are, the innermost of a package but torch."""
    from sysconfig import get_paths
    from traceback import extract_tb

    if isinstance(error, SyntaxError) and error.filename and error.text:
        return f"at {error.filename}:{error.lineno}: {error.text.strip()}"
    paths = get_paths()
    packages = (paths["purelib"], paths["platlib"])
    ours = ("<", str(Path(__file__).parents[1]), *(f"{folder}/torch/" for folder in packages))
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    own = [f for f in frames if not f.filename.startswith((paths["stdlib"], *packages))]
    theirs = [f for f in frames if f.filename.startswith(packages)]
    return "".join(f"at {f.filename}:{f.lineno}: {f.line}" for f in (own or theirs)[-1:])


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean a, b?` for a misspelt name, else the known names, if there
    are any; for the `fix` of an error."""
    known = sorted(known)
    if not known:
        return ""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    few = known if len(known) <= 40 else known[:10]
    more = f" and {len(known) - len(few)} more" if len(few) < len(known) else ""
    return f"one of {', '.join(few)}{more}"
