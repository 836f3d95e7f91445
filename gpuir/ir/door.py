"""What public functions refuse before they begin: a value of the wrong kind is a UsageError that
says what was expected there, found, and how to give it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from typing import Any, ParamSpec, TypeVar, cast

from gpuir.ir.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
LARGEST = (1 << 63) - 1  # of a whole number of 64 bits
HUGE = 1 << 1023  # about the largest number of 64 bits (IEEE 754)
LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True)
class ArgumentKind:
    """Values that an argument may have: what they are called, whether one is such, and how to give
    one, where its name does not say so."""

    what: str
    holds: Callable[[Any], bool]
    fix: str = ""

    def __or__(self, other: ArgumentKind) -> ArgumentKind:
        holds, also = self.holds, other.holds
        fix = self.fix or other.fix
        return ArgumentKind(f"{self.what}, or {other.what}", lambda x: holds(x) or also(x), fix)


def of_type(kind: type[Any] | tuple[type[Any], ...], what: str, fix: str = "") -> ArgumentKind:
    """Values of a type."""
    return ArgumentKind(what, lambda x: isinstance(x, kind), fix)


def is_whole(x: Any) -> bool:
    return not isinstance(x, bool) and isinstance(x, Integral)


def is_number(x: Any) -> bool:
    """Whether it is a number that 64 bits hold: none so large, though perhaps infinite."""
    if isinstance(x, bool) or not isinstance(x, Real):
        return False
    return not is_whole(x) or abs(int(cast("Any", x))) <= HUGE


def pairs_of(x: Any) -> list[tuple[Any, Any]] | None:
    """The pairs in a tuple of them; None where it is no such tuple."""
    if not isinstance(x, tuple):
        return None
    entries = [cast("tuple[Any, ...]", e) for e in cast("tuple[Any, ...]", x)]
    plain = all(isinstance(e, tuple) and len(e) == 2 for e in entries)  # pyright: ignore[reportUnnecessaryIsInstance]
    return [(e[0], e[1]) for e in entries] if plain else None


def whole(least: int = 0, most: int | None = None) -> ArgumentKind:
    """Whole numbers from `least` on."""
    what = f"a whole number of {least} or more" + (f", at most {most}" if most is not None else "")
    top = LARGEST if most is None else most
    return ArgumentKind(what, lambda x: is_whole(x) and least <= x <= top)


def real(least: float = 0.0) -> ArgumentKind:
    """Finite numbers from `least` on."""

    def holds(x: Any) -> bool:
        return is_number(x) and isfinite(x) and x >= least

    return ArgumentKind(f"a number of {least:g} or more", holds)


def many(of: ArgumentKind) -> ArgumentKind:
    """Several of them, in a list or the like; a text is none."""

    def holds(x: Any) -> bool:
        if isinstance(x, str | bytes) or not isinstance(x, Iterable):
            return False
        return all(map(of.holds, cast("Iterable[Any]", x)))

    return ArgumentKind(f"a list, each {of.what}", holds)


def one_of(*known: str) -> ArgumentKind:
    """One of some texts."""
    shown = ", ".join(repr(x) for x in known)
    return ArgumentKind(f"one of {shown}", lambda x: isinstance(x, str) and x in known)


def named(of: ArgumentKind, by: ArgumentKind | None = None) -> ArgumentKind:
    """A mapping from names (or `by`) to them."""
    keys = by or TEXT

    def holds(x: Any) -> bool:
        if not isinstance(x, Mapping):
            return False
        items = cast("Mapping[Any, Any]", x).items()
        return all(keys.holds(k) and of.holds(v) for k, v in items)

    return ArgumentKind(f"a mapping of {keys.what} to {of.what}", holds)


WHOLE = ArgumentKind("a whole number", lambda x: is_whole(x) and abs(x) < LARGEST)
NUMBER = ArgumentKind("a number", is_number)
FLAG = of_type(bool, "True or False")
TEXT = of_type(str, "a text")
PATH = of_type((str, PathLike), "a name or the path of a file")
CALLED = ArgumentKind("a function", callable)


def refuse(where: str, name: str, kind: ArgumentKind, value: Any, fix: str = "") -> UsageError:
    """The error of a value that is not what an argument may be."""
    try:
        shown = f"{name}={value!r}"
    except (AttributeError, TypeError, ValueError):  # of a record whose fields are strange
        shown = f"{name}=a {type(value).__name__} whose fields are not valid"
    shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
    return UsageError(
        f"{where}: {name} is not {kind.what}",
        expected=f"{name}={kind.what}",
        found=f"{shown} ({type(value).__name__})",
        fix=fix or kind.fix or f"give {kind.what} as {name}",
    )


def takes(**kinds: ArgumentKind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Checks those arguments of a public function by name; what has a default of None may be None.
    An argument of a function that gathers names (`**options`) is checked where it is given."""

    def checked(function: Callable[P, R]) -> Callable[P, R]:
        known = signature(function)
        where = function.__qualname__.removesuffix(".__init__")
        may_be_none = {n for n, p in known.parameters.items() if p.default is None}
        gathered = next(
            (n for n, p in known.parameters.items() if p.kind == Parameter.VAR_KEYWORD), ""
        )

        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            given = known.bind(*args, **kwargs).arguments  # a TypeError, as of any function
            given |= given.get(gathered, {})
            for name, kind in kinds.items():
                if name not in given or (given[name] is None and name in may_be_none):
                    continue
                if not kind.holds(given[name]):
                    raise refuse(where, name, kind, given[name])
            return function(*args, **kwargs)

        return guarded

    return checked


def holds(**kinds: ArgumentKind) -> Callable[[type[R]], type[R]]:
    """Checks fields of a record by name, when one is made."""

    def checked(record: type[R]) -> type[R]:
        record.__init__ = takes(**kinds)(record.__init__)
        return record

    return checked
