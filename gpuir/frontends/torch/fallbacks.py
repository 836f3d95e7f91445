"""Which of a model's kernels are not there: transformers then runs plain PyTorch in their place, of
hundreds of launches, and that is what is exported.

Nothing here goes by the name of a model. A function stands in for a kernel if transformers'
decorator says so (`use_kernel_func_from_hub_with_fallback`, integrations/hub_kernels.py: what it
wraps keeps the kernel's name and package), or if the code of a model's file names something that
its file holds None for (`causal_conv1d_fn, causal_conv1d_update = None, None`, `rwkv_cuda_kernel =
None`), which is how a package that is not installed looks. So does a module stand in for another's
if the file defines its class where `is_..._available()` is false, and imports or derives it where
it is true.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import getsource
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from gpuir.frontends.torch.masks import Change, replaced

SAID = "transformers' plain PyTorch is what is timed, kernel by kernel"


class PlainPyTorch(NamedTuple):
    """A function in plain PyTorch, and the kernel that it stands in for."""

    name: str
    kernel: str

    def __str__(self) -> str:
        return f"{self.name} (in place of {self.kernel})"


_HEARD: ContextVar[dict[PlainPyTorch, None] | None] = ContextVar("heard", default=None)


def hear(function: Callable[..., Any]) -> None:
    """Notes that a function runs, if it stands in for a kernel."""
    found, called = fallback_of(function), _HEARD.get()
    if found is not None and called is not None:
        called[found] = None


@contextmanager
def heard(model: torch.nn.Module | None) -> Generator[list[str]]:
    """What is to be said of the fallbacks that run in the block, at its end."""
    said: list[str] = []
    called: dict[PlainPyTorch, None] = {}
    before = _HEARD.set(called)
    try:
        files = _files(model) if model is not None else []
        with replaced([change for file in files for change in _listening(file)]):
            yield said
        kinds = {type(m) for m in model.modules()} if model is not None else set[type[Any]]()
        for kind in kinds:
            called.update(dict.fromkeys(_of_methods(kind)))
        for file in files:
            called.update((x, None) for x in _of_classes(file) if vars(file).get(x.name) in kinds)
        if called:
            said.append(f"{', '.join(sorted(map(str, called)))}: {SAID}")
    finally:
        _HEARD.reset(before)


def _files(model: torch.nn.Module) -> list[ModuleType]:
    """The files of transformers' models that a model's modules come from."""
    names = {type(m).__module__ for m in model.modules()}
    return [sys.modules[name] for name in sorted(names) if _is_of_model(name)]


def _is_of_model(name: str) -> bool:
    return name.startswith("transformers.models.") and name in sys.modules


def _listening(file: ModuleType) -> Iterator[Change]:
    """Functions of a file that stand in for kernels, made to say so when they run."""
    for name, function in vars(file).items():
        own = isinstance(function, FunctionType) and function.__module__ == file.__name__
        if own and fallback_of(function) is not None:
            yield file, name, _telling(function)


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def tells(*args: Any, **kwargs: Any) -> Any:
        hear(function)
        return function(*args, **kwargs)

    return tells


def fallback_of(function: Callable[..., Any]) -> PlainPyTorch | None:
    """What a function stands in for, if it does."""
    while isinstance(function, partial):
        function = function.args[0]
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not isinstance(function, FunctionType):
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells if name in _DECORATOR}
    if around.keys() == _DECORATOR:
        own = around["torch_function"].__name__
        return PlainPyTorch(own, _kernel(around["func_name"], around["package"]))
    missing = _missing(code, function.__globals__)
    return PlainPyTorch(function.__name__, " and ".join(missing)) if missing else None


_DECORATOR = {"func_name", "package", "torch_function"}


def _kernel(name: str, package: str) -> str:
    return f"{name} of {package}"


def _missing(code: CodeType, names: dict[str, Any]) -> list[str]:
    """The names of a file that code reads, and that the file has nothing for."""
    inside = (c for c in code.co_consts if isinstance(c, CodeType))
    found = [n for n in code.co_names if n in names and names[n] is None]
    return list(dict.fromkeys([*found, *(n for c in inside for n in _missing(c, names))]))


def _of_methods(kind: type[Any]) -> Iterator[PlainPyTorch]:
    """The methods that a module's forward goes through and that read what is not there."""
    if not _is_of_model(kind.__module__):
        return
    todo, seen = ["forward"], set[str]()
    while todo:
        name = todo.pop()
        method = vars(kind).get(name)
        if name in seen or not isinstance(method, FunctionType):
            continue
        seen.add(name)
        todo += method.__code__.co_names
        if missing := _missing(method.__code__, method.__globals__):
            yield PlainPyTorch(f"{kind.__name__}.{name}", " and ".join(missing))


def _of_classes(file: ModuleType) -> Iterator[PlainPyTorch]:
    """The classes that a file defines because a package is not there."""
    if not any(_AVAILABLE.fullmatch(name) for name in vars(file)):
        return
    try:
        body = ast.parse(getsource(file)).body
    except (OSError, SyntaxError):
        return
    for part in body:
        match part:
            case ast.If(test=ast.Call(func=ast.Name(id=name))) if found := _AVAILABLE.fullmatch(
                name
            ):
                if not vars(file)[name]():
                    there = _bound(part.body)
                    yield from (
                        PlainPyTorch(n, f"{n} of {found[1]}") for n in _bound(part.orelse) & there
                    )
            case _:
                pass


_AVAILABLE = re.compile(r"is_(\w+)_available")


def _bound(body: list[ast.stmt]) -> set[str]:
    """The classes, functions and imports of a block, by name."""
    found: set[str] = set()
    for part in body:
        match part:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.ImportFrom(names=names):
                found |= {x.asname or x.name for x in names}
            case _:
                pass
    return found
