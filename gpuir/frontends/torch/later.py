"""Functions of large packages that a library imports for what hardly anybody calls."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def later(functions: Mapping[str, Sequence[str]]) -> Generator[None]:
    """Who imports these functions meanwhile, by the module that has them, gets others, which import
    the module when they are called. A module that is loaded already stays as it is, and who asks it
    for anything else gets that."""
    made = {name: _Later(name, own) for name, own in functions.items() if name not in sys.modules}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


class _Later(ModuleType):
    def __init__(self, name: str, functions: Sequence[str]):
        super().__init__(name)
        for function in functions:
            setattr(self, function, self._called(function))

    def _called(self, function: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            return getattr(self._module(), function)(*args, **named)

        return call

    def _module(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module(), name)
