"""A run of several models as text: `50*unet.onnx:batch=2 + vae.onnx:batch=1`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuir.ir.errors import ModelError, UsageError

SETTINGS = re.compile(r"(.*?)((?::[A-Za-z_]\w*=[^:]*|:train)*)", re.DOTALL)
TIMES = re.compile(r"\s*([-+]?[\d.,]+)\s*\*\s*(.+)", re.DOTALL)
BEHIND = re.compile(r"(.+?)\s*\*\s*(\d+)\s*", re.DOTALL)
PLUS = re.compile(r"\s\+\s")
# Options of a model, as `gpuir.load` calls them, that may stand behind it; the rest are sizes.
WORDS = ("dtype", "optimizer", "autocast", "phase", "task", "attention", "cache_dtype")
MOST_TIMES = 10**9
MOST_STEPS = 100_000  # of a generation: as many as a sweep has runs
MOST_DIGITS = 12
FILES = (".onnx", ".pt2", ".gir", ".json")  # suffixes that only a file has


@dataclass(frozen=True)
class RunTerm:
    """A model, how many `times` it runs, and what is said of this one alone: its `sizes`, options
    of `gpuir.load` (`words`), its `profile`; of the sizes that all have, it is `without` some. With
    `generate` tokens a run is their generation."""

    source: str
    times: int = 1
    sizes: tuple[tuple[str, int], ...] = ()
    words: tuple[tuple[str, Any], ...] = ()
    profile: str | None = None
    generate: int | None = None
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The model and what is said of it, as one writes it."""
        words = (f"{name}={value}" if value is not True else name for name, value in self.words)
        sizes = (f"{name}={n}" for name, n in self.sizes)
        profile = (f"profile={self.profile}",) if self.profile else ()
        return ":".join((self.source, *words, *sizes, *profile))

    @property
    def weights(self) -> tuple[str, ...]:
        """What says which weights it has: runs that have the same share them."""
        own = (f"{name}={value}" for name, value in self.words if name not in ("phase", "past"))
        return self.source, *sorted(own)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of `gpuir.load` that are given for all, with those of this one."""
        sizes = {n: x for n, x in given.get("dims", {}).items() if n not in self.without}
        sizes |= dict(self.sizes)
        found = {**given, **dict(self.words)}
        past = None if "past" in self.without else found.get("past")
        if found.get("phase"):
            past = sizes.pop("past", past)
        return found | {"dims": sizes, "past": past}


def settings(text: str) -> tuple[str, dict[str, str]]:
    """`bert.onnx:batch=8:train` → the model, and what is said behind it by name."""
    if _is_there(text):
        return text, {}
    found = SETTINGS.fullmatch(text)
    assert found
    source, said = str(found[1]), [x for x in str(found[2]).split(":") if x]
    if source.endswith(".py") and said[:1] == ["train"]:  # a function of that name
        source, said = f"{source}:train", said[1:]
    return source, {name: value for name, _, value in (x.partition("=") for x in said)}


def terms(text: str, generate: int | None = None) -> tuple[RunTerm, ...]:
    """The models of a run of several, or of one with its own settings, several times or with tokens
    to `generate`; empty for the name of a model alone. A file of exactly this name is a model.
    UsageError for text that is like a run, but is none."""
    if generate is None and _is_there(text):
        return ()
    first, *more = (_term(part, text) for part in _parts(text))
    if generate is not None:
        if more or first.generate is not None:
            raise UsageError(
                "it is not clear which model generates the tokens",
                found=text,
                fix=f"write it behind that one: model.json:generate={generate}",
            )
        first = replace(first, generate=generate)
    return () if not more and first == RunTerm(text) else (first, *more)


def refuse(text: str) -> None:
    """UsageError for a run of several models where one model is asked for."""
    if _is_there(text) or not (PLUS.search(text) or TIMES.fullmatch(text)):
        return
    if several := terms(text):
        raise UsageError(
            "this is a run of several models, and not one model",
            found=text,
            expected=f"a model, for example {several[0].source}",
            fix="gpuir analyze, gpuir sweep and gpuir.analyze take a run of several",
        )


def sources(text: str) -> list[str]:
    """The models that a text may name."""
    return [text, *(settings(_counted(part)[1])[0] for part in PLUS.split(text))]


def prompt(given: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Of a generation's options: how many tokens are there before the prompt, and how many the
    prompt has."""
    dims: Mapping[str, int] = given.get("dims", {})
    source = where.removeprefix("hf:")
    if source == where and not (os.path.isdir(source) or source.endswith("config.json")):
        raise UsageError(
            "only the model of a Hugging Face config generates tokens",
            where=where,
            fix="hf:config.json",
        )
    if given.get("phase"):
        raise UsageError(
            "a generation has both phases, the prompt and the steps",
            where=where,
            found=f"phase {given['phase']}",
            fix="leave out the phase",
        )
    if given.get("train"):
        raise UsageError("nothing is generated in a training step", where=where)
    if not dims.get("seq"):
        raise UsageError(
            "a generation needs the number of tokens of the prompt",
            where=where,
            fix="--dims batch=1,seq=1024   (for example)",
        )
    return given.get("past") or dims.get("past", 0), dims["seq"]


