"""Options that several commands take, and how their text is read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce, wraps
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import click

from gpuir.backends.table import FOLDERS, FORMATS
from gpuir.cli.output import check_ahead, check_binary, listen, warn
from gpuir.cli.request import ask, option

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import gpuir
    from gpuir.cli.modules import Loaded
    from gpuir.cost.table import Predictor
    from gpuir.ir.graph import Graph
    from gpuir.passes.manager import Pipeline
    from gpuir.run.keeping import ModelCache
    from gpuir.targets.prices import Price
    from gpuir.targets.target import Target

MOST_EXTENT = 1 << 40  # a tensor of as many bytes fits no device
MOST_RUNS = 100_000  # of one sweep: at some milliseconds each, minutes to an hour

F = TypeVar("F", bound=Callable[..., Any])


class Assignments(click.ParamType):  # type: ignore[type-arg]
    """`NAME=VALUE`, or several with commas between where `many`; the last `=` divides them."""

    def __init__(
        self, name: str, read: Callable[[str], Any], many: bool = False, between: str = ","
    ):
        self.name, self.read, self.many, self.between = name, read, many, between

    def get_metavar(self, param: Any = None, ctx: Any = None) -> str:
        return self.name

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[tuple[str, Any], ...]:
        if isinstance(value, tuple):
            return cast(tuple[tuple[str, Any], ...], value)
        found: list[tuple[str, Any]] = []
        texts: dict[str, str] = {}
        for part in re.split(self.between, value) if self.many else [value]:
            if not part.strip() and found:
                self.fail("nothing stands behind a comma: leave out spaces", param, ctx)
            name, equals, text = part.rpartition("=")
            if not equals or not name.strip():
                self.fail(f"{shorter(part)!r} is not like {self.name}", param, ctx)
            try:
                given = name.strip(), self.read(text.strip())
            except ValueError as error:
                why = f": {error}" if isinstance(error, NoExtent) else ""
                self.fail(f"{shorter(part)!r} is not like {self.name}{why}", param, ctx)
            before = texts.setdefault(given[0], text.strip())
            if dict(found).get(given[0], given[1]) != given[1]:
                self.fail(f"{given[0]} has two values: {before} and {text.strip()}", param, ctx)
            found.append(given)
        return tuple(found)


class NoExtent(ValueError):
    """Why a text is no extent."""


def extent(text: str) -> int:
    """How large a dimension is; UsageError beyond what any tensor has."""
    from gpuir.ir.errors import UsageError

    if text.isdecimal() and len(text.lstrip("0")) > len(str(MOST_EXTENT)):
        value = MOST_EXTENT + 1  # and Python turns no more than some thousand digits into a number
    else:
        value = whole(text)
    if value > MOST_EXTENT:
        raise UsageError(
            "an impossible size", expected=f"at most {MOST_EXTENT:,}", found=shorter(text)
        )
    if value < 0:
        raise NoExtent("it is below 0")
    return value


def whole(text: str) -> int:
    """A whole number; NoExtent says how to write one that is not written so."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = nan
    if number.is_integer() and abs(number) <= MOST_EXTENT:
        raise NoExtent(f"write {int(number)}")
    raise NoExtent("it has to be a whole number")


def shorter(text: str) -> str:
    """What was given, for a message."""
    return text if len(text) <= 60 else f"{text[:40]}... of {len(text):,} characters"


def shape(text: str) -> tuple[int, ...]:
    """`1x3x224x224`; `scalar` or nothing for rank 0."""
    return () if text in ("", "scalar") else tuple(map(extent, text.split("x")))


def numbers(text: str) -> tuple[float, ...]:
    """`1,2,3`; whole numbers stay whole."""
    return tuple(map(_number, text.split(","))) if text else ()


def _number(text: str) -> float:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return float(text)


