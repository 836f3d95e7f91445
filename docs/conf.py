"""The documentation site: `sphinx-build -W --keep-going docs docs/_build`."""

from __future__ import annotations

import ast
from itertools import groupby
from typing import Any

import gpuir

project = "gpuir"
author = "the gpuir developers"
version = release = gpuir.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

smartquotes = False  # two dashes are an option, to be pasted
default_role = "literal"  # docstrings and help texts have `names`

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_type_aliases = {}

html_theme = "furo"
html_title = "gpuir"
html_copy_source = False
copybutton_prompt_text = "$ "


def show_examples_as_code(_app: Any, _ctx: Any, lines: list[str]) -> None:
    """Lines that a help text keeps as they are: `| gpuir ...`  →  a block of code."""
    shown: list[str] = []
    for is_example, block in groupby(lines, lambda line: line.startswith("| ")):
        if is_example:
            shown += [".. code-block:: text", "", *(f"   {line[2:]}" for line in block), ""]
        else:
            shown += block
    lines[:] = shown


def show_indented_as_code(*about: Any) -> None:
    """Indented paragraphs of a docstring  →  blocks of code."""
    lines: list[str] = about[-1]
    shown: list[str] = []
    for is_code, block in groupby(lines, lambda line: line.startswith("    ")):
        text = list(block)
        if is_code and (not shown or not shown[-1]):
            language = "python" if _is_python("\n".join(line[4:] for line in text)) else "text"
            shown += [f".. code-block:: {language}", ""]
        shown += text
    lines[:] = shown


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", show_indented_as_code)
    app.connect("sphinx-click-process-description", show_examples_as_code)
