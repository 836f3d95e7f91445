"""Models in all forms to graphs: which frontend reads what, and the passes of a training step."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from operator import index
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from gpuir.files import bounded, decoded, note_input, read_text
from gpuir.ir.door import CALLED, FLAG, PATH, TEXT, takes
from gpuir.ir.errors import (
    GpuirError,
    ModelError,
    PluginError,
    TextError,
    UsageError,
    VerifyError,
    nearest,
)
from gpuir.ir.graph import Graph, Level
from gpuir.ir.verify import verify
from gpuir.plugins import blamed, installed, load_point, own_module, place
from gpuir.run.terms import refuse
from gpuir.targets.profile import on_own, profile_of, under

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from onnx import ModelProto
    from torch import nn
    from torch.export import ExportedProgram

    from gpuir.frontends.model import Model
    from gpuir.frontends.torch.program import TorchProgram
    from gpuir.targets.profile import Profile
    from gpuir.targets.recipe import Recipe

    Source = str | PathLike[str] | nn.Module | ExportedProgram | TorchProgram | ModelProto | bytes


class LoadOptions(TypedDict, total=False):
    """What a model file leaves open. `dims` binds symbolic dimensions by name, `inputs` gives
    whole shapes, `values` the numbers of inputs that shapes depend on, `trip_counts` those of
    loops by node name, `expert_skew` how unevenly routers choose experts (0: evenly; else the
    exponent of a power law), `indices` which rows of a table lookups name (`zipf:1.05`, or by
    table); `converters` are your own, by operator; `strict` refuses an operator
    that has no converter. A torch module is run on `args` (one, or a tuple of them) and `kwargs`.
    `dtype` are the numbers of a config's model and of a function's (`f32`, `f16`, `bf16`).
    Of a Hugging Face config, `task` chooses the class and `attention` how it is computed (`sdpa`,
    `eager`); `phase` is `prefill` or `decode`, behind `past` tokens, whose keys and values are kept
    in `cache_dtype`; with `mask` the attention mask is an input. With `channels_last` all images,
    weights and inputs, of a torch program lie in memory as torch.channels_last has them; without it
    as the program has them.

    With `train` the graph is that of a training step: forward, and backward by torch's own rules
    or ours (`autodiff`: `torch`, the default where torch made the model and no LSTM, GRU or RNN is
    in it, or `gpuir`), of the output `loss`, the first by default. `optimizer` adds
    its step (`sgd`, `adam`, `adamw`), in `fused` kernels or not, behind gradients scaled down to a
    norm of `clip` together; `accumulate` adds gradients to those of earlier batches; `checkpoint`
    recomputes modules: a glob of their paths, or `every=2`.

    `autocast` is mixed precision in a dtype (`f16`, `bf16`), as torch.autocast has it for CUDA, of
    a run or a training step; with `fast_norms` layer and group norms are in that dtype too.
    `weights` are kept in a dtype of their own (`f32`, `f16`, `bf16`), and cast where they are read.
    `fp16` runs an f32 model in f16, but for its inputs and outputs, as `trtexec --fp16` does; with
    `int8` or `fp8` convolutions and products with weights are on 8 bits (pass `quantise`).
    `recipe` is how a framework trains (`megatron-bf16`; `specs/recipes`): the profile and the
    options of a step that are not given."""

    dims: Mapping[str, int]
    inputs: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Sequence[float]]
    trip_counts: Mapping[str, int]
    expert_skew: float
    indices: str | Mapping[str, str]
    converters: Mapping[str, Callable[..., Any]]
    strict: bool
    args: Any
    kwargs: Mapping[str, Any]
    task: str | None
    dtype: str | None
    attention: str | None
    phase: str | None
    past: int | None
    cache_dtype: str | None
    mask: bool
    channels_last: bool
    train: bool
    autodiff: str | None
    loss: str | None
    optimizer: str | None
    fused: bool
    clip: float
    accumulate: bool
    autocast: str | None
    fast_norms: bool
    fp16: bool
    int8: bool
    fp8: bool
    weights: str | None
    recipe: str | PathLike[str] | None
    checkpoint: str | None


TAKES = {  # which options each kind of model has a use for
    "an ONNX file": "dims inputs values trip_counts expert_skew converters strict",
    "IR text, which already contains its numbers": "converters strict",
    "a saved torch program": "dims inputs trip_counts expert_skew converters strict channels_last",
    "a torch program": "args kwargs dims inputs trip_counts expert_skew converters strict "
    "channels_last",
    "a function": "dims dtype inputs trip_counts expert_skew converters strict channels_last",
    "a Hugging Face config": "dims task dtype attention phase past cache_dtype mask "
    "expert_skew converters strict channels_last",
}
# Options of a step that a run may have too.
UNTRAINED = ("train", "autocast", "fast_norms", "fp16", "int8", "fp8", "weights")
LOG = logging.getLogger("gpuir.run.loading")
LOSS_SCALE = 65536.0  # torch.amp.GradScaler's first, which f16 alone needs


@takes(warn=CALLED, profile=PATH, tf32=FLAG)
def load(
    model: Source,
    *,
    warn: Callable[[str], None] | None = None,
    profile: str | PathLike[str] | None = None,
    tf32: bool | None = None,
    **options: Unpack[LoadOptions],
) -> Graph:
    """The graph of a model: an ONNX file, its bytes or its `ModelProto`; a torch program, exported
    and saved (`.pt2`) or live, or a torch module with its arguments; a Hugging Face config
    (`hf:config.json`, or its folder); what a function gives (`my.module:build`); gpuir's own text
    (`.gir`, or `-` for stdin) at any level; a file of a format that an installed package reads.

    A backward pass by our rules is that of what the software stack `profile` makes of the forward
    one (`lower` has the defaults): attention that it leaves in products and a softmax keeps its
    scores. The graph then names its profile.

    What the loader could not be sure of goes to `warn`, Python's warnings by default. ModelError
    or TextError when the file cannot be used.
    """
    _check_values(options)
    recipe = _recipe(options)
    step = _TrainingStep.of(options)
    if recipe and recipe.profile:
        profile = recipe.profile if profile is None else on_own(profile, recipe.profile)
    indices = options.pop("indices", "")
    source = fspath(model) if isinstance(model, str | PathLike) else model
    path = source if isinstance(source, str) else ""
    note_input(path)
    refuse(path)
    if recipe and recipe.dtype and not options.get("dtype"):
        if is_torch(path) and not path.endswith(".pt2"):
            options["dtype"] = recipe.dtype
        elif recipe.dtype != "f32":
            step = replace(step, convert=recipe.dtype)
    if path.endswith(".gir") or path == "-":
        graph = _load_text_file(path, options)
        graph = _with_indices(graph, indices) if indices else graph
        return step.run(graph, path, profile, tf32)
    if added := _added(path):
        loaded = _load_added(path, added, options)
    elif is_onnx(source):
        loaded = _load_onnx(source, options)
    else:
        loaded = _load_torch(source, options, step)
    _check_not_empty(loaded.graph, options, path)
    step = step.of_outputs(loaded, path)
    say = warn or partial(warnings.warn, stacklevel=2)
    for text in loaded.warnings:
        say(text)
    LOG.debug("loaded %s: %s nodes", loaded.graph.name, len(loaded.graph.nodes))
    return step.run(_with_indices(loaded.graph, indices), path, profile, tf32)


def _with_indices(graph: Graph, indices: str | Mapping[str, str]) -> Graph:
    """A graph whose lookups say which rows they name; those of nobody's `indices`, what is assumed.
    UsageError where it has no table of that name."""
    from gpuir.passes.indices import Indices
    from gpuir.plan.tables import read_spread

    given = {"*": indices} if isinstance(indices, str) else indices
    if graph.level != Level.graph:
        if any(given.values()):
            raise UsageError(
                "--indices needs a graph of tensor ops",
                found=f"a graph at level {graph.level}",
                fix="give the model before it was lowered",
            )
        return graph
    for tables, text in given.items():
        if text:
            graph = Indices(str(read_spread(text)), tables).run(graph)
    return Indices().run(graph)


@dataclass(frozen=True)
class _TrainingStep:
    """What is asked for beyond the model's own forward pass: mixed precision, a training step."""

    train: bool = False
    autodiff: str | None = None
    loss: str | None = None
    optimizer: str | None = None
    fused: bool = False
    clip: float = 0.0
    accumulate: bool = False
    autocast: str | None = None
    fast_norms: bool = False
    fp16: bool = False
    int8: bool = False
    fp8: bool = False
    checkpoint: str | None = None
    weights: str | None = None
    convert: str = ""

    @classmethod
    def of(cls, options: LoadOptions) -> _TrainingStep:
        """Taken out of the options; UsageError for what makes no sense."""
        names = [f.name for f in fields(cls) if f.name in LoadOptions.__annotations__]
        given: dict[str, Any] = {n: options.pop(n) for n in names if n in options}
        made = cls(**{name: value for name, value in given.items() if value})
        asked = [name for name in names if name not in UNTRAINED and getattr(made, name)]
        if asked and not made.train:
            raise UsageError(f"{', '.join(asked)} needs a training step", fix="add --train")
        if made.autodiff not in (None, "torch", "gpuir"):
            fix = nearest(made.autodiff, ("torch", "gpuir"))
            raise UsageError(f"autodiff {made.autodiff!r} is unknown", fix=fix)
        ours = [n for n in ("loss", "autocast", "weights", "checkpoint") if getattr(made, n)]
        if made.autodiff == "torch" and ours:
            raise UsageError(
                f"{', '.join(ours)} needs the derivatives of gpuir", fix="--autodiff gpuir"
            )
        if made.fused and not made.optimizer:
            raise UsageError("fused needs an optimizer", fix="add --optimizer adamw")
        if made.fast_norms and not made.autocast:
            raise UsageError("fast norms need mixed precision", fix="add --autocast f16")
        if made.fp16 and (made.train or made.autocast):
            raise UsageError(
                "fp16 is for inference, and not with autocast",
                fix="--autocast f16 in place of --fp16",
            )
        if made.narrow and (made.train or made.autocast or made.weights):
            raise UsageError(
                "int8 and fp8 are for inference, and not with autocast or weights",
                fix="--int8 --fp16 without them",
            )
        if made.int8 and made.fp8:
            raise UsageError("int8 and fp8 exclude each other", fix="choose one of them")
        if made.clip and not made.optimizer:
            raise UsageError("clip needs an optimizer", fix="add --optimizer adamw")
        return made

    def of_outputs(self, loaded: Model, path: str) -> _TrainingStep:
        """With the loss under its name in the graph; UsageError for one that is no output."""
        names = {**loaded.keys, **{v.name: v.name for v in loaded.graph.outputs}}
        if not self.loss or not loaded.keys:
            return self
        if self.loss not in names:
            raise UsageError(
                f"no output has the name {self.loss!r}", where=path, fix=nearest(self.loss, names)
            )
        return replace(self, loss=names[self.loss])

    @property
    def by_torch(self) -> bool:
        """Whether AOTAutograd derives the backward pass of a torch program."""
        ours = self.loss or self.autocast or self.weights or self.convert or self.checkpoint
        return self.train and self.autodiff != "gpuir" and not ours

    def run(
        self,
        graph: Graph,
        path: str,
        profile: str | PathLike[str] | None = None,
        tf32: bool | None = None,
    ) -> Graph:
        """The graph with what is asked for and not in it yet."""
        if not (self.train or self.autocast or self.weights or self.fp16 or self.narrow):
            return graph
        from gpuir.stacks.table import pipeline

        if not self.train:
            passes = ",".join((*self.stored, *((self.precision,) if self.autocast else ())))
            return _of_file(path, lambda: pipeline(passes).run(graph))
        derives = not any(role == "gradient" for _, role in graph.roles)
        graph = under(graph, profile, tf32) if derives else graph
        first = _recognizing(profile_of(graph)) if derives else []
        passes = self.passes(derives, first)
        made = _of_file(path, lambda: pipeline(passes).run(graph)) if passes else graph
        if not derives:
            return made
        found = ",".join(x for x in first if x.startswith("recognize")) or "nothing"
        note = (
            "gpuir recognized these patterns before the passes of the "
            f"profile {graph.profile}: {found}"
        )
        note = f"gpuir derived the backward pass; {note}"
        return replace(made, assumed=(*made.assumed, note))

    @property
    def narrow(self) -> str:
        """What products with weights run on, if that has 8 bits."""
        return "i8" if self.int8 else "f8e4m3" if self.fp8 else ""

    @property
    def stored(self) -> list[str]:
        """The passes that change what the model and its weights are in."""
        found = [_pass("convert", dtype=self.convert)] if self.convert else []
        found += [_pass("convert", dtype="f16", edges=True)] if self.fp16 else []
        found += [_pass("quantise", dtype=self.narrow)] if self.narrow else []
        return [*found, _pass("keep", dtype=self.weights)] if self.weights else found

    @property
    def precision(self) -> str:
        """The pass of mixed precision."""
        return _pass("autocast", dtype=self.autocast, fast_norms=self.fast_norms or None)

    def passes(self, derives: bool, first: Sequence[str]) -> str:
        """The passes as text: `autocast{dtype=bf16},autodiff{every=2},optimizer{kind=adamw}`. What
        the stack recognizes comes `first`: the gradient of a GELU that is one kernel needs its
        input alone, that of its parts all that they compute. It comes again behind autocast, since
        attention may be one kernel in 16 bits alone."""
        scale = {"loss_scale": LOSS_SCALE} if self.autocast == "f16" else {}
        found = [*self.stored, *first] if derives else [*first]
        if self.autocast:
            found += [self.precision, *first]
        if derives:
            found.append(
                _pass(
                    "autodiff",
                    loss=self.loss,
                    **_checkpoint(self.checkpoint),
                    **scale,
                )
            )
        if self.accumulate:
            found.append("accumulate")
        if self.optimizer:
            given = {"fused": self.fused or None, "clip": self.clip or None}
            found.append(_pass("optimizer", kind=self.optimizer, **given, **scale))
        return ",".join(found)


