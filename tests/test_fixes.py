"""Every fix that a message prints in the form of options can be typed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click

from gpuir.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent / "gpuir"
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OTHERS = {"--no-deps"}  # of other programs


def texts() -> list[tuple[str, str]]:
    """The text of each `fix=` in the code, with its place; what is put in is left out."""
    found: list[tuple[str, str]] = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                parts = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
                text = " ".join(part for part in parts if isinstance(part, str))
                found.append((f"{path.relative_to(ROOT)}:{node.value.lineno}", text))
    return found


def options() -> set[str]:
    """All options of all commands, and of commands in them."""
    found, waiting = (
        {"--help", "--version", "--debug"},
        [main.get_command(click.Context(main), n) for n in COMMANDS],
    )
    while waiting:
        command = waiting.pop()
        assert command is not None
        for parameter in command.params:
            found.update((*parameter.opts, *parameter.secondary_opts))
        if isinstance(command, click.Group):
            context = click.Context(command)
            waiting += [command.get_command(context, n) for n in command.list_commands(context)]
    return found


def test_the_options_that_fixes_name_are_there():
    known = options() | OTHERS
    found = texts()
    assert len(found) > 300
    wrong = [(at, o) for at, text in found for o in OPTION.findall(text) if o not in known]
    assert not wrong, wrong


def test_fixes_have_numbers_to_type():
    """`--dims batch=8`, not `--dims batch=N`."""
    wrong = [(at, text) for at, text in texts() if re.search(r"=N\b", text)]
    assert not wrong, wrong
