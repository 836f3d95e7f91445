"""Options that several commands take, and how their text is read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import reduce, wraps
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from gpuir.backends.table import FOLDERS, FORMATS
from gpuir.cli.output import check_ahead, check_binary, listen, warn

if TYPE_CHECKING:
    import gpuir
    from gpuir.cli.modules import Loaded
    from gpuir.passes.manager import Pipeline
    from gpuir.targets.prices import Price
    from gpuir.targets.target import Target

MOST_EXTENT = 1 << 40  # a tensor of as many bytes fits no device
MOST_RUNS = 100_000  # of one sweep: at some milliseconds each, minutes to an hour

F = TypeVar("F", bound=Callable[..., Any])


class Assignments(click.ParamType):  # type: ignore[type-arg]
    """`NAME=VALUE`, or several with commas between where `many`; the last `=` divides them."""

    def __init__(self, name: str, read: Callable[[str], Any], many: bool = False):
        self.name, self.read, self.many = name, read, many

    def get_metavar(self, param: Any = None, ctx: Any = None) -> str:
        return self.name

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[tuple[str, Any], ...]:
        if isinstance(value, tuple):
            return cast(tuple[tuple[str, Any], ...], value)
        found: list[tuple[str, Any]] = []
        for part in value.split(",") if self.many else [value]:
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
            if (before := dict(found).get(given[0], given[1])) != given[1]:
                self.fail(f"{given[0]} has two values: {before} and {given[1]}", param, ctx)
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


DIMS = Assignments("NAME=8,NAME=128", extent, many=True)
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


def stacked(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    return lambda f: reduce(lambda g, decorate: decorate(g), reversed(decorators), f)


model = click.argument("model", type=click.Path())


training = (
    click.option("--train", is_flag=True, help="A training step: forward, loss, backward."),
    click.option(
        "--recipe",
        help="How a framework trains: megatron-bf16, llm-foundry-bf16, my.toml. It gives what you"
        " do not: options of a step, --dtype, --profile.",
    ),
    click.option(
        "--autodiff",
        help="Who derives the backward pass: torch or gpuir. Autocast needs gpuir.  [torch for "
        "PyTorch programs]",
    ),
    click.option("--loss", help="The output to differentiate.  [the first float one]"),
    click.option("--optimizer", help="Include the optimizer's step: sgd, adam, adamw."),
    click.option("--fused", is_flag=True, help="The optimizer runs in fused kernels."),
    click.option(
        "--clip",
        type=float,
        help="Clip the norm of all gradients to this, before the optimizer's step.",
    ),
    click.option("--accumulate", is_flag=True, help="Add gradients to those of earlier batches."),
    click.option(
        "--checkpoint", help="Recompute modules in backward: a glob of paths, or every=2."
    ),
)

precision = (
    click.option("--autocast", help="Mixed precision: bf16 or f16, with f32 weights."),
    click.option(
        "--fast-norms",
        is_flag=True,
        help="Autocast runs layer and group norms in half precision too.",
    ),
    click.option(
        "--weights", help="Keep weights in f32, f16 or bf16, and cast them where they are read."
    ),
)


def loading(f: F) -> F:
    """What a model leaves open."""
    return stacked(
        click.option(
            "--dims", type=DIMS, multiple=True, help="Symbolic dimensions: batch=8,seq=128."
        ),
        click.option(
            "--task",
            help="What a config's model does: causal-lm, masked-lm, image-cls, ... A wrong name "
            "lists all.",
        ),
        click.option(
            "--dtype",
            help="Data type of a config's or a function's model: f64, f32, f16, bf16.  [its own]",
        ),
        click.option("--attention", help="Attention of a config's model: sdpa or eager.  [sdpa]"),
        click.option("--phase", help="A step of generation by a config's model: prefill, decode."),
        click.option(
            "--past",
            type=click.IntRange(1),
            help="Tokens already in the cache when the phase begins.",
        ),
        click.option(
            "--cache-dtype",
            help="Data type of the cached keys and values: f8e4m3, f16, bf16.  [the config's]",
        ),
        click.option(
            "--mask",
            is_flag=True,
            help="Pass an attention mask to a config's model, as for padded inputs.",
        ),
        click.option(
            "--channels-last",
            is_flag=True,
            help="Store images of a torch program, weights and inputs, as NHWC.",
        ),
        click.option(
            "--input", type=SHAPE, multiple=True, help="Shape of an input: x=1x3x224x224."
        ),
        click.option(
            "--value",
            type=NUMBERS,
            multiple=True,
            help="Values of a tensor that shapes depend on: lengths=1,2,3.",
        ),
        click.option(
            "--trip-count", type=TRIPS, multiple=True, help="How often a loop runs: NODE=10."
        ),
        click.option(
            "--expert-skew",
            type=Finite(0),
            default=0.0,
            help="How unevenly routers choose experts: exponent of a power law.  [0: evenly]",
        ),
        click.option(
            "--indices",
            type=INDICES,
            multiple=True,
            metavar="SPREAD",
            help="Which rows of embedding tables are read: zipf:1.05, FILE.csv, or by table"
            " NAME=zipf:1.05.  [uniform]",
        ),
        *precision,
        *training,
        click.option("--strict", is_flag=True, help="Stop if gpuir does not model an operator."),
    )(f)


def load_options(given: dict[str, Any], loaded: Loaded) -> gpuir.LoadOptions:
    """The options of `loading`, as `gpuir.load` takes them; options of several flags are merged."""

    def merged(name: str) -> dict[str, Any]:
        return dict(pair for pairs in given[name] for pair in pairs)

    return {
        "dims": merged("dims"),
        "inputs": merged("input"),
        "values": merged("value"),
        "trip_counts": merged("trip_count"),
        "expert_skew": given["expert_skew"],
        "indices": merged("indices"),
        "converters": loaded.converters,
        "task": given["task"],
        "dtype": given["dtype"],
        "attention": given["attention"],
        "phase": given["phase"],
        "past": given["past"],
        "cache_dtype": given["cache_dtype"],
        "mask": given["mask"],
        "channels_last": given["channels_last"],
        "strict": given["strict"],
        "train": given["train"],
        "autodiff": given["autodiff"],
        "loss": given["loss"],
        "optimizer": given["optimizer"],
        "fused": given["fused"],
        "clip": given["clip"] or 0.0,
        "accumulate": given["accumulate"],
        "autocast": given["autocast"],
        "fast_norms": given["fast_norms"],
        "weights": given["weights"],
        "recipe": given["recipe"],
        "checkpoint": given["checkpoint"],
    }


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


settings = click.option(
    "--set",
    "settings",
    type=SETTING,
    multiple=True,
    help="Change numbers of the target, in SI units: sms=120,dram.bytes_per_s=2e12.",
)
pipeline = click.option("--pipeline", default="", help="Passes to run instead of the profile's.")
tf32 = click.option(
    "--tf32/--no-tf32",
    default=None,
    help="Let f32 products run on the matrix units, or not.  [as the profile has it]",
)


def profile(f: F) -> F:
    """The software that a model runs under, the floats of its products and the machine:
    `given["profile"]` names them all."""

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


predictor = click.option(
    "--predictor", default="tile", show_default=True, help="What predicts the time of a kernel."
)
price = click.option(
    "--price",
    type=Assignments("a100=2.5", float, many=True),
    multiple=True,
    help="US dollars an hour of a GPU, in place of the list price.",
)


schedule = click.option(
    "--schedule",
    type=click.Path(),
    default="",
    help="Tiles to use for the kernels that this file names.",
)


cluster = click.option(
    "--cluster",
    help="The cluster for `shard` in --pipeline: dgx-h100, 8xh100-sxm, my.toml; "
    "`gpuir clusters` lists them. Its GPU is the target.",
)


def costing(f: F) -> F:
    """How kernels are tiled and costed."""
    return stacked(settings, predictor, schedule, profile, tf32, pipeline, cluster)(f)


def running(f: F) -> F:
    """How a model is run where many runs are tried."""
    return stacked(settings, predictor, profile, tf32, pipeline)(f)


load_modules = click.option(
    "--load",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="A module, or a .py file, with passes, predictors, targets or backends of your own.",
)


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


def formats(*others: str, help: str | None = None) -> Callable[[F], F]:
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


def pipeline_of(given: dict[str, Any], loaded: Loaded) -> Pipeline | None:
    """The passes that `--pipeline` names, if it does."""
    import gpuir

    text = given["pipeline"]
    if not text.strip():
        return None
    return gpuir.pipeline(text, loaded.passes, loaded.predictors, loaded.targets)


def with_settings(target: str, given: dict[str, Any]) -> str:
    """A target's name with the numbers of `--set` behind it."""
    settings = [f"{name}={value}" for pairs in given["settings"] for name, value in pairs]
    return "+".join((target, *settings))