class Finite(click.FloatRange):
    """A number within bounds; click takes nan to be within any."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{number} is no number to count with", param, ctx)
        return number


def sizes(text: str) -> tuple[int, ...]:
    """`1,2,4..100` → 1, 2, 4, 8, 16, 32, 64, 100."""
    return tuple(dict.fromkeys(n for part in text.split(",") for n in _doubled(part)))


def _doubled(part: str) -> Iterator[int]:
    first, dots, last = part.partition("..")
    n, end = extent(first), extent(last if dots else first)
    if n < 1 or end < n:
        raise ValueError
    while n < end:
        yield n
        n *= 2
    yield end


DIMS = Assignments("NAME=8,NAME=128", extent, many=True)
SIZES = Assignments(
    "NAME=8,NAME=128",
    lambda text: (extent(text),) if text.isdecimal() else sizes(text),
    many=True,
    between=r",(?=[^,]*=|\s*$)",
)
SHAPE = Assignments("NAME=1x3x224x224", shape)
NUMBERS = Assignments("NAME=1,2,3", numbers)
TRIPS = Assignments("NODE=10", extent)


class ByTable(click.ParamType):  # type: ignore[type-arg]
    """A distribution of indices for all tables, or `NAME=` one for those that a glob matches."""

    name = "SPREAD"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[tuple[str, str], ...]:
        if isinstance(value, tuple):
            return cast(tuple[tuple[str, str], ...], value)
        name, equals, text = value.partition("=")
        return ((name, text),) if equals and ":" not in name else (("*", value),)


INDICES = ByTable()
SETTING = Assignments("FIELD=NUMBER", str, many=True)
V = TypeVar("V")
Pairs = tuple[tuple[tuple[str, V], ...], ...]  # of each time that an option is given
# The options of a model that may be given several times, as `gpuir.load` calls them.
SEVERAL = {
    "dims": "dims",
    "inputs": "input",
    "values": "value",
    "trip_counts": "trip_count",
    "indices": "indices",
}


def merged(several: Pairs[V]) -> dict[str, V]:
    return dict(pair for pairs in several for pair in pairs)


def stacked(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda f: reduce(lambda g, decorate: decorate(g), reversed(decorators), f)


model = click.argument("model", type=click.Path())


class StackOptions(TypedDict):
    """The software that a model runs under."""

    profile: str | None
    tf32: bool | None


@dataclass(frozen=True)
class LoadingOptions:
    """What a model leaves open."""

    dims: Pairs[int] = option("Symbolic dimensions: batch=8,seq=128.", type=DIMS, multiple=True)
    task: str | None = option(
        "What a config's model does: causal-lm, masked-lm, image-cls, ... A wrong name lists all.",
    )
    dtype: str | None = option(
        "Data type of a config's or a function's model: f64, f32, f16, bf16.  [its own]"
    )
    attention: str | None = option("Attention of a config's model: sdpa or eager.  [sdpa]")
    phase: str | None = option("A step of generation by a config's model: prefill, decode.")
    past: int | None = option(
        "Tokens already in the cache when the phase begins.", type=click.IntRange(1)
    )
    cache_dtype: str | None = option(
        "Data type of the cached keys and values: f8e4m3, f16, bf16.  [the config's]"
    )
    mask: bool = option("Pass an attention mask to a config's model, as for padded inputs.")
    channels_last: bool = option("Store images of a torch program, weights and inputs, as NHWC.")
    input: Pairs[tuple[int, ...]] = option(
        "Shape of an input: x=1x3x224x224.", type=SHAPE, multiple=True
    )
    value: Pairs[tuple[float, ...]] = option(
        "Values of a tensor that shapes depend on: lengths=1,2,3.", type=NUMBERS, multiple=True
    )
    trip_count: Pairs[int] = option("How often a loop runs: NODE=10.", type=TRIPS, multiple=True)
    expert_skew: float = option(
        "How unevenly routers choose experts: exponent of a power law.  [0: evenly]",
        type=Finite(0),
        default=0.0,
    )
    indices: Pairs[str] = option(
        "Which rows of embedding tables are read: zipf:1.05, FILE.csv, or by table "
        "NAME=zipf:1.05.  [uniform]",
        type=INDICES,
        multiple=True,
        metavar="SPREAD",
    )
    autocast: str | None = option("Mixed precision: bf16 or f16, with f32 weights.")
    fast_norms: bool = option("Autocast runs layer and group norms in half precision too.")
    fp16: bool = option(
        "Run an f32 model in half precision, its inputs and outputs in f32: as `trtexec --fp16`."
    )
    int8: bool = option(
        "With --fp16, convolutions and products with weights on integers of 8 bits, as a quantiser "
        "writes them: as `trtexec --int8 --fp16`."
    )
    fp8: bool = option("The same in floats of 8 bits (e4m3).")
    weights: str | None = option(
        "Keep weights in f32, f16 or bf16, and cast them where they are read."
    )
    train: bool = option("A training step: forward, loss, backward.")
    recipe: str | None = option(
        "How a framework trains: megatron-bf16, llm-foundry-bf16, my.toml. It gives what you do "
        "not: options of a step, --dtype, --profile."
    )
    autodiff: str | None = option(
        "Who derives the backward pass: torch or gpuir. Autocast needs gpuir.  [torch for "
        "PyTorch programs]",
    )
    loss: str | None = option("The output to differentiate.  [the first float one]")
    optimizer: str | None = option("Include the optimizer's step: sgd, adam, adamw.")
    fused: bool = option("The optimizer runs in fused kernels.")
    clip: float | None = option(
        "Clip the norm of all gradients to this, before the optimizer's step.", type=float
    )
    accumulate: bool = option("Add gradients to those of earlier batches.")
    checkpoint: str | None = option("Recompute modules in backward: a glob of paths, or every=2.")
    strict: bool = option("Stop if gpuir does not model an operator.")
    no_cache: bool = option("Load the model anew, and keep nothing of it (`gpuir cache`).")

    def options(self, loaded: Loaded) -> gpuir.LoadOptions:
        """As `gpuir.load` takes them; options of several flags are merged."""
        how = {f.name: getattr(self, f.name) for f in fields(self)}
        del how["no_cache"]
        how |= {name: merged(how.pop(own)) for name, own in SEVERAL.items()}
        how |= {"clip": self.clip or 0.0, "converters": loaded.converters}
        return cast("gpuir.LoadOptions", how)

    def kept(self, loaded: Loaded, joins: bool = True) -> AbstractContextManager[ModelCache | None]:
        """The models that were loaded before, with what `joins` says there; None where they are not
        to be used."""
        from contextlib import nullcontext

        from gpuir.run.keeping import ModelCache, cache_path

        watched = logging.getLogger("gpuir.passes").isEnabledFor(logging.DEBUG)  # --verbose
        if self.no_cache or watched or loaded.passes or loaded.converters or not cache_path():
            return nullcontext()
        return ModelCache(cache_path(), joins)

    def load(
        self,
        model: str,
        loaded: Loaded,
        warn: Callable[[str], None],
        how: gpuir.LoadOptions | None = None,
        joins: bool = True,
        **stack: Any,
    ) -> Graph:
        """The model with these options, or with `how` in their place, under a stack; from where it
        is `kept`, if it was loaded before."""
        import gpuir

        own = self.options(loaded) if how is None else how
        with self.kept(loaded, joins) as kept:
            return (kept or gpuir).load(model, warn=warn, **stack, **own)

    @property
    def batch(self) -> int | None:
        """The extent of the one dimension that is called a batch."""
        return batch(merged(self.dims))

    def sized(self, *sizes: tuple[str, int]) -> LoadingOptions:
        """With more dimensions."""
        return replace(self, dims=(*self.dims, sizes))


def with_size(how: gpuir.LoadOptions, **sizes: int) -> gpuir.LoadOptions:
    """The options with more dimensions; the tokens behind which a config's phase begins are one."""
    found = how.copy()
    if how.get("phase") and "past" in sizes:
        found["past"] = sizes.pop("past")
    found["dims"] = {**how.get("dims", {}), **sizes}
    return found