def _recipe(options: LoadOptions) -> Recipe | None:
    """The recipe asked for, its options put beside those that are given."""
    name = options.pop("recipe", None)
    if name is None:
        return None
    from gpuir.targets.recipe import load_recipe

    if not options.get("train"):
        raise UsageError("a recipe is for a training step", fix="add --train")
    recipe = load_recipe(fspath(name))
    for field in ("weights", "autocast", "optimizer", "fused", "clip", "accumulate"):
        if not options.get(field) and (value := getattr(recipe, field)):
            options[field] = value
    return recipe


def _of_file(path: str, make: Callable[[], Graph]) -> Graph:
    """What `make` gives; its errors name the file where they name nothing."""
    try:
        return make()
    except GpuirError as error:
        error.where = error.where or path
        raise


def _recognizing(profile: Profile) -> list[str]:
    """The passes by which a stack finds what a model spells out, each once."""
    from gpuir.text import parse_passes

    steps = parse_passes(profile.passes)
    found = [_pass(name, **given) for name, given in steps if name in ("canonicalize", "recognize")]
    return list(dict.fromkeys(found))


def _pass(name: str, **options: object) -> str:
    """`autodiff{every=2}`: options that are not set are left out."""
    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    return name + (f"{{{','.join(given)}}}" if given else "")


