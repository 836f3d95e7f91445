"""What a user meant by an option or an argument that a command does not have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import click

# what other tools call it → the option that does it here, and what is given to it: the value that
# was given where it fits, else the example
OPTIONS: Sequence[tuple[str, str, str, str]] = (
    (r"(batch|batch-?size|bs|b|n)", "--dims", "batch={}", "8"),
    (
        r"((max-?)?((seq|sequence|prompt|input|context)-?)?len(gth)?|(max-)?tokens|seq|isl)",
        "--dims",
        "seq={}",
        "128",
    ),
    (r"(height|width|image-?size|img-?size|resolution)", "--dims", "height={0},width={0}", "224"),
    (r"(gpus?|device|hardware|hw|accelerator|arch)", "--target", "{}", "a100"),
    (r"(n-?gpus|num-gpus|world-size|nproc-per-node)", "--cluster", "{}xa100", "8"),
    (r"(precision|(data-?|d)type|fp16|bf16|half|amp|mixed-precision)", "--autocast", "{}", "bf16"),
    (r"(framework|backend|runtime|stack|software|engine|compiled?)", "--profile", "{}", "compiled"),
    (r"(input-)?shapes?", "--input", "{}", "x=1x3x224x224"),
    (r"(context|ctx|kv-len|past-?len(gth)?|past-tokens|cache-len|history)", "--past", "{}", "4096"),
    (r"kv-(cache-)?(dtype|precision)", "--cache-dtype", "{}", "f8e4m3"),
    (r"(max-?)?(new|output|generated)-?tokens|osl", "--generate", "{}", "128"),
    (r"(decode|prefill)", "--phase", "{}", "decode"),
    (r"optim|opt", "--optimizer", "{}", "adamw"),
    (r"training|backward", "--train", "", ""),
    (r"(out|output-?file|save|o)", "--output", "{}", "report.txt"),
    (r"(csv|json|html|trace)", "--format", "{}", "json"),
    (r"(tensor-parallel(-size)?|tp-size)", "--tp", "{}", "2"),
    (r"(pipeline-parallel(-size)?|pp-size)", "--pp", "{}", "2"),
    (r"(data-parallel(-size)?|dp-size)", "--dp", "{}", "2"),
    (r"(expert-parallel(-size)?|ep-size)", "--ep", "{}", "2"),
)
HALF = {"fp16": "f16", "half": "f16", "float16": "f16", "bfloat16": "bf16"}  # other names of types
FLAGS = HALF | {
    name: name for name in ("bf16", "prefill", "decode", "csv", "json", "html", "trace")
}
JOINED = {"--dims", "--target", "--profile", "--set", "--price"}  # values with commas between


def option(error: click.NoSuchOption, args: Sequence[str], others: Iterable[str]) -> str:
    """The message for an option that the command does not have: what does the same, with the value
    that was given, or which `others` among the commands have it."""
    ctx = error.ctx
    known = {opt for p in ctx.command.params for opt in p.opts} if ctx else set[str]()
    name = error.option_name.lstrip("-").lower().replace("_", "-")
    for pattern, meant, form, example in OPTIONS:
        if meant in known and re.fullmatch(pattern, name):
            given = FLAGS.get(name) or _value(error.option_name, args, example) or example
            if meant == "--autocast":
                given = HALF.get(given, given if given in ("f16", "bf16") else example)
                configs = [arg for arg in args if arg.startswith("hf:") or arg.endswith(".json")]
                meant = "--dtype" if configs and "--dtype" in known else meant
            return f"{error.message} Did you mean '{' '.join((meant, form.format(given)))}'?"
    if found := ", ".join(f"gpuir {other}" for other in others):
        return f"{error.message} These commands have it: {found}"
    return error.format_message()


def _value(name: str, args: Sequence[str], example: str) -> str:
    """The value behind the option, where it is of the kind of the example."""
    for arg, behind in zip(args, (*args[1:], ""), strict=True):
        option, equals, value = arg.partition("=")
        if option == name:
            value = value if equals else behind
            alike = all(is_so(example) == is_so(value) for is_so in (str.isdecimal, is_pair))
            return value if alike and re.fullmatch(r"\w[\w.+=-]*", value) else ""
    return ""


def is_pair(text: str) -> bool:
    return "=" in text


def extra(error: click.UsageError, args: Sequence[str]) -> str:
    """The message for an argument too many: how one option is given several values, where one
    stands behind another's."""
    ctx, found = error.ctx, re.search(r"\((.*)\)", error.message)
    if ctx is None or found is None:
        return error.message
    options = {opt: p for p in ctx.command.params if isinstance(p, click.Option) for opt in p.opts}
    for i, arg in enumerate(args):
        name, equals, first = arg.partition("=")
        option = options.get(name)
        if option is None or option.is_flag or not (name in JOINED or option.multiple):
            continue
        first, *rest = [first, *args[i + 1 :]] if equals else [*args[i + 1 :], ""]
        values = [first.rstrip(",")]
        for value in rest:
            alike = re.fullmatch(r"[\w.]+=[^=]+", value) if "=" in first else value
            if not alike or (value not in found[1].split() and "=" not in value):
                break
            values.append(value.rstrip(","))
        if len(values) > 1:
            joined = [",".join(values)] if name in JOINED else values
            meant = " ".join(f"{name} {value}" for value in joined)
            return f"{error.message}. Did you mean '{meant}'?"
    return error.message
