"""Sizes that are symbols, and the numbers that a user gives for them by name."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from shlex import quote
from typing import Any

import torch
from sympy import Symbol  # torch, which brings it, writes sizes in it
from torch.export import ExportedProgram

from gpuir.frontends.torch.node import dtype_of
from gpuir.frontends.torch.program import of_data, traced_inputs
from gpuir.ir.errors import ModelError, nearest
from gpuir.ir.types import TensorType, channels_last
from gpuir.ops.strides import packed

EACH = 8  # so many of those are asked for by name; more, by a pattern
EXAMPLE = 128
RUNS_ANYWAY = 2  # torch traces with sizes from 2 on, and runs the program with 0 and 1 all the same


@dataclass
class Dims:
    """The numbers that symbolic sizes stand for, and those that were asked for.

    A size has the name of its `Dim`, which a live program knows and a saved one does not; those of
    its places, `x.0` for axis 0 of input x; and torch's, `s77`. One that depends on the data has
    torch's alone, `u0`, or a pattern of several, `u*`.
    """

    numbers: dict[str, int] = field(default_factory=dict[str, int])  # by torch's name, once bound
    used: set[str] = field(default_factory=set[str])
    channels_last: bool = False  # whether images are taken for converted
    labels: Mapping[str, str] = field(default_factory=dict[str, str])  # Dim's name for torch's
    places: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    missing: dict[str, int] = field(default_factory=dict[str, int])  # examples of those not given
    found: list[str] = field(default_factory=list[str])  # where those are
    inputs: str = ""  # another way to give them
    at: str = ""  # where the walk is

    def __call__(self, size: Any) -> int:
        """A size as a number; with an example for one that is not given (`all_asked`)."""
        if isinstance(size, int):
            return size
        expression, env = size.node.expr, size.node.shape_env
        ranges: Mapping[Any, Any] = env.var_to_range if env else {}
        free = expression.free_symbols
        return int(expression.subs({s: self._number(s.name, ranges.get(s)) for s in free}))

    def _number(self, symbol: str, bounds: Any) -> int:
        given = symbol if symbol in self.numbers else self._pattern(symbol)
        if given is None:
            if symbol not in self.missing and of_data(symbol):
                self.found.append(f"{symbol}: {self.at}")
            return self.missing.setdefault(symbol, within(EXAMPLE, bounds))
        self.used.add(given)
        number = self.numbers[given]
        if of_data(symbol) and (possible := within(number, bounds)) != number:
            raise ModelError(
                f"{symbol}={number} is outside the bounds that the program sets to this size",
                expected=f"at {'least' if possible > number else 'most'} {possible}",
                fix=as_option(self._of_data() | {given: possible}),
            )
        return number

    def _pattern(self, symbol: str) -> str | None:
        """The pattern given, if one is, for a size that depends on the data."""
        patterns = (given for given in self.numbers if "*" in given)
        return next((p for p in patterns if of_data(symbol) and fnmatchcase(symbol, p)), None)

    def _of_data(self) -> dict[str, int]:
        """What is given for sizes that depend on the data."""
        return {name: n for name, n in self.numbers.items() if of_data(name)}

    @contextmanager
    def all_asked(self) -> Generator[None]:
        """One ModelError for all sizes without a number, with examples that the program takes. What
        those lead to meanwhile is nobody's error."""
        try:
            yield
        except Exception:
            if not self.missing:
                raise
        if not self.missing:
            return
        data = [symbol for symbol in self.missing if of_data(symbol)]
        if len(data) == len(self.missing):
            what = "sizes depend on the data" if len(data) > 1 else "a size depends on the data"
        else:
            what = "the value of a symbolic size is missing"
        names = {self.name(s): n for s, n in self.missing.items() if s not in data[EACH:]}
        if more := len(data) - EACH if len(data) > EACH else 0:
            what += "; a pattern gives many one number"
            self.found[-more:] = [f"and {more} more"]
            names = {n: x for n, x in names.items() if n not in data}
            names["u*"] = min(self.missing[s] for s in data)
        kept = {name: n for name, n in self._of_data().items() if name in self.used}
        others = ", ".join(self.numbers.keys() - self.used)
        rest = {name: n for name, n in (kept | names).items() if of_data(name)}
        shapes = f"{as_option(rest) if rest else ''} {self.inputs}".strip() if self.inputs else ""
        raise ModelError(
            what,
            expected=f"numbers for {', '.join(names)}, none of which is {others}" if others else "",
            found="\n".join(self.found),
            fix=", or ".join(filter(None, (example(kept | names), shapes))),
        ) from None

    def name(self, symbol: str) -> str:
        """What a user best calls it."""
        return self.labels.get(symbol) or next(iter(self.places.get(symbol, ())), symbol)

    def shown(self, size: Any) -> str:
        """A size as users call it: `2*batch`."""
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr if isinstance(size, torch.SymInt) else size
        labels = {s: Symbol(self.labels.get(s.name, s.name)) for s in expression.free_symbols}
        return str(expression.xreplace(labels))

    def written(self, shape: Sequence[Any]) -> str:
        """`batchx128`, as `--input` has it."""
        return "x".join(map(self.shown, shape)) or "scalar"

    def bind(self, program: ExportedProgram, given: Mapping[str, tuple[int, ...]]) -> None:
        """Symbols get their numbers: from names, or from whole shapes of inputs. ModelError for a
        shape or a size that the program does not take, and for symbols left, all at once."""
        shapes = sizes_of(program)
        self.labels, self.places = names_of_dims(program), places_of(shapes)
        for name in given:
            if name not in shapes:
                raise ModelError(f"no input has the name {name!r}", fix=nearest(name, shapes))
        asked, self.numbers = self.numbers, {}
        symbols = {label: symbol for symbol, label in self.labels.items()}
        axes = {f"{name}.{i}": n for name, shape in shapes.items() for i, n in enumerate(shape)}
        for name, number in asked.items():
            if name in symbols or name not in axes:
                self._set(symbols.get(name, name), number)
            elif known := solved(axes[name], number):
                self._set(*known)
            elif len(symbols_of(axes[name])) == 1:
                raise self._not_taken(name, axes[name], number)
        for name, shape in given.items():
            pairs = zip(shapes[name], shape, strict=False)
            found = [known for size, number in pairs if (known := solved(size, number))]
            self.numbers = {**dict(found[::-1]), **self.numbers}
        self._note_missing(shapes)
        for name, number in asked.items():
            if name not in symbols and name in axes and self(axes[name]) != number:
                raise self._not_taken(name, axes[name], number)
        for name, shape in given.items():
            if tuple(map(self, shapes[name])) != shape:
                raise ModelError(
                    f"the program does not accept this shape of {name!r}",
                    expected=f"{name}={self.written(shapes[name])}",
                    found=f"{name}={'x'.join(map(str, shape))}, with {self._chosen()}",
                )
        self._check_ranges(program)

    def _set(self, symbol: str, number: int) -> None:
        if self.numbers.setdefault(symbol, number) != number:
            raise ModelError(
                "two different values are given for a symbolic size",
                found=f"{self.name(symbol)}={self.numbers[symbol]} and {number}",
            )

    def _not_taken(self, name: str, size: Any, number: int) -> ModelError:
        return ModelError(
            f"the program does not accept {name}={number}",
            expected=f"{name}={self.shown(size)}",
            found=self._chosen(),
        )

    def _chosen(self) -> str:
        sizes = [f"{self.name(symbol)}={n}" for symbol, n in self.numbers.items()]
        return ", ".join(sizes) or "no symbolic sizes"

    def _note_missing(self, shapes: Mapping[str, Sequence[Any]]) -> None:
        """For the error of `all_asked`: the inputs with sizes that are not given."""
        symbols = {
            name: {s.name for size in shape for s in symbols_of(size)}
            for name, shape in shapes.items()
        }
        missing = set[str]().union(*symbols.values()) - self.numbers.keys()
        found = [name for name in shapes if symbols[name] & missing]
        if not found:
            return
        shown = {name: "x".join(str(self(n)) for n in shapes[name]) for name in found}
        self.inputs = " ".join(f"--input {name}={shape}" for name, shape in shown.items())
        self.found.append(", ".join(f"{name}: {self.written(shapes[name])}" for name in found))
        unnamed = [s for s in sorted(missing) if s in self.places and s not in self.labels]
        self.found += [f"{s} is {', '.join(self.places[s])}" for s in unnamed]

    def _check_ranges(self, program: ExportedProgram) -> None:
        """ModelError for a number beyond what the program was exported for."""
        for size, found in program.range_constraints.items():
            if not all(s.name in self.numbers for s in size.free_symbols):
                continue
            if all(of_data(s.name) for s in size.free_symbols):
                continue  # checked where it is read
            number = int(size.subs({s: self.numbers[s.name] for s in size.free_symbols}))
            low = int(found.lower) if found.lower > RUNS_ANYWAY else 0
            high = int(found.upper) if found.upper.is_Integer else None
            if number >= low and (high is None or number <= high):
                continue
            name = self.name(size.name) if size.is_Symbol else self.shown(size)
            raise ModelError(
                f"{name}={number} is outside the range that the program was exported for",
                expected=f"{low} to {high}" if high is not None else f"at least {low}",
                fix="export with a wider range: Dim(name, min=.., max=..)",
            )

    def check_all_used(self, live: bool) -> None:
        """ModelError when a number is given for a size that the program has not. The sizes of a
        `live` one are those of its arguments."""
        unknown = [name for name in self.numbers if name not in self.used]
        if unknown:
            how = "change the arguments" if live else "export with dynamic_shapes"
            raise ModelError(
                f"no symbolic size has the name {', '.join(unknown)}",
                expected=", ".join(sorted(map(self.name, self.used)))
                or "none: all sizes of the program are fixed",
                fix=f"remove {', '.join(unknown)}, or {how}",
            )

    def type(self, tensor: torch.Tensor) -> TensorType:
        return TensorType(tuple(map(self, tensor.shape)), dtype_of(tensor.dtype))

    def lying(self, tensor: torch.Tensor) -> TensorType:
        """Its type with the order that an image lies in memory in, by its strides or because all
        are to: channels-last, or else taken for row-major."""
        type = self.type(tensor)
        if type.rank not in (4, 5):  # that torch.channels_last and channels_last_3d are of
            return type
        last, strides = type.with_order(channels_last(type.rank)), tuple(map(self, tensor.stride()))
        converted = self.channels_last and type.dtype.is_float
        return (
            last if converted or packed(type).strides != strides == packed(last).strides else type
        )