def expanded(term: RunTerm, given: Mapping[str, Any]) -> list[tuple[RunTerm, range | None]]:
    """A term; of a generation its prompt, and its steps with how many tokens are there before each
    of them. The prompt gives the first token, so there is a step less. `given` are options of
    `gpuir.load` for all."""
    if term.generate is None:
        return [(term, None)]
    past, new = prompt(term.options(given), term.source)
    sizes = tuple(x for x in term.sizes if x[0] not in ("past", "seq"))
    words, steps = term.words, term.generate - 1
    one = replace(term, generate=None, without=("seq", "past"))
    first = replace(
        one,
        sizes=(*sizes, ("seq", new), *((("past", past),) if past else ())),
        words=(*words, ("phase", "prefill")),
    )
    if not steps:
        return [(first, None)]
    rest = replace(one, times=term.times * steps, sizes=sizes, words=(*words, ("phase", "decode")))
    return [(first, None), (rest, range(past + new, past + new + steps))]


def _is_there(text: str) -> bool:
    """Whether a file, or a folder, has exactly this name."""
    return os.path.exists(text.removeprefix("hf:"))


def _parts(text: str) -> Iterator[str]:
    """The text between plus signs that stand alone; a file's name may have one."""
    pieces = PLUS.split(text)
    while pieces:
        ends = range(len(pieces), 1, -1)
        joined = ((n, " + ".join(pieces[:n])) for n in ends)
        whole = next((x for x in joined if _is_there(_counted(x[1])[1])), (1, pieces[0]))
        yield whole[1]
        pieces = pieces[whole[0] :]


def _counted(text: str) -> tuple[str, str]:
    """How often a term runs, as text, and what: `50*unet.onnx`."""
    if _is_there(text.strip()) or not (found := TIMES.fullmatch(text)):
        return "1", text.strip()
    return found[1], found[2].strip()


def _term(text: str, whole: str) -> RunTerm:
    count, rest = _counted(text)
    if not rest:
        raise UsageError("a term of the run is empty", found=repr(whole), fix=EXAMPLE)
    times = _whole(count, "how often a model runs", text, 1, MOST_TIMES)
    source, said = settings(rest)
    if not source:
        raise UsageError("a term of the run names no model", found=text, fix=EXAMPLE)
    if "count" in said:
        fix = f"{said['count']}*{source}"
        raise UsageError("how often a model runs stands before it", found=text, fix=fix)
    profile, generate = said.pop("profile", None), said.pop("generate", None)
    words: list[tuple[str, Any]] = [(name, said.pop(name)) for name in WORDS if name in said]
    if "train" in said:
        words.append(("train", True))
        if said.pop("train"):
            raise UsageError("train takes no value", found=text, fix="leave it out for inference")
    sizes = tuple((name, _whole(n, f"the size {name}", text, 0)) for name, n in said.items())
    tokens = None
    if generate is not None:
        tokens = _whole(generate, "how many tokens to generate", text, 1, MOST_STEPS)
    found = RunTerm(source, times, sizes, tuple(words), profile=profile, generate=tokens)
    if not _is_there(source):
        _check_source(source, text, whole)
    return found


EXAMPLE = "'50*unet.onnx + vae.onnx'"


def _check_source(source: str, text: str, whole: str) -> None:
    """UsageError for a source that no file has, but that is written as a run would be, ModelError
    for one that has the name of a model's file."""
    if (found := BEHIND.fullmatch(source)) and _is_there(found[1]):
        raise UsageError(
            "how often a model runs stands before it", found=text, fix=f"{found[2]}*{found[1]}"
        )
    pieces: Sequence[str] = source.split("+")
    if len(pieces) > 1 and all(_is_there(settings(_counted(x)[1])[0]) for x in pieces):
        raise UsageError(
            "a plus between models needs spaces around it: names of files may have one",
            found=text,
            fix=f"'{' + '.join(x.strip() for x in text.split('+'))}'",
        )
    if source.endswith(FILES) and source != whole:
        raise ModelError("no such file", where=source, found=f"in the run {whole!r}")


def _whole(text: str, what: str, where: str, least: int, most: int | None = None) -> int:
    """A whole number within bounds; UsageError says what it is for."""
    within = f"from {least} to {most:,}" if most is not None else f"of {least} or more"
    number = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else least - 1
    if number < least or (most is not None and number > most):
        raise UsageError(
            f"{what} has to be a whole number {within}",
            where=where,
            found=text if len(text) <= 60 else f"{text[:40]}...",
        )
    return number
