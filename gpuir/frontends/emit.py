"""What every converter writes to: the emitter, and what is known while a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

import numpy as np

from gpuir.interp import NoMeaning, evaluate, to_numpy_dtype, to_type
from gpuir.ir.build import Builder, NameTable
from gpuir.ir.errors import GpuirError, ModelError
from gpuir.ir.graph import DEEPEST_CONTROL, Graph, Level, Loc, Node, Op, Value
from gpuir.ir.types import DType, TensorType
from gpuir.ops import tensor as t
from gpuir.plugins import blamed, find_added

INLINE = 16  # a known tensor of at most so many elements is a t.constant, a larger one a param


NEGLIGIBLE = 0.01  # share of the weights
SAME_NUMBERS = (t.Pointwise, t.Layout, t.Joining, t.Indexing)  # of a weight: it keeps its name
CACHED = 1 << 16  # bytes: known numbers up to so many are kept once computed
LARGEST_KNOWN = 1 << 26  # elements, and
HARDEST_KNOWN = 1 << 30  # flops, of what is computed to find a shape


MOST_SETTINGS = 64  # numbers or names in a list that an opaque op keeps, and
LONGEST_SETTING = 256  # characters of a text
LARGEST_SETTING = 1 << 64


class NumbersMissing(ModelError):
    """The numbers of a tensor cannot be read: its external file is absent or too short."""


class TooLarge(ModelError):
    """Known in principle, but too much to compute while loading."""


def settings(attributes: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """What an opaque op keeps of a model node's attributes: numbers, texts and short lists of them.
    Not a number (nan) is left out, which is equal to nothing, and so is all that is long."""
    found: list[tuple[str, Any]] = []
    for name, value in attributes:
        if isinstance(value, list | tuple):
            items = tuple(cast("Sequence[Any]", value))
            if len(items) <= MOST_SETTINGS and all(map(_is_setting, items)):
                found.append((name, items))
        elif _is_setting(value):
            found.append((name, value))
    return tuple(found)


def _is_setting(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= LONGEST_SETTING
    return type(value) in (bool, int, float) and value == value and abs(value) < LARGEST_SETTING


@dataclass(eq=False)
class Folded:
    """An op whose operands are all known, not computed yet. One that `spreads` gives one number
    throughout, as its operands hold."""

    op: Op
    operands: Mapping[Value, Const]
    locs: tuple[Loc, ...]
    spreads: bool = False

    def run(self, values: Mapping[Value, np.ndarray], limited: bool) -> tuple[np.ndarray, ...]:
        types = self.op.types()
        where = self.locs[0] if self.locs else ""
        if self.spreads:
            ones = {v: Value(v.name, v.type.with_shape(())) for v in values}
            numbers = {ones[v]: array[(0,) * array.ndim] for v, array in values.items()}
            is_layout = isinstance(self.op, t.Layout)
            y = (
                numbers.popitem()[1]
                if is_layout
                else evaluate(self.op.substitute(ones), numbers)[0]
            )
            return (np.broadcast_to(y, types[0].shape),)
        too_large = max(v.size for v in types) > LARGEST_KNOWN or self.op.flops() > HARDEST_KNOWN
        if limited and too_large:
            raise TooLarge("too large to compute at load time", where=where, found=str(types[0]))
        try:
            results = evaluate(self.op, values)
        except GpuirError as error:
            error.where = error.where or where
            raise
        for type, array in zip(types, results, strict=True):
            if array.shape != type.shape:
                found = str(list(array.shape))
                raise ModelError(
                    f"{self.op.name}: the computed result does not have the declared shape",
                    where=where,
                    expected=str(type),
                    found=found,
                )
        return results


@dataclass(eq=False)
class Const:
    """A tensor known at load time, computed when somebody asks: weights are not read otherwise.

    It comes from `compute`, or is result `index` of `folded`. One that is `stored` is a weight, as
    the model holds it. One that holds the numbers of another, its `origin`, is called as that is.
    One that is `sized` depends on a size that the user bound: no stack can compute it before it
    runs.
    """

    value: Value
    name: str  # of its own
    named: bool = False  # by the model
    compute: Callable[[], np.ndarray] | None = None
    folded: Folded | None = None
    index: int = 0
    cached: np.ndarray | None = None
    stored: bool = False
    uniform: bool = False  # one number throughout: a t.constant whatever its size
    sized: bool = False
    origin: Const | None = None

    @property
    def called(self) -> str:
        """Its name once placed."""
        return self.origin.name if self.origin else self.name

    def array(self, limited: bool = False) -> np.ndarray:
        """The numbers. `limited` refuses (`TooLarge`) what takes long to compute."""
        done: dict[Folded, tuple[np.ndarray, ...]] = {}
        stack = [self.folded] if self.cached is None and self.folded else []
        while stack:
            fold = stack[-1]
            waits = [c.folded for c in fold.operands.values() if c.folded and c.cached is None]
            waits = [f for f in waits if f not in done]
            if waits:
                stack += waits
            elif fold in done:
                stack.pop()
            else:
                values = {v: c._ready(done, limited) for v, c in fold.operands.items()}
                done[stack.pop()] = fold.run(values, limited)
        return self._ready(done, limited)

    def _ready(self, done: Mapping[Folded, tuple[np.ndarray, ...]], limited: bool) -> np.ndarray:
        if self.cached is not None:
            return self.cached
        if self.folded is not None:
            array = done[self.folded][self.index]
        else:
            assert self.compute is not None
            if limited and self.value.type.size > LARGEST_KNOWN and not self.uniform:
                raise TooLarge("too large to read at load time", found=str(self.value.type))
            array = self.compute()
        if array.nbytes <= CACHED:
            self.cached = array
        return array


def origin_of(operands: Iterable[Const]) -> Const | None:
    """The one weight, or known value with a name of the model's, that these come from; single
    numbers beside tensors do not count."""
    operands = list(operands)
    tensors = [c for c in operands if c.value.type.size > 1] or operands
    origins = {c.origin or (c if c.stored or c.named else None) for c in tensors}
    return origins.pop() if len(origins) == 1 else None


@dataclass
class Scope:
    """What is shared by the whole load: weights of the params made so far, what to report, and how
    unevenly routers are expected to choose experts (`t.Experts.skew`). `converters` are the user's
    own, by operator, `added` those found so far. What is being converted is
    `sized` if a known operand depends on a size that the user bound: its results do too. With
    `shaped` that is so of any operand: numbers that come from its shape do."""

    weights: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    folded: list[Loc] = field(default_factory=list)
    stored_bytes: int = 0  # of weights, as the model holds them
    computed: set[Value] = field(default_factory=set)  # params that are not as the model holds them
    expert_skew: float = 0.0
    converters: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Any])
    added: dict[str, Callable[..., Any] | None] = field(default_factory=dict[str, Any])
    sized: bool = False
    shaped: bool = False

    def converter(self, operator: str) -> Callable[..., Any] | None:
        """The user's converter of an operator that we have none for; None without one. What goes
        wrong in it is a PluginError."""
        if operator not in self.added:
            found = find_added(operator, self.converters, kind="converter", group="converters")
            self.added[operator] = found and guarded(found, operator)
        return self.added[operator]


def guarded(converter: Callable[..., Any], operator: str) -> Callable[..., Any]:
    @wraps(converter)
    def convert(node: Any, emit: Emitter) -> Any:
        with blamed(converter, f"the converter of {operator}"):
            return converter(node, emit)

    return convert


class Emitter:
    """Appends tensor ops to a graph; folds those whose operands are all known.

    Values given to and by it are ordinary `Value`s. One that is known at load time is not in the
    graph yet: it becomes a `t.constant` or a param when a real node first reads it. An emitter made
    with `inside` fills a region: it sees the outer known values, and other outer values become the
    region's captures. `RecursionError` where regions are more than `DEEPEST_CONTROL` deep: whoever
    loads a model says so.
    """

    def __init__(self, name: str, scope: Scope | None = None, inside: Emitter | None = None):
        self.names: NameTable = inside.names if inside else NameTable()
        self.builder = Builder(Level.graph, "" if inside else name, names=self.names)
        self.outer = inside
        self.depth: int = inside.depth + 1 if inside else 0
        if self.depth > DEEPEST_CONTROL:
            raise RecursionError
        self.scope = inside.scope if inside else scope or Scope()
        self.known: dict[Value, Const] = {}
        self.placed: dict[Value, Value] = {}  # known or captured value -> the value in this graph
        self.stored: dict[Value, Value] = {}  # the same, where it has to be in memory
        self.folds: dict[Op, tuple[Value, ...]] = {}  # what is folded already
        self.captures: list[Value] = []  # outer values this region reads, in order
        self.own: set[Value] = set()
        self.prefix = ""  # of the names of results that have no name of their own
        if inside:
            self.builder.locs, self.prefix = inside.builder.locs, inside.prefix

    def scratch(self) -> Emitter:
        """An emitter inside this one whose work is thrown away: it takes no names."""
        emit = Emitter("", inside=self)
        emit.names = NameTable(set(self.names.taken), dict(self.names.counts), set())
        emit.builder.names = emit.names
        return emit

    # -- making values

    def input(self, name: str, type: TensorType) -> Value:
        value = self.builder.input(name, type)
        self.own.add(value)
        return value

    def param(self, name: str, type: TensorType, compute: Callable[[], np.ndarray]) -> Value:
        """A weight that stays one: nothing computed from it alone is folded."""
        value = self.builder.param(name, type)
        self.scope.weights[value.name] = compute
        self.scope.stored_bytes += type.nbytes
        self.own.add(value)
        return value

    def weight(
        self, type: TensorType, compute: Callable[[], np.ndarray], name: str = "const"
    ) -> Value:
        """A known value that the model itself holds."""
        self.scope.stored_bytes += type.nbytes
        return self._know(type, name, compute=compute, stored=True)

    def constant(self, array: Any, dtype: DType | None = None, name: str = "const") -> Value:
        """A known value from numbers: `constant([2, 3], i64)`."""
        array = np.asarray(array) if dtype is None else np.asarray(array, to_numpy_dtype(dtype))
        return self.lazy(
            TensorType(array.shape, dtype or to_type(array).dtype), lambda: array, name
        )

    def lazy(
        self,
        type: TensorType,
        compute: Callable[[], np.ndarray],
        name: str = "const",
        origin: Const | None = None,
    ) -> Value:
        """A known value of this type, computed only if its numbers are needed; `origin` is the
        known one that they are, otherwise stored."""
        return self._know(type, name, compute=compute, origin=origin and origin_of([origin]))

    def _know(self, type: TensorType, name: str, **how: Any) -> Value:
        value = Value(self.names.fresh("\0" + name), type)
        name = f"{self.prefix}/{name}" if self.prefix else name
        how.setdefault("sized", self.scope.shaped)
        self.known[value] = Const(value, name, **how)
        return value

    def fill(self, number: Any, type: TensorType, name: str = "fill") -> Value:
        """A known value that holds one number throughout, and takes no memory for it."""
        one = np.asarray(number, to_numpy_dtype(type.dtype)).reshape(())
        value = self.lazy(type, lambda: np.broadcast_to(one, type.shape), name)
        self.known[value].uniform = True
        return value

    def __call__(self, op: Op, name: str = "", fold: bool = True) -> Value:
        return self.add(op, (name,) if name else (), fold)[0]

    def map(self, fn: str, *args: Any) -> Value:
        """The scalar function `fn` of values; the numbers behind them are immediates."""
        count = next((i for i, x in enumerate(args) if not isinstance(x, Value)), len(args))
        return self(t.Map(fn, args[:count], args[count:]))

    def add(self, op: Op, names: Sequence[str] = (), fold: bool = True) -> tuple[Value, ...]:
        """Appends `op`, or folds it when every operand is known (unless `fold` is off: for
        dequantised weights, which stay quantised in memory)."""
        if isinstance(op, t.Map):
            op = self._immediates(op)
        if fold and not op.control and all(self.const_of(v) is not None for v in op.operands):
            return self._fold(op, names)
        stored = op.contraction or op.control
        placed = {v: self.place(v, stored) for v in op.operands}
        if not names and self.prefix:
            names = (f"{self.prefix}/{op.name[2:]}",) * len(op.result_types)
        results = self.builder.add(op.substitute(placed), names)
        self.own.update(results)
        return results

    def name_results(
        self, start: int, results: Sequence[Any], wishes: Sequence[str]
    ) -> tuple[Any, ...]:
        """The results under the names wished for: those made since node `start`, or known ones not
        yet placed. What merely passes through keeps the name it has. What holds several values has
        them by their new names (`renamed`)."""
        made = {v for node in self.builder.nodes[start:] for v in node.results}
        renamed: dict[Value, Value] = {}
        for value, wish in zip(results, wishes, strict=False):
            if not isinstance(value, Value) or not wish:
                continue
            if value in made and value not in renamed:
                renamed[value] = Value(self.names.claim(wish), value.type)
            elif (const := self.known.get(value)) is not None and not const.named:
                const.name, const.named = wish, True
        if renamed:
            self.builder.rename(start, renamed)
            self.own.update(renamed.values())

        def called(v: Any) -> Any:
            return v and (renamed.get(v, v) if isinstance(v, Value) else v.renamed(renamed))

        return tuple(map(called, results))

    def keep(self, names: Iterable[str]) -> None:
        """Sets the model's own names aside for the values that bear them."""
        self.names.keep(names)

    def put(self, op: Op, name: str) -> Value:
        """Appends an op as it is, its result under the model's own name."""
        value = Value(self.names.claim(name), op.result_types[0])
        self.builder.put(Node(op, (value,), self.builder.locs))
        self.own.add(value)
        return value

    def rename(self, value: Value, name: str) -> Value:
        """The value as it will be called: under the model's own name."""
        return Value(self.names.claim(name), value.type)

    # -- known values

    def const_of(self, value: Value) -> Const | None:
        scope: Emitter | None = self
        while scope is not None:
            if value in scope.known:
                return scope.known[value]
            scope = scope.outer
        return None

    def array_of(self, value: Value) -> np.ndarray | None:
        """The numbers of a value where they are known, and can be had."""
        const = self.const_of(value)
        try:
            return None if const is None else const.array(limited=True)
        except (NumbersMissing, TooLarge, NoMeaning):
            return None

    def numbers_of(self, value: Value) -> np.ndarray | None:
        """The same of a param too, which is read."""
        compute = self.scope.weights.get(value.name)
        if compute is None or self.const_of(value) is not None:
            return self.array_of(value)
        try:
            return compute()
        except NumbersMissing:
            return None

    def _folded(self, op: Op) -> tuple[Value, ...] | None:
        """The known values that the same op on the same operands gave before."""
        scope: Emitter | None = self
        while scope is not None:
            if op in scope.folds:
                return scope.folds[op]
            scope = scope.outer
        return None

    def _fold(self, op: Op, names: Sequence[str]) -> tuple[Value, ...]:
        if (before := self._folded(op)) is not None:
            self.scope.folded += self.builder.locs
            return before
        operands = {v: c for v in op.operands if (c := self.const_of(v)) is not None}
        types = op.result_types
        self.scope.folded += self.builder.locs
        consts = operands.values()
        is_layout = isinstance(op, t.Layout) and not isinstance(op, t.Parts)
        same = is_layout or (isinstance(op, t.Pointwise) and any(c.uniform for c in consts))
        one = all(c.uniform or c.value.type.size == 1 for c in consts)
        spreads = same and one and all(v.size > 0 for v in types)
        folded = Folded(op, operands, self.builder.locs, spreads)
        sized = self.scope.sized or any(c.sized for c in consts)
        origin = origin_of(consts) if isinstance(op, SAME_NUMBERS) else None
        self.folds[op] = tuple(
            self._know(
                type,
                names[i] if i < len(names) else op.name[2:],
                folded=folded,
                index=i,
                uniform=spreads,
                sized=sized,
                origin=origin,
            )
            for i, type in enumerate(types)
        )
        return self.folds[op]

    def _immediates(self, op: t.Map) -> t.Map:
        """t.map(fn, [x, c])  →  t.map(fn, [x], [c])  where c is one known number that does not
        widen the result."""
        args, imm = list(op.args), list(op.imm)
        while len(args) > 1:
            last, rest = args[-1], args[:-1]
            if last.type.size != 1 or op.fn == "where":
                break
            if all(self.const_of(v) is not None for v in rest):
                break
            array = self.array_of(last)
            if array is None:
                break
            shape = t.broadcast(*(v.type.shape for v in rest))
            if t.broadcast(shape, last.type.shape) != shape or not is_real(array):
                break
            args.pop()
            imm.insert(0, np.real(array).reshape(()).item())
        return t.Map(op.fn, tuple(args), tuple(imm))

    def is_model_input(self, value: Value) -> bool:
        """Whether `value` is an input of the model itself: its numbers can be asked for."""
        root = self
        while root.outer is not None:
            root = root.outer
        return root.builder.is_input(value)

    def place(self, value: Value, stored: bool = False) -> Value:
        """The value as nodes of this graph read it: a known one becomes a constant or, always where
        it is read from memory (`stored`), a param, or the nodes that make it where a size decides
        what it holds; one of an outer graph a capture."""
        if value in self.own:
            return value
        placed = self.stored if stored else self.placed
        if value in placed:
            return placed[value]
        const = self.const_of(value)
        if const is not None:
            here = self._place_known(const, stored)
        else:
            if self.outer is None:
                raise AssertionError(f"%{value.name} belongs to no scope")
            self.captures.append(value)
            here = self.builder.capture(value)
        placed[value] = here
        if not isinstance(self.builder.producer(here), t.Constant):
            self.placed[value] = self.stored[value] = here
        self.own.add(here)
        return here

    def _place_known(self, const: Const, stored: bool) -> Value:
        value = const.value
        if not stored and (data := self._inline(const)) is not None:
            return self.put(t.Constant(value.type, data), const.called)
        if self.outer is not None:
            self.outer.known.setdefault(value, const)  # folded in here, a param out there
            outside = self.outer.place(value, stored)
            self.captures.append(outside)
            return self.builder.capture(outside)
        if self._unfolds(const):
            return self._unfold(const)
        here = self.builder.param(const.called, value.type)
        if const.uniform:  # a first state of zeros is nothing to train
            self.builder.roles[here.name] = "activation"
        elif not const.stored:
            self.scope.computed.add(here)
        self.scope.weights[here.name] = const.array
        return here

    def _unfolds(self, const: Const) -> bool:
        """Whether a value is made by nodes when the model runs: its numbers depend on a size that
        the user bound, and are too many for a t.constant."""
        return const.sized and const.folded is not None and self._inline(const) is None

    def _unfold(self, const: Const) -> Value:
        """Appends the nodes that make a value, and before them those of what they read."""
        stack = [const]
        while stack:
            fold = cast(Folded, stack[-1].folded)
            reads = [(v, c) for v, c in fold.operands.items() if v not in self.placed]
            waits = [c for _, c in reads if self._unfolds(c)]
            if waits:
                stack += waits
            elif (last := stack.pop()).value not in self.placed:
                self.known |= fold.operands
                self._run(last, fold)
        return self.placed[const.value]

    def _run(self, const: Const, fold: Folded) -> None:
        """Appends the node of a fold, for one of its results."""
        op = fold.op.substitute({v: self.place(v, fold.op.contraction) for v in fold.operands})
        names = [self.names.fresh(op.name[2:]) for _ in op.result_types[1:]]
        names.insert(const.index, self.names.claim(const.name))
        results = tuple(Value(name, type) for name, type in zip(names, op.result_types))
        self.builder.put(Node(op, results, fold.locs))
        self.own.update(results)
        self.placed[const.value] = self.stored[const.value] = results[const.index]

    def _inline(self, const: Const) -> tuple[Any, ...] | None:
        """The data of the t.constant this becomes; None when it becomes a param."""
        type = const.value.type
        if type.size > INLINE and not const.uniform:
            return None
        try:
            array = const.array(limited=True)
        except (NumbersMissing, TooLarge, NoMeaning):
            return None
        if const.uniform and array.size:
            array = array[(0,) * array.ndim]
        if not is_real(array):
            return None
        data = np.real(array).reshape(-1)
        if len(data) and all(x == data[0] for x in data):
            data = data[:1]
        return tuple(x.item() for x in data)

    def assume(self, text: str) -> None:
        """Something taken for granted, which the report must say."""
        self.scope.assumed.append(text)

    def finish(self, outputs: Iterable[Value], over: Iterable[Value | None] | None = None) -> Graph:
        """The whole program, with what was assumed on the way; `over` as in `Builder.finish`."""
        outputs = tuple(outputs)
        self._compare_weights(outputs)
        self.builder.assumed += self.scope.assumed
        return self.builder.finish(outputs, over)

    def _compare_weights(self, outputs: Sequence[Value]) -> None:
        """Says where the weights take more memory than the model holds: those computed when it is
        loaded are stored beside the others or in a wider dtype."""
        scope = self.scope
        read = {v for node in self.builder.nodes for v in node.op.operands} | set(outputs)
        computed = sorted(scope.computed & read, key=lambda v: (-v.type.nbytes, v.name))
        weights = (v for v in read if v.name in scope.weights and v.name not in self.builder.roles)
        held = sum(v.type.nbytes for v in weights)
        if not computed or held <= scope.stored_bytes * (1 + NEGLIGIBLE):
            return
        shown = [f"{v.name} {v.type.nbytes / 1e6:.3g} MB" for v in computed[:3]]
        more = f" and {len(computed) - 3} more" if len(computed) > 3 else ""
        self.assume(
            f"weights take {held / 1e6:.4g} MB, but {scope.stored_bytes / 1e6:.4g} MB "
            "in the model file, because some are computed at load time: "
            f"{', '.join(shown)}{more}"
        )


def is_real(array: np.ndarray) -> bool:
    """Whether none of its numbers has an imaginary part: what text can say."""
    return not np.imag(array).any() if array.dtype.kind == "c" else True


def nested_too_deep(name: str) -> ModelError:
    """The error for a model whose loops and branches, or calls, go too far down."""
    return ModelError(
        "the model is nested too deep",
        where=name,
        expected=f"at most {DEEPEST_CONTROL} loops and branches inside one another",
        fix="export the model with fewer levels of control flow",
    )


class UnknownValue(ModelError):
    """A result's shape depends on a tensor that is not known at load time."""

    def __init__(self, value: Value, what: str):
        super().__init__(
            what,
            expected="a value known at load time",
            found=f"%{value.name}: {value.type}, which is a model input or is computed at run time",
        )
        self.value = value


def names(values: Iterable[Value]) -> str:
    return ", ".join(f"%{v.name}" for v in values)
