"""How the pages and the docstrings become a site: `python -m sphinx -W --keep-going docs site`; needs the extra [docs].

Everything is made offline, and the pages load nothing from elsewhere: formulas are MathML, with a font beside them.
"""

import re
from importlib import metadata
from itertools import groupby

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

project, author = "flowgrpo", "the authors of flowgrpo"
release = metadata.version("flowgrpo")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"flowgrpo {release}"
html_show_sphinx = html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["ref.python"]  # of one name several attributes may be

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False


def plain_text(_app, _what, _name, _object, _options, lines: list[str]) -> None:
    """A docstring as reStructuredText: `code` in quotes becomes code, what is indented is shown as it stands."""
    if lines and lines[0].startswith("Alias for field number"):  # of a NamedTuple, whose type says more
        lines.clear()
    shown: list[str] = []
    for indented, run in groupby(_joined(lines), key=lambda line: line.startswith(" ")):
        if indented:
            shown += ["", ".. code-block:: text", "", *run, ""]
        else:
            shown += _prose("\n".join(run)).split("\n")
    lines[:] = shown


def _joined(lines: list[str]) -> list[str]:
    """The lines, with empty ones between indented ones indented too."""
    after = [next((line for line in lines[i:] if line.strip()), "") for i in range(len(lines))]
    joined, inside = [], False
    for line, following in zip(lines, after, strict=True):
        inside = line.startswith(" ") or (inside and not line.strip() and following.startswith(" "))
        joined.append(line or "    " if inside else line)
    return joined


def _prose(text: str) -> str:
    """Text in which nothing is markup but code and *emphasis*."""
    parts = re.split(r"`([^`]+)`", text)
    for i, part in enumerate(parts):
        parts[i] = f"\\ ``{' '.join(part.split())}``\\ " if i % 2 else re.sub(r"([\\*|_`])", r"\\\1", part)
    return re.sub(r"(?<!\w)\\\*(\w[\w ]*)\\\*(?!\w)", r"*\1*", "".join(parts))


def visit_math(self, node) -> None:
    """A formula as MathML, in the line or as a block of its own."""
    inline = node.tagname == "math"
    formula = convert(node.astext(), display="inline" if inline else "block")
    self.body.append(formula if inline else f'<div class="formula">{formula}</div>\n')
    raise SkipNode


def setup(app) -> None:
    """Sphinx's hook."""
    app.connect("autodoc-process-docstring", plain_text)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
