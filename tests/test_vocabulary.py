"""docs/reference/ir.md has the grammar and every op of the code; `--update-golden` writes them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import gpuir
from gpuir.ir.graph import Level, Op
from gpuir.ir.types import DTYPES
from gpuir.ops import tensor as t
from gpuir.ops.kernel import KERNELS
from gpuir.ops.scalar import SCALARS
from gpuir.ops.tensor import OPS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/reference/ir.md"


def field_text(f: dataclasses.Field[object]) -> str:
    """`axis: int`, `keepdims: bool = False`."""
    default = f" = {f.default!r}" if f.default is not dataclasses.MISSING else ""
    return f"{f.name}: {f.type}{default}"


def ops_table(ops: dict[str, type[Op]]) -> str:
    lines = ["| op | fields | what it is |", "|---|---|---|"]
    for name, op in ops.items():
        fields = ", ".join(map(field_text, dataclasses.fields(op))).replace("|", "\\|")
        paragraph = " ".join((op.__doc__ or "").split("\n\n")[0].split())
        said = re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0].replace("|", "\\|")
        lines.append(f"| `{name}` | `{fields}` | {said} |")
    return "\n".join(lines)


def traits_table() -> str:
    """The ops of each kind that are alike in all that passes ask."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, op in OPS.items():
        if issubclass(op, t.TensorOp):
            kind = next((c.__name__ for c in op.__mro__[1:] if c in t.KINDS), "")
            key = (kind, op.kernel, op.fuses, "yes" if op.by_rows else "", op.weight, op.autocast)
            alike.setdefault(key, []).append(name)
    lines = [
        "| kind | becomes | fuses as | by rows | unpacks | autocast | ops |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kind, kernel, *rest), names in alike.items():
        lines.append(" | ".join((f"| {kind}", f"`{kernel}`", *rest, words(names) + " |")))
    return "\n".join(lines)


def words(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def parts() -> dict[str, str]:
    grammar = (ROOT / "gpuir/text/grammar.lark").read_text().strip()
    return {
        "grammar": f"```\n{grammar}\n```",
        "tensor ops": ops_table(OPS),
        "traits": traits_table(),
        "kernels": ops_table(KERNELS),
        "scalar functions": words(sorted(SCALARS)),
        "dtypes": words(sorted(DTYPES)),
    }


def test_the_page_has_the_grammar_and_the_vocabulary_as_they_are(request: pytest.FixtureRequest):
    page = PAGE.read_text()
    made = page
    for name, text in parts().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        assert begin in page and end in page
        head, _, rest = made.partition(begin)
        made = f"{head}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "pytest tests/test_vocabulary.py --update-golden"


def test_every_op_says_what_it_is():
    assert not [name for name, op in (OPS | KERNELS).items() if not (op.__doc__ or "").strip()]


def test_the_page_names_every_level():
    assert not [level.name for level in Level if f"`{level.name}`" not in PAGE.read_text()]


def test_what_the_page_shows_parses():
    """Each block that starts as a graph or a schedule does."""
    blocks = re.findall(r"```\n((?:graph|costed|schedule) @.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        parse = gpuir.parse_schedule if block.startswith("schedule") else gpuir.parse
        assert gpuir.show(parse(block)) == block