def _checkpoint(text: str | None) -> dict[str, str | int]:
    """`every=2`, or a glob of modules."""
    if not text:
        return {}
    key, equals, count = text.partition("=")
    if key == "every" and equals:
        if not count.isdecimal() or len(count) > 9 or int(count) < 1:
            raise UsageError(
                "checkpoint: the number of modules is not valid",
                expected="every=2",
                found=text[:80],
            )
        return {"every": int(count)}
    return {"checkpoint": text}


def _check_values(options: LoadOptions) -> None:
    """UsageError for what is of another kind than is asked for. One argument becomes a tuple."""
    for name, (fits, what, example) in VALUES.items():
        given: Any = {} if options.get(name) is None else options.get(name)
        named = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else None
        if named is None or not all(map(fits, named.values())):
            raise UsageError(
                f"{name}: not {what} by name",
                expected=f"{name}={example}",
                found=f"{name}={given!r}"[:200],
            )
    for name, (fits, what, example) in WORDS.items():
        if (given := options.get(name)) is not None and not fits(given):
            raise UsageError(
                f"{name}: not {what}",
                expected=f"{name}={example}",
                found=f"{name}={given!r}"[:200],
            )
    args: Any = options.get("args")
    if args is not None and not isinstance(args, list | tuple):
        options["args"] = (args,)


