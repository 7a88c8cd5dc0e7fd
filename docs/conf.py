"""Sphinx: python -m sphinx -W -b html docs docs/_build/html, with sphinx, furo and myst-nb installed."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import kvjax  # noqa: E402

project = "kvjax"
author = "the kvjax authors"
copyright = "2026, the kvjax authors"
version = release = kvjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "results/*.json"]
nitpicky = False  # jaxtyping's shapes are no names that a reference could lead to

html_theme = "furo"
html_title = f"kvjax {version}"
html_static_path = ["_static"]
html_css_files = ["kvjax.css"]
html_show_sphinx = False

# Notebooks keep the outputs that they were committed with; CI executes them apart.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Example"]
python_maximum_signature_line_length = 88
