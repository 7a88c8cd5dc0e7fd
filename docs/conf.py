"""Sphinx: python -m sphinx -W --keep-going -b html docs docs/_build/html, with the extra `docs` installed."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import latex2mathml.converter  # noqa: E402
from docutils import nodes  # noqa: E402

import kvjax  # noqa: E402
from models import files  # noqa: E402

# The tutorial's pages are the notebooks, with the outputs that they were committed with.
for notebook in sorted((ROOT / "notebooks").glob("[0-9]-*.ipynb")):
    page = ROOT / "docs" / "tutorial" / notebook.name
    text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
    if not page.exists() or page.read_text(encoding="utf-8") != text:  # an unchanged page is not read again
        with files.replacing(page) as temporary:
            temporary.write_text(text, encoding="utf-8")

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
templates_path = ["_templates"]
highlight_language = "text"  # what is indented is a command, a table or a file, seldom Python
smartquotes_action = "D"  # dashes alone: a quoted word is often a value, such as "block", {"prompt": ...} or ""
default_role = "literal"  # what stands in single backticks in a docstring is code
nitpicky = False  # jaxtyping's shapes are no names that a reference could resolve to

html_theme = "furo"
html_title = f"kvjax {version}"
html_static_path = ["_static"]
html_css_files = ["kvjax.css"]
html_show_sphinx = False

html_math_renderer = "mathml"  # formulas are part of the page: no script, no network

nb_execution_mode = "off"  # python notebooks/run.py executes them
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages

# A page per public module, written to reference/api when the documentation is built.
autosummary_context = {
    "hidden": {
        "models.gguf_header": "Stored",
        "models.published": "Published",
        "models.decoder": "Layers",
    }
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # else the fields of a NamedTuple would be described twice
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False  # a shape such as "*rows S" is no emphasis
napoleon_custom_sections = ["Example"]
python_maximum_signature_line_length = 80


def as_written(app, what, name, obj, options, lines):
    """Quote names such as "window_", which rst would read as links, and keep the layout of a module's indented text."""
    lines[:] = [re.sub(r'"(\w+_)"', r"``\1``", line) for line in lines]
    if what != "module":
        return
    made, quoted = [], False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not quoted and made and not made[-1].strip():
            made += ["::", ""]
        quoted = indented or (quoted and not line.strip())
        made.append(line)
    lines[:] = made


def colon_kept(app, what, name, obj, options, lines):
    """Keep napoleon from reading what stands before a colon in a property's summary as its type."""
    if what in ("attribute", "property") and lines:
        lines[0] = f": {lines[0]}"


def field_left_out(app, what, name, obj, skip, options):
    """Leave out the fields of a NamedTuple, which its class describes."""
    return str(obj.__doc__).startswith("Alias for field number") or None


def public_name(app, env, node, contnode):
    """Lead a reference to a name of kvjax, wherever it is written, to the place where it is described."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    near = target == name and str(node.get("py:module")).startswith("kvjax")
    if node.get("refdomain") != "py" or name not in kvjax.__all__ or not (near or target.startswith("kvjax.")):
        return None
    python = env.get_domain("py")
    places = (f"kvjax.{name}", f"{getattr(getattr(kvjax, name), '__module__', None)}.{name}")  # or of a public module
    place = next((place for place in places if place in python.objects), None)
    if place is None:
        return None
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], place, node, contnode)


def short_defaults(app, what, name, obj, options, signature, returns):
    """Shorten defaults whose repr holds a function, which is no Python, so that the signature is set as others are."""
    if signature and "<function" in signature:
        signature = re.sub(r"Allocation\(name='uniform'.*?alike=True\)", "UNIFORM", signature)
        return re.sub(r"<function (\w+)(?: at 0x\w+)?>", r"\1", signature), returns
    return None


def fit_for_a_page(app, pagename, templatename, context, doctree):
    """Let long names in tables break at their signs, but no flag or interval; each picture opens in its full size."""

    def breakable(name):
        return re.sub(r"(?<=[,/])(?=.)|(?<=.)(?=[+@(])", "<wbr>", name[0])

    def cells(table):
        whole = re.sub(r"([+-]?[\d.]+%? )?\[[+-]?[\d.]+, [+-]?[\d.]+\]|(?<=>)does not(?=<)", unbroken, table[0])
        return re.sub(r'(?<=<span class="pre">)[^<]+', breakable, whole)

    def unbroken(text):
        return f'<span class="whole">{text[0]}</span>'

    body = re.sub(r"<table.*?</table>", cells, context.get("body", ""), flags=re.DOTALL)
    body = body.replace('<span class="pre">-', '<span class="pre flag">-')
    context["body"] = re.sub(r'(?<!">)<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', body)


def _formula(display):
    """Return the renderers of a formula: MathML, which browsers draw by themselves."""

    def visit(writer, node):
        writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit, None


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=_formula("inline"), block_renderers=_formula("block"))
    app.connect("autodoc-process-docstring", as_written)
    app.connect("autodoc-process-docstring", colon_kept, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", field_left_out)
    app.connect("autodoc-process-signature", short_defaults)
    app.connect("missing-reference", public_name)
    app.connect("html-page-context", fit_for_a_page)
