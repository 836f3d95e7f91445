"""A table in every format: people read cells in units, programs the same rows in SI units."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, replace
from io import BytesIO, StringIO
from typing import Any

import pytest

from gpuir.backends.table import FORMATS
from gpuir.backends.terminal import Terminal, cell_width
from gpuir.ir.errors import UsageError
from gpuir.report.table import Column, Drawing, Heading, Notes, Report, Table, fields

NASTY = "a|b`<i>*_@you\x1b[31m \u5c64"


@dataclass(frozen=True)
class Row:
    name: str
    time_s: float
    bytes: int
    share: float | None
    fits: bool
    sizes: dict[str, int]
    interval_s: tuple[float, float] | None
    inside: list[dict[str, int]]


ROWS = (
    Row("conv", 1.5e-3, 4096, 0.25, True, {"batch": 8, "seq": 128}, (1e-3, 2e-3), [{"x": 1}]),
    Row(NASTY, 2.0, 1 << 70, None, False, {"batch": 16, "seq": 128}, None, []),
    Row("layer.0/" + "attention/" * 12 + "MatMul", 1e-9, 1, 0.999, True, {}, (0.0, 1.0), []),
)
COLUMNS = (
    Column("time", "s", "time_s"),
    Column("size", "bytes", "bytes", drop=1),
    Column("share", "%", "share", blank=""),
    Column("nothing", text=lambda _: ""),
    *fields("fits interval_s inside"),
    Column(field="sizes", inline=True),
    Column("layer", "", "name", least=22, elided=True),
)
TABLE = Table(ROWS, COLUMNS, {"model": "m"}, caption="slowest", more=("2 more",))


def report(*tables: Table) -> Report:
    parts = (Heading("m on x", "as \\ it is"), Notes([("why", "one | two"), ("", "three")]))
    return Report(
        "gpuir.test/1",
        lambda: (*parts, *tables, Drawing(["+-+", "| |"], "boxes")),
        lambda: {"rows": tables[0] if len(tables) == 1 else tables},
    )


def written(form: str, width: int = 80, *tables: Table) -> Any:
    return FORMATS[form](report(*(tables or (TABLE,))), Terminal(width))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_text_keeps_its_width_and_drops_columns_in_their_order(width: int):
    text = written("text", width)
    assert max(map(cell_width, text.splitlines())) <= width
    assert ("size" in text) == (width > 40) and "share" in text and "nothing" not in text
    assert "1.50 ms" in text and "25 %" in text and "\x1b" not in text
    lines = text.splitlines()
    assert lines[:3] == ["m on x", "as \\ it is", ""] and "slowest" in lines and "2 more" in lines
    assert any(line.endswith("MatMul") for line in lines)  # the middle goes


def test_figures_are_set_to_the_right():
    rows = [
        line for line in written("text").splitlines() if line.strip().startswith(("1.5", "2.0"))
    ]
    assert {line.index("s  ") for line in rows} == {6}


def test_programs_read_the_same_rows_from_each_format():
    known = json.loads(written("json"))
    assert known["schema"] == "gpuir.test/1" and known["rows"][0]["sizes"] == {
        "batch": 8,
        "seq": 128,
    }
    rows = list(csv.DictReader(StringIO(written("csv"))))
    names = "model time_s bytes share fits low_s high_s batch seq name"
    assert list(rows[0]) == names.split()  # a list of records has no place in a row
    for row, record in zip(rows, known["rows"], strict=True):
        assert float(row["time_s"]) == record["time_s"] and int(row["bytes"]) == record["bytes"]
        assert row["fits"] == str(int(record["fits"])) and row["model"] == "m"
        assert row["low_s"] == (
            "" if record["interval_s"] is None else str(record["interval_s"][0])
        )
    assert rows[1]["name"] == NASTY.replace("\x1b", "?")


def test_parquet_has_types():
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'gpuir[sweep]'")
    table = parquet.read_table(BytesIO(written("parquet")))
    kinds = {f.name: str(f.type) for f in table.schema}
    assert kinds["time_s"] == "double" and kinds["batch"] == "int64" and kinds["fits"] == "bool"
    assert kinds["bytes"] == "double"  # 2^70 is no whole number of 64 bits
    assert table.column("name").to_pylist()[1] == NASTY and table.column("share").null_count == 1


def test_markdown_is_a_table_whatever_names_hold():
    text = written("markdown")
    assert text.startswith("## m on x\n\nas \\\\ it is\n\n- **why**: one \\| two\n  - three\n")
    grid = [line for line in text.splitlines() if line.startswith("|")]
    assert grid[:2] == ["| time | size | share | layer |", "| --: | --: | --: | --- |"]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in grid[:5])
    assert "```text\n+-+\n| |\n```" in text and "**boxes**" in text
    assert "<details>\n<summary>all</summary>" in written(
        "markdown", 80, replace(TABLE, folded="all")
    )


def test_html_is_one_page_without_scripts():
    text = written("html")
    assert "<script" not in text and "<i>" not in text and "\x1b" not in text
    assert not re.findall(r'(?:src|href)="', text)
    assert '<td class="figure">1.50 ms</td>' in text and '<th class="word">layer</th>' in text
    assert "<h1>m on x</h1>" in text and "<title>m on x - gpuir</title>" in text


def test_a_table_without_rows_says_what_is_below_it():
    empty = replace(TABLE, rows=())
    for form in ("text", "markdown", "html"):
        assert "2 more" in written(form, 80, empty) and "time" not in written(form, 80, empty)
    assert written("csv", 80, empty) == "\n"


def test_only_the_rows_asked_for_are_shown_and_all_are_kept():
    few = replace(TABLE, top=1)
    assert "2.00 s" not in written("text", 80, few)
    assert len(json.loads(written("json", 80, few))["rows"]) == 3


def test_bytes_are_not_written_to_a_terminal(monkeypatch: pytest.MonkeyPatch):
    import sys

    from gpuir.cli.output import check_binary

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    check_binary("parquet", "x.parquet")
    check_binary("text", None)
    with pytest.raises(UsageError, match="terminal") as error:
        check_binary("parquet", None)
    assert error.value.fix == "-o FILE.parquet"