def prices_of(given: dict[str, Any]) -> dict[str, Price]:
    """Prices of one's own, by the target's name."""
    from gpuir.targets.prices import own_price

    return dict(own_price(name, amount) for pairs in given["price"] for name, amount in pairs)


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


def targets_of(given: dict[str, Any], loaded: Loaded) -> list[Target]:
    """The targets, each once."""
    return [target for target, _ in named_targets(given, loaded)]


def named_targets(given: dict[str, Any], loaded: Loaded) -> list[tuple[Target, str]]:
    """The targets, each once, with the names that they are loaded by; UsageError where two of one
    name are not the same."""
    import gpuir
    from gpuir.ir.errors import UsageError

    names = [loaded.target(name) for name in split_targets(given["target"])]
    if not names:
        raise UsageError("no target given", fix="--target a100; `gpuir targets` lists them")
    found: dict[str, tuple[Target, str]] = {}
    for name in (with_settings(name, given) for name in names):
        target = gpuir.load_target(name)
        other, first = found.setdefault(target.name, (target, name))
        if other != target:
            raise UsageError(
                f"two targets have the name {target.name!r}",
                found=f"{first}, {name}",
                fix="give the file a `name` of its own",
            )
    return list(found.values())


def batch(dims: tuple[tuple[tuple[str, int], ...], ...]) -> int | None:
    """The extent of the one dimension that is called a batch."""
    merged = dict(pair for pairs in dims for pair in pairs)
    found = [n for name, n in merged.items() if is_batch(name)]
    return found[0] if len(found) == 1 else None


def is_batch(name: str) -> bool:
    """Whether a dimension is called a batch."""
    return re.search("batch", name, re.IGNORECASE) is not None
