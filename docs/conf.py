"""How Sphinx builds the site. Run: make docs, which needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

import fasth

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from repository import source_link

project = "fasth"
author = "the fasth authors"
copyright = author
release = version = fasth.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    # in the folder extensions
    "repository",
    "docstrings",
    "commands",
]
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|typing|pathlib|nflows|normflows|zuko|FrEIA)\..*"),  # inventories need a network
    (r"py:.*", r"Tensor|fasth\.(reflections|nn\.held_weight)\..*|fasth\..*\.(M|Self|Layer)"),  # internals
]
default_role = "literal"
exclude_patterns = ["extensions", "examples"]

# Anchors of headings as on GitHub, where the pages are read, too.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page may begin with a small heading

# Pages of the site that are files elsewhere in the repository. Their own file says so to who reads it on GitHub.
repository_pages = {
    "mathematics": "src/fasth/reflections/README.md",
    "core": "native/README.md",
    "kernels": "src/fasth/reflections/triton/README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}

linkcode_resolve = source_link
autodoc_inherit_docstrings = False  # those of torch are written for other tools
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_use_param = False  # "input_size, …, dtype" is one entry
napoleon_use_rtype = False
napoleon_custom_sections = ["Shape", "Cost"]

html_theme = "furo"
pygments_dark_style = "github-dark"
smartquotes_action = "D"  # dashes alone: "compact" is a string
html_title = f"fasth {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_ignore = [r"(\.\./)*files/"]  # of the repository: check_links.py sees to these