def given_size(how: gpuir.LoadOptions, name: str) -> str:
    """The option that gives a dimension one size already; empty where none does."""
    if name in how.get("dims", {}):
        return "--dims"
    return "--past" if name == "past" and how.get("past") else ""


def profile(f: F) -> F:
    """The software that a model runs under, the floats of its products and the machine: `profile`
    names them all."""

    @wraps(f)
    def named(**given: Any) -> Any:
        products, host = given.pop("products"), given.pop("host")
        more = (products and f"+products={products}") or ""
        more += f"+host={host}" if host is not None else ""
        if more:
            names = split_names(given["profile"]) or [""]
            given["profile"] = ",".join(f"{name}{more}" for name in names)
        return f(**given)

    return stacked(
        click.option(
            "--profile",
            help="The software it runs under: eager, compiled, ort; `gpuir profiles` lists them.",
            shell_complete=completed("profile"),
        ),
        click.option(
            "--products",
            type=click.Choice(("fp8", "mxfp8")),
            help="Run products within layers in 8-bit floats, as Transformer Engine does.",
        ),
        click.option(
            "--host",
            help="The machine that launches its kernels: dgx-1, my.toml; `gpuir hosts` lists them."
            "  [the target's usual one]",
        ),
    )(cast(F, named))


price = click.option(
    "--price",
    type=Assignments("a100=2.5", float, many=True),
    multiple=True,
    help="US dollars an hour of a GPU, in place of the list price.",
)


NO_LIMIT = "1e5"  # watts, which no board draws