def example(numbers: Mapping[str, int]) -> str:
    """How to give these sizes, in numbers that stand for the user's."""
    return f"{as_option(numbers)}   (for example)"


def as_option(numbers: Mapping[str, int]) -> str:
    """Sizes as the command line takes them."""
    return f"--dims {quote(','.join(f'{name}={n}' for name, n in numbers.items()))}"


def within(number: int, bounds: Any) -> int:
    """The number, or the nearest one within bounds as torch has them."""
    if bounds is None:
        return number
    low, high = (int(x) if x.is_Integer else None for x in (bounds.lower, bounds.upper))
    return max(number if high is None else min(number, high), low or 0)


def sizes_of(program: ExportedProgram) -> dict[str, tuple[Any, ...]]:
    """The shape of each input that is a tensor; some sizes symbolic."""
    found = traced_inputs(program)
    return {name: tuple(v.shape) for name, v in found if isinstance(v, torch.Tensor)}


def symbols_of(size: Any) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def solved(size: Any, number: int) -> tuple[str, int] | None:
    """The number of the one symbol in a size that is linear in it, as `2*rows` is; None where it
    has none, or several, or no whole number gives the size."""
    if len(symbols := symbols_of(size)) != 1:
        return None
    (symbol,) = symbols
    expression = size.node.expr
    least, step = expression.subs(symbol, 0), expression.coeff(symbol, 1)
    linear = step.is_Integer and expression == step * symbol + least
    if not linear or (number - least) % step:
        return None
    return symbol.name, int((number - least) / step)


def places_of(shapes: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """The axes of inputs that each symbol is the size of: `x.0`."""
    found: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for i, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr.name, []).append(f"{name}.{i}")
    return found


def names_of_dims(program: ExportedProgram) -> dict[str, str]:
    """What each symbol's `Dim` is called, which a live program knows by where its sizes come
    from; torch.export.save does not write it down."""
    for _, value in traced_inputs(program):
        if isinstance(value, torch._subclasses.FakeTensor) and value.fake_mode.shape_env:
            env = value.fake_mode.shape_env
            names = {s: env.source_name_to_debug_name.get(s, s) for s in env.source_to_var}
            sizes = {names[s]: env.replace(var) for s, var in env.source_to_var.items()}
            return {
                n.name: name for name, n in sizes.items() if n.is_Symbol and name.isidentifier()
            }
    return {}
