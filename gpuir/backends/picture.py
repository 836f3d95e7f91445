"""Figures by matplotlib as files: the same bytes for the same drawing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from typing import Any

from gpuir.backends.terminal import printable
from gpuir.ir.errors import UsageError

FORMS = ("png", "svg", "pdf")
DPI = 200  # of pixels, and of what a drawing measures
STYLE = {
    "svg.hashsalt": "gpuir",  # or each file has ids of its own
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "text.parse_math": False,  # a model's names may hold dollars
}
NAMELESS = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def matplotlib(module: str = "matplotlib") -> Any:
    """matplotlib or a module of it; UsageError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            "pictures need matplotlib", found=str(error), fix="pip install 'gpuir[plot]'"
        ) from error


def picture(form: str, size: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """The figure that `draw` draws on, `size` inches wide and high, as one of `FORMS`. Names are
    shown as they are: no mathematics between dollars, a box for a letter that no font has, `?` for
    what cannot be seen."""
    out = BytesIO()
    with matplotlib().rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = matplotlib("matplotlib.figure").Figure(size, DPI, layout="constrained")
        draw(figure)
        for text in figure.findobj(matplotlib("matplotlib.text").Text):
            text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
        figure.savefig(out, format=form, dpi=DPI, metadata=NAMELESS[form])
    return out.getvalue()
