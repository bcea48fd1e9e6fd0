"""Settings of the documentation site, which `make docs` builds with Sphinx.

The source folder is the repository, so that links between pages are the same on the site and in the repository. The
table of contents comes from the lists of links in docs/index.md. docs/api/ holds generated pages, which git ignores.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from generated_pages import import_lazy_names, restructured, write_pages  # noqa: E402

project = "hybrid-engine"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/api/*.md", "benchmarks/README.md"]
exclude_patterns = [
    ".*",
    "build",
    "runs",
    "tests",
    "hybrid_engine",
    "containers",
    "ops",
    "recipes",
    "benchmarks/results",
    "docs/_site",
]
html_theme = "furo"
html_title = "hybrid-engine"
html_show_copyright = html_show_sourcelink = html_copy_source = False
default_role = "code"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure", "ref.python"]  # blocks of several languages; fields named "type"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints_format = "short"
napoleon_use_rtype = False

GROUP = re.compile(r"^## (.*)\n((?:.|\n)*?)(?=^## |\Z)", re.MULTILINE)
LINK = re.compile(r"^- \[(.*?)\]\((.*?)\.md\)", re.MULTILINE)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes a table of contents of the links that docs/index.md and docs/api/index.md list, group by group."""
    if page == root_doc:
        groups = [(title, LINK.findall(text)) for title, text in GROUP.findall(source[0])]
    elif page == "docs/api/index":
        groups = [("", LINK.findall(source[0]))]
    else:
        return
    for title, links in groups:
        entries = "\n".join(f"{name} <{path}>" for name, path in links)
        caption = f":caption: {title}\n" if title else ""
        source[0] += f"\n```{{toctree}}\n:hidden:\n{caption}\n{entries}\n```\n"


def read_docstring(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Hands docstrings to Sphinx as reStructuredText."""
    lines[:] = restructured(lines)


def add_front_page(app: Sphinx, error: Exception | None) -> None:
    """Leads from the site's own address to its landing page."""
    (Path(app.outdir) / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">')


def setup(app: Sphinx) -> None:
    """Connects the functions above to Sphinx."""
    write_pages(ROOT, ROOT / "docs" / "api")
    import_lazy_names()
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon reads the sections
    app.connect("build-finished", add_front_page)