@dataclass(frozen=True)
class Costing:
    """How kernels are made, tiled and costed. `profile` names the software and the machine."""

    settings: Pairs[str] = option(
        "Change numbers of the target, in SI units: sms=120,dram.bytes_per_s=2e12.",
        "--set",
        type=SETTING,
        multiple=True,
    )
    power_limit: float | None = option(
        "Watts that the board is held to, in place of its own limit.",
        type=click.FloatRange(min=1, max=1e5),
        metavar="WATTS",
    )
    clocks: str = option(
        "The clock: what the power limit sustains over minutes, or what a board holds for a short "
        "burst, as one kernel is timed: its boost clock, whatever it draws.",
        type=click.Choice(["sustained", "burst"]),
        default="sustained",
    )
    predictor: str = option("What predicts the time of a kernel.", default="tile")
    schedule: str = option(
        "Tiles to use for the kernels that this file names.", type=click.Path(), default=""
    )
    profile: str | None = ask(profile)
    tf32: bool | None = option(
        "Let f32 products run on the matrix units, or not.  [as the profile has it]",
        "--tf32/--no-tf32",
        default=None,
    )
    pipeline: str = option("Passes to run instead of the profile's.", default="")
    cluster: str | None = option(
        "The cluster for `shard` in --pipeline: dgx-h100, 8xh100-sxm, my.toml; `gpuir clusters` "
        "lists them. Its GPU is the target."
    )

    def stack(self, loaded: Loaded) -> StackOptions:
        """The one software stack that is asked for, as functions of gpuir take it."""
        profile = loaded.profile(self.profile) if self.profile else None
        return {"profile": profile, "tf32": self.tf32}

    def passes(self, loaded: Loaded) -> Pipeline | None:
        """The passes that `--pipeline` names, if it does."""
        return pipeline_of(self.pipeline, loaded)

    def predicts(self, loaded: Loaded) -> str | Predictor:
        """The predictor: a function of the user's, or the name of one of ours."""
        from gpuir.cost.table import find_predictor

        found = find_predictor(self.predictor, loaded.predictors)
        return found if self.predictor.partition("@")[0] in loaded.predictors else self.predictor

    @property
    def changes(self) -> Pairs[str]:
        """What the target's numbers are changed to."""
        from gpuir.ir.errors import UsageError

        if self.clocks == "burst":
            if self.power_limit is not None:
                raise UsageError(
                    "--clocks burst has no power limit", fix="leave out --clocks or --power-limit"
                )
            return (*self.settings, (("tdp_w", NO_LIMIT),))
        if self.power_limit is None:
            return self.settings
        return (*self.settings, (("tdp_w", f"{self.power_limit:g}"),))

    def on(self, target: str) -> str:
        """A target's name with the numbers that are changed behind it."""
        return with_settings(target, self.changes)


@dataclass(frozen=True)
class ModelRun:
    """A model, on each of some targets, under each of some stacks."""

    model: str
    target: str | None
    loading: LoadingOptions
    costing: Costing
    loaded: Loaded

    @property
    def targets(self) -> list[str]:
        """The names of the targets: without any, that of the one GPU of a cluster."""
        import gpuir

        cluster = self.costing.cluster
        named = self.target or (gpuir.load_cluster(cluster).only_gpu if cluster else None)
        return [self.costing.on(self.loaded.target(name)) for name in split_targets(named)]


class Runs:
    """A request for such runs."""

    model: str
    target: str | None
    loading: LoadingOptions
    costing: Costing
    loaded: Loaded

    @property
    def run(self) -> ModelRun:
        return ModelRun(self.model, self.target, self.loading, self.costing, self.loaded)


def load_modules(f: F) -> F:
    """The user's modules, which the command gets as `loaded`."""

    @wraps(f)
    def named(**given: Any) -> Any:
        from gpuir.cli.modules import load_modules

        loaded = load_modules(given.pop("modules"))
        return f(**given, loaded=loaded)

    text = "A module, or a .py file, with passes, predictors, targets or backends of your own."
    option = click.option("--load", "modules", multiple=True, metavar="MODULE", help=text)
    return cast(F, option(named))


def _say_more(_: click.Context, __: click.Parameter, wanted: bool) -> bool:
    if wanted:
        listen(logging.DEBUG)
    return wanted


