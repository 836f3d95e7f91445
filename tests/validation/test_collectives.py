"""`gpuir eval collectives`, and the fit of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gpuir.cli.main import main
from gpuir.cost.kriging import parsed
from gpuir.fit import collectives as fit

TABLE = Path(__file__).parents[3] / "shared/data/kernels/collectives.parquet"
HEAD = "system,source,library,library_version,impl,mode,op,dtype,world_size,gpus_per_node,bytes,"
HEAD += "latency_us,n_rep,rep_spread\n"


def row(system="h100_sxm", op="all_reduce", dtype="fp16", ranks=8, nbytes=1024, us=16.0, **more):
    library, mode = more.get("library", "nccl"), more.get("mode", "eager_loop")
    head = f"{system},x,{library},2.29.2,nccl-tests,{mode},{op},{dtype},{ranks}"
    return f"{head},{more.get('near', ranks)},{nbytes},{us},1,{more.get('spread', 0)}\n"


def table(tmp_path, rows):
    path = tmp_path / "c.csv"
    path.write_text(HEAD + "".join(rows))
    return str(path)


def curves(system, ranks, factor=1.0):
    """A made-up system: 8 us and 100 GB/s."""
    return [
        row(system, ranks=n, nbytes=1 << e, us=factor * (8 + 2 * (n - 1) / n * (1 << e) / 1e5))
        for n in ranks
        for e in range(10, 30, 2)
    ]


def test_scores_by_system_and_collective(tmp_path):
    rows = [row(), row(us=17.0, spread=0.5), row(op="alltoall", us=8.0, nbytes=1 << 25)]
    rows += [row("vidur_a100_dgx", mode="kernel_trace", near=1, ranks=2, us=60.0)]
    rows += [row("sparkle"), row(op="gather"), row(library="oneccl"), row(us=0)]
    path, out = table(tmp_path, rows), tmp_path / "s.json"
    done = CliRunner().invoke(main, ["eval", "collectives", path, "--json", str(out)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())  # a long path is wrapped
    assert "4 of 8 rows" in said and "the library oneccl is not modelled" in said
    text = json.loads(out.read_text())
    assert text["kind"] == "collectives"
    (one,) = [
        r
        for r in text["rows"]
        if (r["op"], r["system"], r["band"]) == ("all_reduce", "h100_sxm", "all")
    ]
    assert (one["n"], one["steady_n"], one["target"], one["protocol"]) == (
        *(2, 1, "dgx-h100"),
        "shipped",
    )
    assert one["mape"] < 15 and one["coverage"] >= 50
    assert [r["nodes"] for r in text["rows"] if r["system"] == "vidur_a100_dgx"] == [2, 2]
    assert sum(text["files"][0]["skipped"].values()) == 4


def test_trays_of_a_rack_are_one_domain(tmp_path):
    """A tray of GB200 holds four GPUs; NVLink joins the trays, no network."""
    rows = [row("gb200", near=4, ranks=8), row("h100_sxm", near=8, ranks=16)]
    rack, nodes = sorted(fit.read(table(tmp_path, rows)).series, key=lambda s: s.system)
    assert (rack.system, rack.curve.nodes, rack.near) == ("gb200", 1, 8)
    assert nodes.curve.nodes == 2


def test_protocols_leave_out_what_they_say(tmp_path):
    rows = curves("h100_sxm", (2, 4, 8)) + curves("a100_sxm", (2, 4, 8), 2.0)
    series = fit.read(table(tmp_path, rows)).series
    assert len(series) == 6
    sizes = fit.unseen_sizes(series)
    assert sum(len(t) for _, t in sizes) == len(rows)
    ranks = fit.unseen(series, fit.by_ranks(series))
    systems = fit.unseen(series, fit.by_system)
    means = [
        np.mean(np.concatenate([np.abs(np.log(t / s.time_s)) for s, t in p]))
        for p in (fit.shipped(series, fit.fit(series)), sizes, ranks, systems)
    ]
    assert means[0] < means[1] < means[3] and means[0] < means[2] < means[3]
    # a system left out is predicted by the other one alone, which is twice as fast or slow
    off = np.concatenate([np.log(t / s.time_s) for s, t in systems if s.system == "a100_sxm"])
    assert np.median(off) < -0.3


def test_left_out_is_as_if_never_read(tmp_path):
    rows = curves("h100_sxm", (2, 4, 8)) + curves("a100_sxm", (2, 4, 8), 2.0)
    series = fit.read(table(tmp_path, rows)).series
    points = fit.thinned([s for s in series if s.system == "h100_sxm"])
    field = fit.added(points, fit.fit_factors(points), fit.process_of(points))
    alone = fit.shipped([s for s in series if s.system == "a100_sxm"], field)
    out = [x for x in fit.unseen(series, fit.by_system) if x[0].system == "a100_sxm"]
    for (_, a), (_, b) in zip(alone, out, strict=True):
        assert b == pytest.approx(a, rel=1e-6)


def test_a_system_far_off_hardly_moves_the_factors(tmp_path):
    two = curves("h100_sxm", (2, 4, 8)) + curves("a100_sxm", (2, 4, 8))
    far = curves("b200_sxm", (2, 4, 8), 30.0)
    without, with_it = (fit.read(table(tmp_path, rows)).series for rows in (two, two + far))
    a, b = (np.concatenate(fit.formula(without, fit.fit_factors(s))) for s in (without, with_it))
    assert np.abs(np.log(b / a)).max() < 0.2  # the mean of three would be off by log(30) / 3


def test_weights_are_fitted_and_read(tmp_path):
    path, out = table(tmp_path, curves("h100_sxm", (2, 8)) + curves("a100_sxm", (2, 8))), "w.json"
    out = tmp_path / "w.json"
    done = CliRunner().invoke(main, ["eval", "collectives", path, "--fit", str(out)])
    assert done.exit_code == 0, done.output
    field = parsed(out.read_text())
    assert set(field.ends) == {"size", "ranks", "system"} and len(field.knots.curves) == 4
    again = tmp_path / "again.json"
    CliRunner().invoke(main, ["eval", "collectives", path, "--fit", str(again)])
    assert again.read_text() == out.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'FILES...'"),
        (["pyproject.toml"], ""),
        (["--unseen", "moons", "x"], "moons"),
    ],
)
def test_wrong_input_is_refused(arguments, says):
    done = CliRunner().invoke(main, ["eval", "collectives", *arguments])
    assert done.exit_code == 2 and says in done.output


def test_a_table_of_something_else_is_refused(tmp_path):
    (tmp_path / "c.csv").write_text("a,b\n1,2\n")
    done = CliRunner().invoke(main, ["eval", "collectives", str(tmp_path / "c.csv")])
    assert done.exit_code == 2 and "not a table of collectives" in done.output


def test_shipped_weights_on_the_rows_they_were_fitted_to():
    """Of one node 2 % off in the mean, kernels of a profile apart."""
    if not TABLE.exists():
        pytest.skip("the measured tables are not beside this checkout")
    from gpuir.cost.collective import weights

    series = [
        s for s in fit.read(TABLE).series if s.curve.nodes == 1 and s.curve.mode != "kernel_trace"
    ]
    off = np.concatenate([np.abs(t / s.time_s - 1) for s, t in fit.shipped(series, weights())])
    assert len(off) > 5000 and off.mean() < 0.03
