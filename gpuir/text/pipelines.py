"""The text of a pipeline. Every run reads one, so it does without the grammar of graphs, whose
parser takes longer to make than most models to cost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from gpuir.text.place import TextPlace, check_length, error_at, number

PassText = tuple[str, dict[str, "int | float | str | bool"]]

_TOKEN = re.compile(
    r"""(?:[ \t\r\n]|\#[^\n]*)*+(?:
        (?P<number>-?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|inf\b)|nan\b)
        |(?P<name>[A-Za-z_][\w.\-+]*)
        |(?P<string>"(?:[^"\\\n]++|\\.)*+")
        |(?P<mark>[{},=])
        |(?P<end>\Z)
        |(?P<other>.)
    )""",
    re.VERBOSE,
)


def parse_passes(text: str, source: str = "<pipeline>") -> tuple[PassText, ...]:
    """The passes of a pipeline by name, each with its options: `fuse{max_ops=8},tile{target=a100}`.
    Raises `TextError` with line and caret where it is no such text."""
    check_length(text, source)
    return tuple(_Reader(text, source).passes())


@dataclass
class _Reader:
    text: str
    source: str
    at: int = 0

    def passes(self) -> Iterator[PassText]:
        more = True
        while more:
            name = self.take("a name", "name")
            options: dict[str, int | float | str | bool] = {}
            mark = self.take(", or { or the end", ",", "{", "end")
            if mark == "{":
                options = dict(self.options())
                mark = self.take(", or the end", ",", "end")
            yield name, options
            more = mark == ","

    def options(self) -> Iterator[tuple[str, int | float | str | bool]]:
        key = self.take("a name or }", "name", "}")
        while key != "}":
            self.take("=", "=")
            yield key, self.value(self.take("a number or text", "number", "string", "name"))
            if self.take(", or }", ",", "}") == "}":
                return
            key = self.take("a name", "name")

    def value(self, token: str) -> int | float | str | bool:
        """What an option is set to: a number, a string in quotes, true, false, or a bare word."""
        if token.startswith('"'):
            try:
                return json.loads(token)
            except ValueError:
                self.fail(
                    self.at - len(token),
                    "the string has a character or an escape that JSON does not know",
                )
        if token in ("true", "false"):
            return token == "true"
        is_number = token[0] in "-0123456789" or token in ("inf", "nan")
        return number(token) if is_number else token

    def take(self, expected: str, *wanted: str) -> str:
        """The next token, which is of a wanted kind, or a wanted mark."""
        match = _TOKEN.match(self.text, self.at)
        assert match and match.lastgroup  # `other` takes what is nothing else
        token = match[match.lastgroup]
        if match.lastgroup not in wanted and token not in wanted:
            found = repr(token) if token else "the end of the text"
            self.fail(match.start(match.lastgroup), f"unexpected {found}", expected)
        self.at = match.end()
        return token

    def fail(self, at: int, what: str, expected: str = "") -> NoReturn:
        line, start = self.text.count("\n", 0, at) + 1, self.text.rfind("\n", 0, at) + 1
        raise error_at(TextPlace(self.text, self.source, line, at - start + 1), what, expected)
