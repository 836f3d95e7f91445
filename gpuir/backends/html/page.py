"""One HTML file: text and tables as written here, charts and the kernel table by libraries that the
file brings along, compressed."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpuir.backends.analysis import (
    answers,
    comparison,
    coverage,
    head,
    holders,
    of_what,
    run_names,
)
from gpuir.backends.html.data import data
from gpuir.backends.html.plain import table_html
from gpuir.backends.terminal import Terminal, printable
from gpuir.ir.errors import UsageError
from gpuir.report.answer import Answer
from gpuir.report.table import Table
from gpuir.report.units import percent, plain, quantity, rate

HERE = Path(__file__).parent
LIBRARIES = {  # of the browser: where the package from PyPI holds it
    "plotly": ("plotly", "package_data/plotly.min.js"),
    "datatables": ("itables", "html/dt_bundle.js"),
}
UNSAFE = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&'\u2028\u2029"})


def html(summaries: Sequence[Answer], _: Terminal) -> str:
    """The page: the same text for the same runs. It opens from disk, and asks for nothing."""
    libraries = {name: _library(*place) for name, place in LIBRARIES.items()}
    jinja = _installed("jinja2")
    templates = jinja.Environment(
        loader=jinja.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja.StrictUndefined,
        finalize=_seen,
    )
    return templates.get_template("page.html").render(
        title=f"{summaries[0].model} {of_what(summaries)}",
        runs=[_run(n, s) for n, s in zip(run_names(summaries), summaries, strict=True)],
        comparison=_table(comparison(summaries)) if len(summaries) > 1 else None,
        data=_script_safe(data(summaries)),
        libraries=libraries,
        style=(HERE / "page.css").read_text(),
        script=(HERE / "page.js").read_text(),
    )


def _seen(value: Any) -> Any:
    """What a model's names hold that cannot be seen, shown as such; our own parts are `safe`."""
    return printable(value) if type(value) is str else value


def _installed(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(module) from error


@cache
def _library(package: str, path: str) -> str:
    """A library's script, compressed, as base64."""
    spec = find_spec(package)
    script = Path(spec.origin).parent / path if spec and spec.origin else None
    if script is None or not script.exists():
        raise _missing(package)
    return b64encode(gzip.compress(script.read_bytes(), mtime=0)).decode()


def _missing(package: str) -> UsageError:
    return UsageError(
        f"the HTML report needs {package}, which is not installed, or not in a version it knows",
        fix="pip install 'gpuir[html]'",
    )


def _script_safe(value: Any) -> str:
    """JSON that ends no script element, whatever a model's names hold."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(UNSAFE)


def _run(name: str, s: Answer) -> dict[str, Any]:
    return {
        "name": name,
        "device": s.device.title or s.device.name,
        "tiles": list(_tiles(s)),
        "facts": [*(line for line in answers(s) if line[0] != "latency"), *head(s)],
        "coverage": _table(coverage(s)),
        "assumed": s.assumed,
        "warnings": s.warnings,
        "holders": _table(holders(s.memory, 20)),
        "numbers": [(n.field, _number(n.value, n.unit), n.source) for n in s.device.numbers],
        "says": _descriptions(s),
    }


def _table(table: Table) -> str:
    columns, rows = table.cells()
    return table_html(columns, rows) if rows else ""


def _tiles(s: Answer) -> list[tuple[str, str, str]]:
    """What a reader came for: label, figure, remark."""
    low, high = s.interval or (None, None)
    ends = f"{quantity(low, 's')} to {quantity(high, 's')} in 80 %" if low and high else ""
    slowest = max(s.bounds, key=lambda pair: pair[1])
    waits = percent(s.timeline.gaps_s, s.latency_s)
    return [
        ("Latency", quantity(s.latency_s, "s", 4), ends),
        _rate(s),
        ("Waiting for the host", waits, f"of the time; profile {s.profile}"),
        ("Kernels' time", quantity(s.device_s, "s"), f"{s.launches:,} launches"),
        ("Bound by", slowest[0] if slowest[1] else "-", percent(slowest[1], s.device_s)),
        ("Memory at the peak", quantity(s.memory.peak_bytes, "bytes"), _fits(s)),
    ]


def _rate(s: Answer) -> tuple[str, str, str]:
    """Of items where the batch is known, else of runs."""
    if not s.latency_s:
        return "Runs a second", "nothing runs", ""
    runs = rate(1 / s.latency_s)
    if not s.batch:
        return "Runs a second", runs, ""
    remark = f"{runs} runs/s of batch {s.batch:,}"
    return "Items a second", rate(s.batch / s.latency_s), remark


def _fits(s: Answer) -> str:
    spare = s.memory.spare_bytes
    if spare is None:
        return ""
    room = quantity(abs(spare), "bytes")
    return f"fits, {room} to spare" if spare >= 0 else f"does not fit, {room} short"


def _number(value: str | float | bool | tuple[str, ...], unit: str) -> str:
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, tuple):
        return ", ".join(value)
    return quantity(value, unit, 4) if unit else plain(value)


def _descriptions(s: Answer) -> dict[str, str]:
    """What each chart shows, in words, for those who do not see it."""
    kinds = ", ".join(f"{t.kind} {percent(t.time_s, s.device_s)}" for t in s.totals[:6])
    held = sorted(s.memory.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{kind} {quantity(n, 'bytes')}" for kind, n in held if n)
    return {
        "roofline": f"{len(s.slowest()):,} kernels, {quantity(s.flops, 'flop')} and "
        f"{quantity(s.bytes, 'bytes')} read and written in all; the kernel table has each one.",
        "time": f"The kernels' time by kind: {kinds}.",
        "timeline": f"{s.launches:,} launches in {quantity(s.latency_s, 's', 4)}; the device waits "
        f"for the host for {quantity(s.timeline.gaps_s, 's')}.",
        "memory": f"{quantity(s.memory.peak_bytes, 'bytes')} at the peak: {parts}.",
    }
