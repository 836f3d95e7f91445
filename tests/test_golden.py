"""Golden text: `# run: PIPELINE`, a graph, then `# gives:` and the exact result, or `# fails:` and
the exact message as comments. `--update-golden` rewrites what follows the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuir.ir.errors import GpuirError
from gpuir.stacks.table import pipeline
from gpuir.text import parse, show

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.rglob("*.gir"))


def halves(text: str) -> tuple[str, str, str]:
    """The pipeline, the graph it runs on, and what is expected, from its `# gives:` line on."""
    first, rest = text.split("\n", 1)
    assert first.startswith("# run: "), "the first line is `# run: PIPELINE`"
    for mark in ("# gives:\n", "# fails:\n"):
        before, found, after = rest.partition("\n" + mark)
        if found:
            return first.removeprefix("# run: "), before + "\n", mark + after
    return first.removeprefix("# run: "), rest.rstrip("\n") + "\n", ""


def outcome(passes: str, text: str) -> str:
    try:
        return "# gives:\n" + show(pipeline(passes).run(parse(text)))
    except GpuirError as error:
        return "# fails:\n" + "".join(f"# {line}\n" for line in str(error).splitlines())


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(GOLDEN)) for f in FILES])
def test_golden(file: Path, request: pytest.FixtureRequest) -> None:
    text = file.read_text()
    passes, graph, expected = halves(text)
    found = outcome(passes, graph)
    if request.config.getoption("--update-golden"):
        file.write_text(f"# run: {passes}\n{graph}{found}")
    else:
        assert found == expected
