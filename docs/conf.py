"""The documentation site: `sphinx-build -W --keep-going docs docs/_build`."""

from __future__ import annotations

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

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_type_aliases = {}

html_theme = "furo"
html_title = "gpuir"
html_copy_source = False
copybutton_prompt_text = "$ "