def _check_not_empty(graph: Graph, options: LoadOptions, path: str) -> None:
    """UsageError where a size of 0 leaves all inputs or all outputs without a cell. (A past of no
    tokens does not, nor do the rows of an expert that nobody chooses.)"""
    dims, shapes = options.get("dims", {}), options.get("inputs", {})
    zeros = {f"{name}=0": f"--dims {name}=1" for name, n in dims.items() if n == 0}
    for name, shape in shapes.items():
        if 0 in shape:
            ones = "x".join(str(n or 1) for n in shape)
            zeros[f"{name}={'x'.join(map(str, shape))}"] = f"--input {name}={ones}"
    ends = [[v.type.size for v in values] for values in (graph.inputs, graph.outputs)]
    if zeros and 0 in ends[0] and not all(map(any, ends)):
        raise UsageError(
            f"{', '.join(zeros)} leaves nothing to compute",
            where=path,
            expected="sizes of at least 1",
            fix=" ".join(zeros.values()),
        )


def _is_count(size: Any) -> bool:
    try:
        return not isinstance(size, type) and index(size) >= 0
    except TypeError:
        return False


def _is_shape(sizes: Any) -> bool:
    return isinstance(sizes, list | tuple) and all(_is_count(n) for n in cast("list[Any]", sizes))


