"""Sizes that stay symbols: a number as it is at one point, and an expression for all others.

A `Size` passes for the number that it is at one point. Arithmetic on sizes gives sizes. Whoever
compares one, counts up to it or writes it down leaves a condition in the `Recording` that runs:
what was found at this point, and must be found at another for the same code to do the same there.
So all code that takes numbers takes sizes, and what it decides by them is known: but for what it
looks up by a size in a set or a table of plain numbers. It compares there, or asks for `pinned`.

Expressions are polynomials over symbols, over quotients and remainders of polynomials that do not
come out even, and over what functions give (`of_sizes`). Two that are equal are one: nothing is
recorded of what holds at all points.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from functools import lru_cache, wraps
from importlib import import_module
from math import gcd, isfinite
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

if TYPE_CHECKING:  # numpy, which sizes alone do not need
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

# An atom is a symbol's name, or an operator and two polynomials; a monomial is a product of atoms.
Quotient = tuple[Literal["//", "%", "/"], "Key", "Key"]
Called = tuple[Literal["()"], str, tuple[Any, ...]]  # a function's name, expressions and texts
Atom = str | Quotient | Called
Monomial = tuple[Atom, ...]
Poly = dict[Monomial, Any]  # the factor of each monomial, an int or a float, never 0
Key = tuple[tuple[Monomial, Any], ...]  # the same, to be kept
Relation = Literal["==", "<"]
Columns = Mapping[str, "NDArray[np.int64]"]  # numbers of each symbol, one a point
NOWHERE: Columns = {}
ONE: Monomial = ()
FIRST, LAST = "\x02", "\x03"  # around a size in a text
WRITTEN = re.compile(f"{FIRST}(.*?){LAST}")
KEPT = 65_536  # products of monomials that are kept


@dataclass
class Recording:
    """Conditions, in the order that they came up: of each relation of an expression to 0, whether
    it holds. `hashed` are expressions that were looked up in a table: two of them that differ at
    this point have to differ at others."""

    found: dict[tuple[Relation, Key], bool] = field(
        default_factory=dict[tuple[Relation, Key], bool]
    )
    hashed: dict[Key, int] = field(default_factory=dict[Key, int])

    def conditions(self) -> Conditions:
        rows = self.found.items()
        found: tuple[tuple[Relation, Key, bool], ...] = tuple((*x, held) for x, held in rows)
        values = [*self.hashed.values()]
        return Conditions(found, tuple(self.hashed) if len(values) > 1 else (), len({*values}))


@dataclass(frozen=True)
class Conditions:
    """What has to hold at a point for the same code to do there what it did where this was
    recorded: relations to 0, and how many of the expressions `hashed` differ."""

    relations: tuple[tuple[Relation, Key, bool], ...] = ()
    hashed: tuple[Key, ...] = ()
    different: int = 0

    @staticmethod
    def only(point: Mapping[str, int]) -> Conditions:
        """That a point is this one."""
        keys: list[Key] = [(((name,), 1), (ONE, -n)) for name, n in point.items()]
        return Conditions(tuple(("==", key, True) for key in keys))

    def hold(self, points: Columns) -> NDArray[np.bool_]:
        """Whether they do, of each point."""
        import numpy as np

        count = len(next(iter(points.values()))) if points else 1
        found = np.ones(count, np.bool_)
        known: dict[Atom, Any] = {}
        for relation, key, held in self.relations:
            number = _value(key, points, known)
            found &= (number == 0 if relation == "==" else number < 0) == held
        if self.hashed:
            rows = [np.broadcast_to(_value(key, points, known), count) for key in self.hashed]
            steps = np.diff(np.sort(np.array(rows), axis=0), axis=0)
            found &= (steps != 0).sum(axis=0) + 1 == self.different
        return found

    def hold_at(self, point: Mapping[str, int]) -> bool:
        """Whether they do, at one point."""
        import numpy as np

        return bool(self.hold({name: np.array([n]) for name, n in point.items()})[0])

    def __str__(self) -> str:
        """One condition a line, those that name a single number first."""
        ordered = sorted(self.relations, key=lambda x: (not (x[2] and x[0] == "=="), len(x[1])))
        return "\n".join(f"{shown(key)} {_sign(r, held)} 0" for r, key, held in ordered)


def _sign(relation: str, held: bool) -> str:
    return {"==": "==" if held else "!=", "<": "<" if held else ">="}[relation]


_recordings: list[Recording] = []
_forms: list[bool] = []  # whether sizes are compared by form


@contextmanager
def recorded() -> Generator[Recording]:
    """What is found of sizes meanwhile."""
    _recordings.append(Recording())
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


@contextmanager
def by_form() -> Generator[None]:
    """Meanwhile sizes are equal where their expressions are, and nothing is recorded: to keep one
    of records that are equal at all points."""
    kept = [*_recordings]
    _recordings[:] = []
    _forms.append(True)
    try:
        yield
    finally:
        _forms.pop()
        _recordings[:] = kept


def is_recorded() -> bool:
    """Whether what is found of sizes is recorded: what was found before, and kept, then does not
    count, as its conditions would be missing."""
    return bool(_recordings)


class Size:
    """A number that is `at` this point, and `poly` at all."""

    __slots__ = ("at", "poly")

    def __init__(self, at: Any, poly: Poly):
        self.at, self.poly = at, poly

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A number's, as code that tells what it is given by `isinstance` asks."""
        return cast(type[Any], type(self.at))

    @staticmethod
    def symbol(name: str, at: int) -> int:
        return cast(int, Size(at, {(name,): 1}))

    @property
    def key(self) -> Key:
        return tuple(self.poly.items())

    # ---- arithmetic

    def __add__(self, other: Any) -> Any:
        if (p := _poly(other)) is None:
            return NotImplemented
        return _size(self.at + _at(other), _sum(self.poly, p, 1))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if (p := _poly(other)) is None:
            return NotImplemented
        return _size(self.at - _at(other), _sum(self.poly, p, -1))

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    def __mul__(self, other: Any) -> Any:
        if (p := _poly(other)) is None:
            return NotImplemented
        return _size(self.at * _at(other), _product(self.poly, p))

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return Size(-self.at, {m: -n for m, n in self.poly.items()})

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __truediv__(self, other: Any) -> Any:
        return _divided(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _divided(other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _quotient(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(other, self)

    def __mod__(self, other: Any) -> Any:
        return _remainder(self, other)

    def __rmod__(self, other: Any) -> Any:
        return _remainder(other, self)

    def __divmod__(self, other: Any) -> Any:
        return _quotient(self, other), _remainder(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _quotient(other, self), _remainder(other, self)

    def __pow__(self, n: Any) -> Any:
        if type(n) is not int or not 0 < n < 4:
            return pinned(self) ** (pinned(n))
        found: Any = self
        for _ in range(n - 1):
            found = found * self
        return found

    def __rpow__(self, other: Any) -> Any:
        return other ** pinned(self)

    def __lshift__(self, n: int) -> Any:
        return self * (1 << n)

    def __rshift__(self, n: int) -> Any:
        return self // (1 << n)

    def __ceil__(self) -> Any:
        return self if isinstance(self.at, int) else -(-self).__floor__()

    def __floor__(self) -> Any:
        return self if isinstance(self.at, int) else _floor(self.poly, self.at)

    def __trunc__(self) -> Any:
        return self.__floor__() if self >= 0 else self.__ceil__()

    # ---- what is found

    def __eq__(self, other: object) -> bool:
        if _forms:
            return type(other) is Size and self.poly == other.poly
        return _relation(self, other, "==")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        return _relation(self, other, "<")

    def __ge__(self, other: Any) -> bool:
        return not _relation(self, other, "<")

    def __gt__(self, other: Any) -> bool:
        return _relation(self, other, ">")

    def __le__(self, other: Any) -> bool:
        return not _relation(self, other, ">")

    def __bool__(self) -> bool:
        return not _relation(self, 0, "==")

    def __hash__(self) -> int:
        for x in _recordings[-1:]:
            x.hashed[self.key] = self.at
        return hash(self.at)

    # ---- what has to be a number

    def __index__(self) -> int:
        return pinned(self)

    def __int__(self) -> int:
        return int(pinned(self))

    def __float__(self) -> float:
        return float(pinned(self))

    # ---- text, in which it stays a size

    def __format__(self, spec: str) -> str:
        if not _recordings:
            return format(self.at, spec)
        return f"{FIRST}{json.dumps([self.at, self.key, spec])}{LAST}"

    def __str__(self) -> str:
        return format(self, "")

    __repr__ = __str__

    # ---- what else has to be a number

    def __and__(self, other: Any) -> Any:
        return pinned(self) & pinned(other)

    __rand__ = __and__

    def __round__(self, n: int | None = None) -> Any:
        return self if isinstance(self.at, int) else round(pinned(self), n)

    def bit_length(self) -> int:
        return pinned(self).bit_length()

    def is_integer(self) -> bool:
        return isinstance(self.at, int) or pinned(self).is_integer()


def pinned(x: Any) -> Any:
    """The number that a size is here, which it then has to be."""
    if type(x) is not Size:
        return x
    for recording in _recordings[-1:]:
        recording.found["==", tuple(_sum(x.poly, _constant(x.at), -1).items())] = True
    return x.at


def is_size(x: Any) -> bool:
    """Whether it is a size, which passes for a number."""
    return type(x) is Size


def whole(n: Any) -> int:
    """A number as an int, a size as it is."""
    return cast(int, n) if type(n) is Size else int(n)


def real(n: Any) -> float:
    """A number as a float; of a size, one that is a float at all points."""
    if type(n) is not Size:
        return float(n)
    return cast(float, Size(float(n.at), {m: float(x) for m, x in n.poly.items()}))


def of_sizes(function: Callable[..., float]) -> Callable[..., float]:
    """A function of numbers and texts that takes sizes as a whole, whatever it does by them: its
    result is a size then, which is computed anew at each point. It is found by its name."""
    name = f"{function.__module__}:{function.__qualname__}"
    FUNCTIONS[name] = function

    @wraps(function)
    def call(*args: Any) -> float:
        if not any(type(x) is Size for x in args):
            return function(*args)
        given = tuple(x if isinstance(x, str) else _key(_poly(x) or {}) for x in args)
        return cast(float, Size(function(*map(_at, args)), {(("()", name, given),): 1}))

    return call


FUNCTIONS: dict[str, Callable[..., float]] = {}


def _called(name: str, args: Sequence[Any]) -> Any:
    """What a function gives, of each of many points once."""
    import numpy as np

    if name not in FUNCTIONS:
        import_module(name.partition(":")[0])
    function = FUNCTIONS[name]
    if all(np.ndim(x) == 0 for x in args):
        return function(*args)
    columns = np.broadcast_arrays(*(x for x in args if not isinstance(x, str)))
    rows, which = np.unique(np.array(columns), axis=1, return_inverse=True)
    found = np.empty(rows.shape[1])
    for i, row in enumerate(rows.T.tolist()):
        numbers = iter(row)
        found[i] = function(*(x if isinstance(x, str) else next(numbers) for x in args))
    return found[which.reshape(-1)]


# ---- polynomials -------------------------------------------------------------------------------


def _at(x: Any) -> Any:
    return x.at if type(x) is Size else x


def _constant(n: Any) -> Poly:
    return {ONE: n} if n else {}


def _poly(x: Any) -> Poly | None:
    if type(x) is Size:
        return x.poly
    return _constant(x) if _is_number(x) else None


def _is_number(x: Any) -> bool:
    """Whether it is one of Python's, or of numpy's."""
    return isinstance(x, int | float) or getattr(x, "shape", None) == ()


def _size(at: Any, p: Poly) -> Any:
    """What is the same at all points is a number."""
    return at if not p or (len(p) == 1 and ONE in p) else Size(at, p)


def _key(p: Poly) -> Key:
    """Equal of equal ones."""
    return tuple(sorted(p.items(), key=repr))


def _sum(a: Poly, b: Poly, times: int) -> Poly:
    found = dict(a)
    for m, n in b.items():
        total = found.get(m, 0) + times * n
        if total:
            found[m] = total
        else:
            del found[m]
    return found


def _product(a: Poly, b: Poly) -> Poly:
    found: Poly = {}
    for m, x in a.items():
        for n, y in b.items():
            both = _joined(m, n) if m and n else m or n
            total = found.get(both, 0) + x * y
            if total:
                found[both] = total
            else:
                del found[both]
    return found


@lru_cache(KEPT)
def _joined(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((*a, *b), key=repr))


def _floor(p: Poly, at: Any) -> Any:
    """The largest whole number that is not more."""
    if all(_is_whole(m, n) for m, n in p.items()):
        return _size(int(at), {m: int(n) for m, n in p.items()})
    return _size(int(at // 1), {(("//", _key(p), ((ONE, 1),)),): 1})


def _is_whole(m: Monomial, n: Any) -> bool:
    """Whether a term is a whole number wherever symbols are."""
    return n == int(n) and not any(a[0] in ("/", "()") for a in m if not isinstance(a, str))


def _over(p: Poly, q: Poly) -> tuple[Poly, Any] | None:
    """The terms of p without the atoms of q, and the factor of q, where that is one monomial and
    all terms have its atoms."""
    if len(q) != 1:
        return None
    ((atoms, factor),) = q.items()
    found: Poly = {}
    for m, n in p.items():
        left = [*m]
        for atom in atoms:
            if atom not in left:
                return None
            left.remove(atom)
        found[tuple(left)] = n
    return found, factor


def _even(p: Poly, q: Poly) -> Poly | None:
    """p / q, where it comes out even wherever symbols are."""
    if p == q:
        return {ONE: 1}
    over = _over(p, q)
    if over is None or any(n % over[1] for n in over[0].values()):
        return None
    return {m: n // over[1] for m, n in over[0].items()}


def _divided(a: Any, b: Any) -> Any:
    p, q = _poly(a), _poly(b)
    if p is None or q is None:
        return NotImplemented
    at = _at(a) / _at(b)
    if p == q:
        return 1.0
    if (over := _over(p, q)) is not None:
        p, by = over
        if all(_is_exact(n, by) for n in p.values()):
            return _size(at, {m: n / by for m, n in p.items()})
        q = {ONE: by}
    return Size(at, {(("/", _key(p), _key(q)),): 1})


@lru_cache(KEPT)
def _is_exact(n: Any, by: Any) -> bool:
    """Whether a quotient is a float as it is: what is rounded twice is not the same."""
    return isfinite(by) and Fraction(n / by) * Fraction(by) == n


def _quotient(a: Any, b: Any) -> Any:
    p, q = _poly(a), _poly(b)
    if p is None or q is None:
        return NotImplemented
    at = _at(a) // _at(b)
    if (even := _even(p, q)) is not None:
        return _size(at, even)
    if q.keys() == {ONE} and all(isinstance(n, int) for n in (q[ONE], *p.values())):
        return _size(at, _parts(p, q[ONE]))
    return Size(at, {(("//", _key(p), _key(q)),): 1})


def _parts(p: Poly, by: int) -> Poly:
    """p // by: what divides evenly comes out of it, parts of parts are parts of the whole, and of
    what is all negative, they are those of the rest, filled up."""
    outside = {m: n // by for m, n in p.items() if (n // by if m == ONE else n % by == 0)}
    rest = {m: left for m, n in p.items() if (left := n - by * outside.get(m, 0))}
    if not rest.keys() - {ONE}:
        return _sum(outside, _constant(rest.get(ONE, 0) // by), 1)
    if by > 0 and all(n < 0 for m, n in rest.items() if m):
        up = _sum(_constant(by - 1), rest, -1)
        return _sum(outside, _parts(up, by), -1)
    if by > 0 and (inner := _inner(rest)) is not None:
        found, parts = inner
        found = _sum(found, _constant(parts * rest.get(ONE, 0)), 1)
        return _sum(outside, _parts(found, parts * by), 1)
    return _sum(outside, {(("//", _key(rest), ((ONE, by),)),): 1}, 1)


def _inner(p: Poly) -> tuple[Poly, int] | None:
    """Of `x // n + k`: x and n."""
    terms = [(m, n) for m, n in p.items() if m]
    if len(terms) != 1 or terms[0][1] != 1 or len(terms[0][0]) != 1:
        return None
    (atom,) = terms[0][0]
    if isinstance(atom, str) or atom[0] != "//" or len(atom[2]) != 1:
        return None
    ((m, parts),) = atom[2]
    return (dict(atom[1]), parts) if not m else None


def _remainder(a: Any, b: Any) -> Any:
    p, q = _poly(a), _poly(b)
    if p is None or q is None:
        return NotImplemented
    if _even(p, q) is not None:
        return 0
    at = _at(a) % _at(b)
    if q.keys() == {ONE} and all(isinstance(n, int) for n in (q[ONE], *p.values())):
        p = {m: n % q[ONE] for m, n in p.items() if n % q[ONE]}
        if not p.keys() - {ONE}:
            return at
    return Size(at, {(("%", _key(p), _key(q)),): 1})


def _relation(a: Size, b: Any, relation: Literal["==", "<", ">"]) -> bool:
    """Whether a size is in relation to a number. What holds wherever symbols are 0 or more is no
    condition."""
    at, other = a.at, _at(b)
    if not _is_number(other):
        return False if relation == "==" else NotImplemented
    found = at == other if relation == "==" else at < other if relation == "<" else at > other
    if not _recordings or other in (float("inf"), float("-inf")):
        return bool(found)
    p = _poly(b) or {}
    d = _sum(p, a.poly, -1) if relation == ">" else _sum(a.poly, p, -1)
    if not d.keys() - {ONE} or _is_decided(relation, d):
        return bool(found)
    _recordings[-1].found["==" if relation == "==" else "<", tuple(d.items())] = bool(found)
    return bool(found)


def _is_decided(relation: str, d: Poly) -> bool:
    """Whether a polynomial is in relation to 0, or is not, wherever symbols are: by its divisors
    where all of it is whole, and by its signs where its atoms have none."""
    least, terms = d.get(ONE, 0), [(m, n) for m, n in d.items() if m]
    factors = [n for _, n in terms]
    signed = not all(_is_positive(atom) for m, _ in terms for atom in m)
    rises = not signed and all(n > 0 for n in factors)
    falls = not signed and all(n < 0 for n in factors)
    if relation == "==":
        ints = all(isinstance(n, int) for n in (least, *factors))
        are_whole = ints and all(_is_whole(m, n) for m, n in terms)
        never = are_whole and least % gcd(*factors) != 0
        return never or (rises and least > 0) or (falls and least < 0)
    return (rises and least >= 0) or (falls and least < 0)


def _is_positive(atom: Atom) -> bool:
    """Whether an atom is known to be 0 or more: a symbol is, and parts of sums of such."""
    if isinstance(atom, str):
        return True
    if atom[0] == "()":
        return False
    inside = atom[2:] if atom[0] == "%" else atom[1:]  # a remainder has the sign of what divides
    return all(n > 0 and all(map(_is_positive, m)) for key in inside for m, n in key)


# ---- at other points ---------------------------------------------------------------------------


def value(x: Any, points: Mapping[str, Any], known: dict[Atom, Any] | None = None) -> Any:
    """What a size is at each point; a number is itself. `known` keeps the atoms that were found."""
    return _value(x.key, points, {} if known is None else known) if type(x) is Size else x


def _value(key: Key, points: Mapping[str, Any], known: dict[Atom, Any]) -> Any:
    total: Any = 0
    for m, n in key:
        term = n
        for atom in m:
            term = term * _atom(atom, points, known)
        total = total + term
    return total


def _atom(atom: Atom, points: Mapping[str, Any], known: dict[Atom, Any]) -> Any:
    if isinstance(atom, str):
        return points[atom]
    if atom not in known:
        if atom[0] == "()":
            args = [x if isinstance(x, str) else _value(x, points, known) for x in atom[2]]
            known[atom] = _called(atom[1], args)
            return known[atom]
        a, b = _value(atom[1], points, known), _value(atom[2], points, known)
        known[atom] = a // b if atom[0] == "//" else a % b if atom[0] == "%" else a / b
    return known[atom]


def moved(x: Any, point: Mapping[str, int]) -> Any:
    """The size at another point: still a size, to be recorded there."""
    return Size(_value(x.key, point, {}), x.poly) if type(x) is Size else x


def symbols(x: Any) -> frozenset[str]:
    """The symbols that a size depends on."""
    return frozenset(_names(x.key)) if type(x) is Size else frozenset()


def _names(key: Key) -> set[str]:
    found: set[str] = set()
    for m, _ in key:
        for atom in m:
            if isinstance(atom, str):
                found.add(atom)
                continue
            inner: tuple[Any, ...] = atom[2] if atom[0] == "()" else atom[1:]
            for own in inner:
                found |= set() if isinstance(own, str) else _names(own)
    return found


def shown(key: Key) -> str:
    """An expression as text: `2*batch*seq + 1`."""
    return " + ".join(_term(m, n) for m, n in key) or "0"


def _term(m: Monomial, n: Any) -> str:
    own = [] if n == 1 and m else [str(n)]
    return "*".join([*own, *(a if isinstance(a, str) else _fraction(a) for a in m)])


def _fraction(atom: Quotient | Called) -> str:
    if atom[0] == "()":
        args = (x if isinstance(x, str) else shown(x) for x in atom[2])
        return f"{atom[1].rpartition(':')[2]}({', '.join(args)})"
    return f"(({shown(atom[1])}) {atom[0]} ({shown(atom[2])}))"


# ---- records -----------------------------------------------------------------------------------


def each_size(record: T, change: Callable[[Any], Any]) -> T:
    """A frozen record with every size in it changed; what has none is the same object."""
    return _Each(change).of(record)


@dataclass
class _Each:
    change: Callable[[Any], Any]
    known: dict[int, Any] = field(default_factory=dict[int, Any])

    def of(self, x: Any) -> Any:
        kind = cast(Any, type(x))
        if kind is Size:
            return self.change(x)
        if kind is str:
            return WRITTEN.sub(self.written, x) if FIRST in x else x
        if kind in (int, float, bool, type(None)):
            return x
        if id(x) not in self.known:
            self.known[id(x)] = self.record(x), x  # with the object whose identity is the key
        return self.known[id(x)][0]

    def record(self, x: Any) -> Any:
        if isinstance(x, tuple):
            every = cast("tuple[Any, ...]", x)
            made = [self.of(y) for y in every]
            if all(a is b for a, b in zip(every, made, strict=True)):
                return every
            kind: Any = type(every)
            return kind(*made) if hasattr(kind, "_fields") else tuple(made)
        if isinstance(x, Mapping):
            rows = cast("Mapping[Any, Any]", x)
            new = {name: self.of(y) for name, y in rows.items()}
            return new if any(new[name] is not rows[name] for name in rows) else rows
        if not is_dataclass(x) or isinstance(x, type):
            return x
        old = {f.name: getattr(x, f.name) for f in fields(x)}
        new = {name: made for name, y in old.items() if (made := self.of(y)) is not y}
        return replace(cast(Any, x), **new) if new else x

    def written(self, found: re.Match[str]) -> str:
        """A size in a text."""
        at, key, spec = json.loads(found[1])
        return format(self.change(Size(at, dict(_unlisted(key)))), spec)


def _unlisted(x: Any) -> Any:
    """What was tuples before it was JSON."""
    return tuple(map(_unlisted, cast("list[Any]", x))) if isinstance(x, list) else x