verbose = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    callback=_say_more,
    help="Show on stderr what each pass made, and how long it took.",
)
Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def completed(kind: str) -> Complete:
    """Completes the last of some names of a kind: "target", "profile", "host", "cluster"."""

    def complete(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
        import gpuir

        before, comma, last = typed.rpartition(",")
        names = getattr(gpuir, f"{kind}_names")()
        return [before + comma + name for name in names if name.startswith(last)]

    return complete


def target(help: str = "The GPU. `gpuir targets` lists them.") -> Callable[[F], F]:
    return click.option("--target", help=help, shell_complete=completed("target"))


targets = target("A GPU, several (a100,l4), or all. `gpuir targets` lists them.")
MOST_S = 7 * 86400  # of a budget: a week
SEED = click.IntRange(0, 2**32 - 1)  # what numpy and torch both take
width = click.option(
    "--width", type=click.IntRange(40), help="Columns of the table.  [the terminal's]"
)


def renamed(_: click.Context, __: click.Parameter, format: str) -> str:
    """The name of a format: `table` is an older one of `text`."""
    return "text" if format == "table" else format


def formats(others: Sequence[str] = (), help: str | None = None) -> Callable[[F], F]:
    """How the answer is written: as every command can, or in a form of this command's own."""
    names = (*FORMATS, *others)
    return click.option(
        "--format",
        type=click.Choice([*names, "table"]),
        callback=renamed,
        default="text",
        show_default=True,
        metavar=f"[{'|'.join(names)}]",
        help=help,
    )


def as_json(f: F) -> F:
    """`--json` is short for `--format json`."""

    @wraps(f)
    def named(**given: Any) -> Any:
        if given.pop("as_json"):
            given["format"] = "json"
        return f(**given)

    text = "Short for --format json."
    return cast(F, click.option("--json", "as_json", is_flag=True, help=text)(named))


def output(f: F) -> F:
    """Where the result goes; that it cannot go there is said before the work."""

    @wraps(f)
    def checked(**given: Any) -> Any:
        check_ahead(given["output"], folder=given.get("format") in FOLDERS)
        check_binary(given.get("format"), given["output"])
        return f(**given)

    text = "Write to this file, all of it or nothing."
    return cast(F, click.option("-o", "--output", type=click.Path(), help=text)(checked))


def pipeline_of(text: str, loaded: Loaded) -> Pipeline | None:
    import gpuir

    if not text.strip():
        return None
    return gpuir.pipeline(text, loaded.passes, loaded.predictors, loaded.targets)


def with_settings(target: str, settings: Pairs[str]) -> str:
    """A target's name with the numbers of `--set` behind it."""
    return "+".join((target, *(f"{name}={value}" for pairs in settings for name, value in pairs)))


def prices_of(price: Pairs[float]) -> dict[str, Price]:
    """Prices of one's own, by the target's name."""
    from gpuir.targets.prices import own_price

    return dict(own_price(name, amount) for pairs in price for name, amount in pairs)


def split_names(text: str | None) -> list[str]:
    """`a, b` → `a`, `b`."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def split_targets(text: str | None) -> list[str]:
    """`a100+sms=60,l4` → `a100+sms=60`, `l4`; `all` is every one there is."""
    if text == "all":
        return list(everything())
    return split_names(text)


def everything() -> dict[str, Target]:
    """Every target by name that can be loaded; of a plug-in's that cannot, a warning."""
    import gpuir
    from gpuir.ir.errors import PluginError, TargetError

    found: dict[str, Target] = {}
    for name in gpuir.target_names():
        try:
            found[name] = gpuir.load_target(name)
        except (PluginError, TargetError) as error:
            warn(str(error))
    return found


def targets_of(run: ModelRun) -> list[Target]:
    """The targets, each once."""
    return [one for one, _ in named_targets(run)]


def named_targets(run: ModelRun) -> list[tuple[Target, str]]:
    """The targets, each once, with the names that they are loaded by; UsageError where two of one
    name are not the same."""
    import gpuir
    from gpuir.ir.errors import UsageError

    if not (names := run.targets):
        raise UsageError("no target given", fix="--target a100; `gpuir targets` lists them")
    found: dict[str, tuple[Target, str]] = {}
    for name in names:
        one = gpuir.load_target(name)
        other, first = found.setdefault(one.name, (one, name))
        if other != one:
            raise UsageError(
                f"two targets have the name {one.name!r}",
                found=f"{first}, {name}",
                fix="give the file a `name` of its own",
            )
    return list(found.values())


def batch(dims: Mapping[str, int]) -> int | None:
    """The extent of the one dimension that is called a batch."""
    found = [n for name, n in dims.items() if is_batch(name)]
    return found[0] if len(found) == 1 else None


def is_batch(name: str) -> bool:
    """Whether a dimension is called a batch."""
    return re.search("batch", name, re.IGNORECASE) is not None