def _is_word(given: Any) -> bool:
    return isinstance(given, str)


def _is_switch(given: Any) -> bool:
    return isinstance(given, bool)


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float)


def _is_norm(given: Any) -> bool:
    return _is_number(given) and 0 <= given < float("inf")


def _is_spread(given: Any) -> bool:
    named = cast("Mapping[str, Any]", given).values() if isinstance(given, Mapping) else [given]
    return all(isinstance(x, str) for x in named)


Rule = tuple[Callable[[Any], bool], str, str]
VALUES: Mapping[str, Rule] = {
    "dims": (_is_count, "whole numbers", '{"batch": 8}'),
    "trip_counts": (_is_count, "whole numbers", '{"loop": 10}'),
    "inputs": (_is_shape, "shapes", '{"x": (8, 128)}'),
    "converters": (callable, "functions", '{"mylib::op": convert}'),
    "kwargs": (lambda _: True, "arguments", '{"mask": mask}'),
}
WORDS: Mapping[str, Rule] = {
    **{
        name: (_is_word, "a word", example)
        for name, example in (
            *(("task", '"causal-lm"'), ("dtype", '"bf16"'), ("attention", '"sdpa"')),
            *(("phase", '"decode"'), ("cache_dtype", '"f8e4m3"'), ("autodiff", '"gpuir"')),
            *(("loss", '"loss"'), ("optimizer", '"adamw"'), ("autocast", '"bf16"')),
            *(("checkpoint", '"every=2"'), ("weights", '"f32"')),
        )
    },
    **dict.fromkeys(
        (
            "strict",
            "mask",
            "channels_last",
            "train",
            "fused",
            "accumulate",
            "fast_norms",
            "fp16",
            "int8",
            "fp8",
        ),
        (_is_switch, "True or False", "True"),
    ),
    "past": (_is_count, "a whole number", "4096"),
    "expert_skew": (_is_number, "a number", "0.5"),
    "clip": (_is_norm, "a number above 0", "1.0"),
    "indices": (_is_spread, "text, or text by table", '"zipf:1.05"'),
}


