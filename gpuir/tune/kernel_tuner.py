"""Kernel Tuner: what to choose from as its parameters, and a strategy that visits in predicted
order.

    found = choices_of(template, launch, "a100")
    results, _ = kernel_tuner.tune_kernel(
        "gemm", source, size, args, parameters(found), restrictions=[allows(found)],
        strategy=strategy(found), strategy_options={"max_fevals": 100})
    print(gpuir.show(best(results, found)))

Kernel Tuner: van Werkhoven, FGCS 90 (2019); Apache-2.0 licence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from gpuir.ir.door import FLAG, NUMBER, TEXT, ArgumentKind, many, named, takes, whole
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Schedule
from gpuir.tune.choices import CHOICES, Choices

FAILED = 1e300  # Kernel Tuner gives the largest float for a configuration that does not run


@takes(found=CHOICES)
def parameters(found: Choices) -> dict[str, list[int]]:
    """Kernel Tuner's `tune_params`."""
    return dict(found.parameters)


@takes(found=CHOICES)
def allows(found: Choices) -> Callable[..., bool]:
    """A restriction: whether values of the parameters are one of the configurations."""

    def is_allowed(*given: Any) -> bool:
        # Kernel Tuner gives a mapping to a restriction that stands alone, else each value in order
        return (
            found.find(given[0] if len(given) == 1 else dict(zip(found.names, given))) is not None
        )

    return is_allowed


@takes(found=CHOICES, share=NUMBER, learns=FLAG, seed=whole())
def strategy(
    found: Choices, *, share: float = 0.1, learns: bool = True, seed: int | None = None
) -> Any:
    """A strategy for `tune_kernel(..., strategy=...)` that visits what is predicted to be fastest
    first, and in a `share` of its visits any other.

    With `learns`, each measurement corrects the predictions of what is like it. It goes on until
    Kernel Tuner's budget (`strategy_options={"max_fevals": 100}`) is spent, or all were visited.
    The objective must be one of time.
    """
    if not 0.0 <= share <= 1.0:
        raise UsageError(
            "the share of random visits is out of range", expected="0 to 1", found=str(share)
        )
    wrapper = _wrapper()

    class Predicted(wrapper.OptAlg):  # pyright: ignore[reportUntypedBaseClass]
        def __call__(self, func: Any, searchspace: Any) -> tuple[tuple[int, ...], float]:
            names = tuple(searchspace.tune_params)
            space = within(found, names, searchspace.list)
            chance = np.random.default_rng(seed)
            results: dict[int, float] = {}
            while (place := space.next(results, chance, share, learns)) is not None:
                values = space.values(place)
                cost = float(func(tuple(values[n] for n in names)))
                results[place] = cost if cost < FAILED else np.inf
            place = min(results, key=results.__getitem__)
            return tuple(space.values(place)[n] for n in names), results[place]

    return wrapper.OptAlgWrapper(Predicted())


def within(found: Choices, names: Sequence[str], rows: Sequence[Sequence[int]]) -> Choices:
    """The configurations that are in Kernel Tuner's search space too, which may be the smaller."""
    places = [found.find(dict(zip(names, row, strict=True))) for row in rows]
    strange = [row for row, place in zip(rows, places, strict=True) if place is None]
    if strange:
        raise UsageError(
            f"{len(strange)} configurations in the search space of Kernel "
            "Tuner do not belong to these choices",
            found=", ".join(f"{n}={v}" for n, v in zip(names, strange[0], strict=True)),
            fix="tune_kernel(..., tune_params=parameters(found), restrictions=[allows(found)])",
        )
    return found.only(sorted(p for p in places if p is not None))


@takes(results=many(named(ArgumentKind("anything", lambda x: True))), found=CHOICES, objective=TEXT)
def best(results: Sequence[Mapping[str, Any]], found: Choices, objective: str = "time") -> Schedule:
    """The fastest of `tune_kernel`'s results, as a schedule."""
    ran = [r for r in results if "__error__" not in r and isinstance(r.get(objective), int | float)]
    if not ran:
        raise UsageError(
            "no configuration ran",
            found=f"{len(results)} results, none with a number under {objective!r}",
            fix="look at their __error__; give the objective for which the kernel was tuned",
        )
    return found.schedule(min(ran, key=lambda r: r[objective]))


def _wrapper() -> Any:
    try:
        return import_module("kernel_tuner.strategies.wrapper")
    except ImportError as error:
        raise UsageError(
            "Kernel Tuner is not installed, or older than 1.5",
            found=str(error),
            fix="pip install 'gpuir[kernel-tuner]'",
        ) from error
