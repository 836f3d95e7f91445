"""What is wrong with degrees of parallelism that a user names, and which would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.passes.shard.shard import By, ShardPass
from gpuir.plan.parallel import MICROBATCH, Choice, ModelBounds, bases, divisors, space

RANKS = ("tp", "pp", "dp", "cp", "ep")
CUT: dict[str, By] = {"cp": "context", "ep": "expert"}

Degrees = Mapping[str, Sequence[int]]


def choices_of(
    g: Graph, model: ModelBounds, degrees: Degrees, recompute: Sequence[bool] = (False, True)
) -> list[Choice]:
    """The choices of `space` for a model; UsageError where there are none, or where the model has
    nothing to cut so, with the nearest degrees that would do."""
    found = list(space(model, degrees, recompute))
    if not found:
        raise _nothing(model, degrees)
    for name, by in CUT.items():
        wrong = [_cannot(g, n, by) for n in degrees.get(name, ())]
        if wrong and all(wrong):
            raise next(error for error in wrong if error is not None)
    return found


def left_out(model: ModelBounds, degrees: Degrees) -> Iterator[str]:
    """The degrees of which no plan can be, in words."""
    for name in RANKS:
        for n in degrees.get(name, ()):
            if model.gpus % n:
                yield f"--{name} {n} does not divide {model.gpus:,} GPUs, so it was not tried"


def _cannot(g: Graph, ranks: int, by: By) -> UsageError | None:
    """Why inputs or experts cannot be cut over so many ranks, if they cannot."""
    try:
        if ranks > 1:
            ShardPass(ranks, by).seeds(g)
    except UsageError as error:
        return error
    return None


def _nothing(model: ModelBounds, degrees: Degrees) -> UsageError:
    """Why there is no choice at all."""
    gpus = f"{model.gpus:,} GPUs"
    for name in RANKS:
        asked = degrees.get(name, ())
        if asked and all(model.gpus % n for n in asked):
            fits = divisors(model.gpus)
            below = max((d for d in fits if d < max(asked)), default=1)
            above = min((d for d in fits if d > max(asked)), default=below)
            return UsageError(
                f"--{name} {_listed(asked)} does not divide {gpus}",
                expected=f"a number that does: {_listed(fits)}",
                fix=" or ".join(f"--{name} {n}" for n in dict.fromkeys((below, above))),
            )
    given = {name: numbers for name, numbers in degrees.items() if name != "zero"}
    named = " ".join(f"--{name} {_listed(numbers)}" for name, numbers in given.items())
    fixes = [f"leave out --{name}" for name in given if _possible(model, degrees, name)]
    least = _least_batch(model, degrees)
    if least is None:
        return UsageError(
            "no combination of degrees uses all GPUs",
            expected=f"degrees with the product {model.gpus:,}",
            found=f"{gpus}, {named}",
            fix=" or ".join(fixes[:3]) or "fewer limits",
        )
    return UsageError(
        f"a batch of {model.batch:,} cannot be split like this",
        expected="a multiple of dp x ep x the microbatch of a rank, for example a "
        f"multiple of {least:,}",
        found=f"{gpus}, {named}" if named else gpus,
        fix=" or ".join((f"--dims batch={least * max(1, -(-model.batch // least))}", *fixes[:3])),
    )


def _possible(model: ModelBounds, degrees: Degrees, without: str) -> bool:
    rest = {name: numbers for name, numbers in degrees.items() if name != without}
    return next(space(model, rest), None) is not None


def _least_batch(model: ModelBounds, degrees: Degrees) -> int | None:
    """The smallest batch of which there is a choice; None where degrees do not go together."""
    sizes = degrees.get("microbatch") or MICROBATCH
    return min((p.dp * p.ep * n for p in bases(model, degrees) for n in sizes), default=None)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