def is_onnx(source: object) -> bool:
    """Whether it is ONNX's: its protobuf, its bytes, or a path that names no torch program."""
    if isinstance(source, str):
        return not is_torch(source)
    bytes_of_one = isinstance(source, bytes | bytearray | memoryview)
    return bytes_of_one or type(source).__name__ == "ModelProto"


def is_torch(path: str) -> bool:
    """Whether the text names a torch program: `model.pt2`, `hf:config.json` or a folder with a
    config, `my.module:build`."""
    if path.startswith("hf:") or path.endswith(".pt2"):
        return True
    if os.path.exists(path):
        return os.path.isdir(path) or os.path.basename(path) == "config.json"
    return ":" in path and path.rpartition(":")[2].isidentifier()


def is_config(path: str) -> bool:
    """Whether text that names a torch program names a Hugging Face config, or a folder with one."""
    return path.startswith("hf:") or not (path.endswith(".pt2") or ":" in path)


def _check_file(path: str) -> None:
    """ModelError for a torch program whose file is not there, whatever could read it."""
    file, fix = path.removeprefix("hf:"), ""
    if is_config(path):
        fix = "gpuir does not download models: save the config.json of the model, and give its path"
        file = os.path.join(file, "config.json") if os.path.isdir(file) else file
    elif not path.endswith(".pt2"):
        file = path.rpartition(":")[0]
        if not file.endswith(".py"):
            return  # a module, which Python finds
    if not os.path.exists(file):
        folder = os.path.dirname(os.path.abspath(file))
        raise ModelError("no such file", where=file, found=folder, fix=fix)


def _without_torch(model: Any) -> UsageError:
    """What is to be installed for the program; its own error for one in a module that does not load
    for another reason."""
    path = model if isinstance(model, str) else ""
    extra = "hf" if path and is_config(path) else "torch"
    if path and extra == "torch" and not path.endswith(".pt2"):
        try:
            own_module(path.rpartition(":")[0], path)
        except UsageError as error:
            if not isinstance(error.__cause__, ImportError) or error.__cause__.name != "torch":
                return error
    return UsageError(
        "PyTorch is not installed",
        where=path,
        fix=f"pip install 'gpuir[{extra}]', or export the model to ONNX",
    )


OURS = ("", "onnx", "gir", "pt2", "json", "py")  # suffixes that no package reads in our place


def _added(path: str) -> EntryPoint | None:
    """The frontend that an installed package declares for files of this suffix."""
    suffix = os.path.splitext(path)[1][1:]
    return None if suffix in OURS or is_torch(path) else installed("frontends").get(suffix)


def _load_added(path: str, point: EntryPoint, options: LoadOptions) -> Model:
    """What a package's frontend gives for a file. It is a function of the path, and of those of our
    options by name that it has a use for."""
    from gpuir.frontends.model import Model

    if not os.path.exists(path):
        raise ModelError("no such file", where=path, found=os.path.dirname(os.path.abspath(path)))
    frontend = load_point(point, "frontend")
    with blamed(frontend, f"the frontend {point.name!r}"):
        takes = [
            name for name in signature(frontend).parameters if name in LoadOptions.__annotations__
        ]
        given = _checked(options, f"a .{point.name} file", path, takes)
        model = frontend(path, **given)
    if not isinstance(model, Model):
        raise PluginError(
            f"the frontend {point.name!r} returns no model",
            where=place(point),
            expected="a gpuir.frontends.model.Model",
            found=repr(model)[:200],
        )
    verify(model.graph, point.value)
    return model


def _is_given(value: Any) -> bool:
    """Whether an option says anything; an array, which has no truth value, does."""
    return hasattr(value, "__array__") or bool(value)


def _checked(
    options: LoadOptions, kind: str, where: str, takes: Sequence[str] | None = None
) -> dict[str, Any]:
    """The options given; UsageError for one that this kind of model has no use for."""
    takes = TAKES[kind].split() if takes is None else takes
    given = {name: value for name, value in options.items() if _is_given(value)}
    wrong = [name for name in given if name not in takes]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} cannot be given for {kind}",
            where=where,
            fix=f"remove it; such a model takes {', '.join(takes) or 'no options'}",
        )
    return given


