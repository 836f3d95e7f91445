"""`gpuir fit`: the tile model fitted again to measurements, with its backtests."""

from __future__ import annotations

from pathlib import Path

import click

from gpuir.cli import checkout
from gpuir.cli.options import SEED
from gpuir.cli.output import check_ahead, note, write


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="The weights, as JSON."
)
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="Of the rows drawn and the network."
)
@click.option(
    "--without", default="", metavar="GPU", help="Leave the measurements of a GPU out of the fit."
)
@click.option(
    "--quick", is_flag=True, help="No backtests, hence no intervals: an eighth of the work."
)
def command(files: tuple[Path, ...], out: Path, seed: int, without: str, quick: bool) -> None:
    """Fit the cost model to tables of measured kernels.

    \b
    gpuir fit gemm.parquet conv.parquet -o tile2.json

    Beside the weights it writes their card: what was fitted on, and how far off the model was on
    GPUs and shapes that it was not fitted on. The same files and seed give the same weights.
    Needs gpuir[torch,eval].
    """
    from gpuir.cost.learned import written
    from gpuir.fit import backtest, learn
    from gpuir.fit.card import card
    from gpuir.fit.tables import read_table
    from gpuir.ir.errors import UsageError
    from gpuir.targets.load import load_target

    check_ahead(str(out))
    described = out.with_suffix(".md")
    if out == described:
        raise UsageError(
            "the file of the card would overwrite the file of the weights", fix="-o NAME.json"
        )
    left_out = load_target(without).device if without else ""
    learn.load_torch()  # that it is missing is said before the tables are read
    tables = [read_table(file, checkout.readers()) for file in files]
    batches = [b for t in tables for b in t.batches if b.target.device != left_out]
    model = learn.fit(batches, seed=seed, watch=note)
    if not model:
        skipped = {reason for t in tables for reason in t.skipped}
        raise UsageError(
            "the tables have no rows to fit to",
            where=", ".join(map(str, files)),
            expected="measurements well above the launch floor"
            + (f", of other GPUs than {without}" if without else ""),
            found="; ".join(sorted(skipped)) or f"{sum(t.count for t in tables):,} rows",
        )
    backtests = backtest.Backtests()
    if not quick:
        backtests = backtest.backtests(batches, seed=seed, watch=note)
        model = backtest.with_intervals(model, backtests)
    write(str(out), written(model))
    text = card(out.name, tables, model, backtests, seed=seed, without=left_out)
    write(str(described), text)
