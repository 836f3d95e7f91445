"""Tables of embeddings, and distributions of indices, as files state them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuir.cost.lookup import classes_of
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ops.spread import Spread
from gpuir.plan.tables import read_spread, read_tables

LOCALITY = Path(__file__).parents[3] / "shared/data/kernels/embedding_locality.csv"


def test_one_meaning_in_three_formats(tmp_path: Path):
    tables = [
        {"name": "users", "rows": 1000, "width": 64, "lookups": 2.5, "indices": "zipf:1.05"},
        {"rows": 10, "width": 8, "dtype": "f16", "count": 2},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"tables": tables}))
    (tmp_path / "l.json").write_text(json.dumps(tables))
    (tmp_path / "t.toml").write_text(
        '[[tables]]\nname = "users"\nrows = 1000\nwidth = 64\nlookups = 2.5\n'
        'indices = "zipf:1.05"\n'
        '[[tables]]\nrows = 10\nwidth = 8\ndtype = "f16"\ncount = 2\n'
    )
    (tmp_path / "t.csv").write_text(
        "name,num_embeddings,embedding_dim,pooling,dtype,indices,count\n"
        "users,1000,64,2.5,,zipf:1.05,\n,10,8,,f16,,2\n"
    )
    found = [read_tables(tmp_path / name) for name in ("t.json", "l.json", "t.toml", "t.csv")]
    assert all(f == found[0] for f in found)
    users, *few = found[0]
    assert users.spread == Spread(1.05) and users.nbytes == 256_000
    assert [t.name for t in few] == ["table2.0", "table2.1"] and few[0].nbytes == 160


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"rows": 10}]', "a table must have the field width"),
        ('[{"rows": 10, "widht": 4}]', "a table has no field 'widht'"),
        ('[{"rows": 0, "width": 4}]', "rows is not a valid size"),
        ('[{"rows": 1.5, "width": 4}]', "rows is not a valid size"),
        ('[{"rows": true, "width": 4}]', "rows is not a valid size"),
        ('[{"rows": 10, "width": 4, "lookups": -1}]', "lookups is not a valid size"),
        ('[{"rows": 10, "width": 4, "dtype": "f31"}]', "no dtype 'f31'"),
        (
            '[{"rows": 10, "width": 4, "indices": "zip:1"}]',
            "no distribution of indices",
        ),
        ('[{"rows": 9, "width": 4, "name": "a"}, {"rows": 9, "width": 4, "name": "a"}]', "'a'"),
        ('[{"rows": 9, "width": 4, "count": 1000000}]', "too many tables"),
        ('[{"rows": 9, "width": 4, "indices": "zip:1"}]', "table 1: indices: no distribution"),
        ('[{"rows": 9, "num_embeddings": 5, "width": 4}]', "rows is given twice"),
        ('[{"rows": 9, "width": 4, "name": null}]', "name is text"),
        ('[{"rows": 9, "width": 4, "indices": ["zipf:1"]}]', "indices is text"),
        ("[]", "the file has no tables"),
        ("[3]", "no table"),
        ("3", "no list of tables"),
        ("{", "not a JSON file"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str):
    (path := tmp_path / "t.json").write_text(text)
    with pytest.raises(GpuirError, match=message):
        read_tables(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows,width\n100,64,3\n", r"t.csv:2: a line has more cells than the first line"),
        ("rows,width,rows\n100,64,3\n", "two columns have the name 'rows'"),
        ("rows,num_embeddings,width\n100,100,64\n", "rows is given twice"),
        ("rows,width\n100\n", "a table must have the field width"),
        ("rows,width\n", "the file has no tables"),
        ('rows,width\n"' + "1" * 200_000 + '",3\n', "not a CSV file"),
    ],
)
def test_what_is_wrong_in_a_csv_is_said(tmp_path: Path, text: str, message: str):
    (path := tmp_path / "t.csv").write_text(text)
    with pytest.raises(GpuirError, match=message) as error:
        read_tables(path)
    assert "fix:" in str(error.value)


def test_counts_of_rows(tmp_path: Path):
    counts = [1000, 10, 0, 10, 980, *[0] * 95]
    (tmp_path / "c.csv").write_text(
        "row,count\n" + "".join(f"{i},{c}\n" for i, c in enumerate(counts))
    )
    spread = read_spread("c.csv", tmp_path)
    classes = classes_of(spread, 100)
    assert classes.named(1e9) == pytest.approx(4, abs=0.01)
    assert (classes.rows * classes.p).max() == pytest.approx(0.5)
    (tmp_path / "n.csv").write_text("count\n0\n")
    with pytest.raises(UsageError, match="the counts are all 0"):
        read_spread("n.csv", tmp_path)


def test_shares(tmp_path: Path):
    (tmp_path / "s.csv").write_text("row_share,index_share\n0.9,0.1\n0.1,0.9\n")
    few, many = read_spread("s.csv", tmp_path).shares
    assert few == pytest.approx((0.1, 0.9)) and many == pytest.approx((0.9, 0.1))
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no distribution of indices"):
        read_spread("x.csv", tmp_path)


@pytest.mark.skipif(not LOCALITY.exists(), reason="the measurements are not here")
def test_shares_by_reuse_name_the_rows_that_the_batch_did():
    """Drawn as often as the batch draws, two thirds of the rows and more: a row that was drawn once
    in it is not drawn at all in a third of such batches."""
    spread = read_spread(f"{LOCALITY}#fbgemm_t856_bs65536")
    rows, lookups = 128_435_723, 887_017_990
    named = classes_of(spread, rows).named(lookups)
    assert 0.65 * rows < named < rows
    with pytest.raises(UsageError, match="the file has several lines, and it is not"):
        read_spread(str(LOCALITY))
