"""What follows from a record that never changes, computed once and kept with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Generic, Self, TypeVar, overload

from gpuir.ir.sizes import is_recorded

T = TypeVar("T")
Owner = TypeVar("Owner")


class lazy(Generic[T]):
    """As `functools.cached_property`, without the lock that Python 3.11 takes for each: graphs have
    hundreds of thousands of ops."""

    def __init__(self, compute: Callable[[Any], T]):
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: object | None, kind: type) -> T | Self:
        if owner is None:
            return self
        found = owner.__dict__[self.name] = self.compute(owner)
        return found


def remembered(most: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """As `functools.lru_cache`, of so many calls. While conditions on sizes are recorded nothing is
    looked up: what was kept came with conditions of its own."""

    def keeping(compute: Callable[..., T]) -> Callable[..., T]:
        kept = lru_cache(most)(compute)

        @wraps(compute)
        def call(*args: Any, **named: Any) -> T:
            return compute(*args, **named) if is_recorded() else kept(*args, **named)

        return call

    return keeping


def once(compute: Callable[[Owner], T]) -> Callable[[Owner], T]:
    """As `lazy`, of what a room says of records that belong to a room below it."""
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def of(owner: Owner) -> T:
        kept = owner.__dict__
        if name not in kept:
            kept[name] = compute(owner)
        return kept[name]

    return of