def _load_onnx(source: Any, options: LoadOptions) -> Model:
    from gpuir.frontends.onnx.load import load as load_onnx  # pyright: ignore

    where = source if isinstance(source, str) else type(source).__name__
    if isinstance(source, str):
        _refuse_others(source)
    return load_onnx(source, **_checked(options, "an ONNX file", where))


def _refuse_others(path: str) -> None:
    """UsageError for a file whose name says that it is no model but may lead to one."""
    suffix = os.path.splitext(path)[1]
    if suffix == ".py":
        functions = _functions_of(path)
        raise UsageError(
            "a Python file is not a model: give a function in it that makes the model",
            where=path,
            expected=f"{path}:build, a function that returns (module, args)",
            found=", ".join(functions),
            fix=f"{path}:{functions[0]}" if len(functions) == 1 else "",
        )
    if suffix in (".pt", ".pth", ".ckpt", ".safetensors"):
        raise UsageError(
            "the file has weights or pickled Python objects, but no program",
            where=path,
            expected="a .pt2 file, a .onnx file, or my.module:build",
            fix="torch.export.save(torch.export.export(module, args), 'model.pt2')",
        )


def _functions_of(path: str) -> list[str]:
    """The functions that a Python file defines, read without running it."""
    try:
        body = ast.parse(read_text(path, "the file", ModelError)).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    return [n.name for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def _load_torch(model: Any, options: LoadOptions, step: _TrainingStep) -> Model:
    if isinstance(model, str):
        _check_file(model)
    if find_spec("torch") is None:
        raise _without_torch(model)
    from gpuir.frontends.torch import hf, program
    from gpuir.frontends.torch.load import load as load_torch

    training: dict[str, Any] = {
        "train": step.train,
        "joint": step.by_torch,
        "unrolled": step.autodiff == "torch",
    }
    if not isinstance(model, str):
        given = _checked(options, "a torch program", type(model).__name__)
        return load_torch(model, **given, **training)
    if model.endswith(".pt2"):
        given = _checked(options, "a saved torch program", model)
        return load_torch(model, **given, **training)
    if program.is_built(model) and not model.startswith("hf:"):
        given = _checked(options, "a function", model)
        made, left = program.built(model, given.pop("dims", {}), given.pop("dtype", ""))
        given |= {"dims": left, "name": program.function_name(model)}
    else:
        given = _checked(options, "a Hugging Face config", model)
        walk = {
            name: given.pop(name)
            for name in ("expert_skew", "converters", "strict", "channels_last")
            if name in given
        }
        dims = dict(given.pop("dims", {}))
        walk["dims"] = {name: n for name, n in dims.items() if program.of_data(name)}
        given["dims"] = {name: n for name, n in dims.items() if name not in walk["dims"]}
        made, given = hf.program(model, train=step.train, **given), walk
    return load_torch(made, **given, **training)


def _load_text_file(path: str, options: LoadOptions) -> Graph:
    _checked(options, "IR text, which already contains its numbers", path)
    if path == "-":
        return load_text(_read_stdin(), "<stdin>")
    return load_text(read_text(path, "the file", ModelError), path)


def _read_stdin() -> str:
    if not sys.stdin:  # closed by whoever started us
        raise UsageError(
            "there is no stdin from which to read IR text", fix="give the name of the file"
        )
    data = bounded(sys.stdin.buffer, "<stdin>", "the text", ModelError)
    return decoded(data, "<stdin>", ModelError)


@takes(text=TEXT, source=TEXT)
def load_text(text: str, source: str = "<text>") -> Graph:
    """The graph that gpuir's own text states, checked; TextError names its place in `source`."""
    from gpuir.text import parse  # and with it lark

    graph = parse(text, source)
    try:
        verify(graph)
    except VerifyError as error:
        where = f"{source}: {error.where}"
        raise TextError(
            error.what, where=where, expected=error.expected, found=error.found, fix=error.fix
        ) from error
    return graph
