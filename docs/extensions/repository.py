"""Links to files of the repository, which the site has as pages of their own, so that it needs no address of one.

The pages are written for GitHub, with paths relative to the file that they stand in. A link to a file that is a page of
the site becomes a link to that page, a picture is found from where the page stands, and any other file gets a page that
shows it, or is copied if a browser shows it better as it is. The reference links to the lines of such pages, too. All
this is remembered from page to page, so the site is always built whole (``sphinx-build -E``).
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
from collections.abc import Iterator
from functools import reduce
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {".png", ".svg"}
AS_THEY_ARE = {".html", ".csv", ".json", ".jsonl"}
LANGUAGES = {".py": "python", ".hpp": "cpp", ".cpp": "cpp", ".md": "markdown", ".toml": "toml", ".cff": "yaml"}
SCHEME = "repository"  # marks a link that is ready, for MyST to leave alone

# A fenced or an inline piece of code, which has no links, or the target of a link.
_PIECES = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)|(?<=\]\()([^()\s]+)(?=\))", re.MULTILINE | re.DOTALL)
_log = logging.getLogger(__name__)
_files: dict[str, Path] = {}  # those that are linked to, by their path in the repository


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_pages", {}, "env")
    app.connect("config-inited", allow_scheme)
    app.connect("source-read", read)
    app.connect("html-collect-pages", file_pages)
    app.connect("build-finished", copy_files)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def allow_scheme(app: Sphinx, config: Any) -> None:
    schemes = dict.fromkeys(["http", "https", "mailto"], None)
    config.myst_url_schemes = {**schemes, SCHEME: {"url": "{{path}}"}}


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """The text of a page, from its own file or from the one it stands for, with links that hold on the site."""
    file = Path(app.env.doc2path(docname))
    if file.suffix != ".md":
        return
    if docname in app.config.repository_pages:
        file = ROOT / app.config.repository_pages[docname]
        app.env.note_dependency(str(file))
        source[0] = file.read_text(encoding="utf-8")
    source[0] = _PIECES.sub(lambda piece: piece[1] or link(app, docname, file, piece[2]), source[0])


def link(app: Sphinx, docname: str, file: Path, target: str) -> str:
    """What ``target``, a link in ``file``, is on the page ``docname``."""
    path, hash, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return target
    full = (file.parent / path).resolve()
    beside = Path(app.env.doc2path(docname)).parent
    pages = {ROOT / there: Path(app.env.doc2path(name)) for name, there in app.config.repository_pages.items()}
    page = pages.get(full, full)
    if app.env.path2doc(str(page)) in app.env.found_docs or page.suffix in PICTURES:
        return os.path.relpath(page, beside) + hash + anchor
    if not full.is_file() or not full.is_relative_to(ROOT):
        _log.warning("a link should lead to a file of the repository; got %s", target, location=docname)
        return target
    return SCHEME + ":" + "../" * docname.count("/") + page_of(full)


def source_link(domain: str, info: dict[str, str]) -> str | None:
    """Where the code of a name in the reference stands: what ``sphinx.ext.linkcode`` asks for."""
    try:
        found: Any = reduce(getattr, info["fullname"].split("."), importlib.import_module(info["module"]))
        found = inspect.unwrap(found.fget if isinstance(found, property) else found)
        path, (_, line) = Path(inspect.getfile(found)), inspect.getsourcelines(found)
    except (AttributeError, TypeError, OSError):  # a field of a tuple, which has no code of its own
        return None
    return f"../{page_of(path)}#line-{line}"


def page_of(path: Path) -> str:
    """The address of a file on the site."""
    name = path.relative_to(ROOT).as_posix()
    _files[name] = path
    return f"files/{name}" + ("" if path.suffix in AS_THEY_ARE else ".html")


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, path in _files.items():
        if path.suffix not in AS_THEY_ARE:
            text, language = path.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text")
            code = PygmentsBridge("html").highlight_block(text, language, lineanchors="line")
            yield f"files/{name}", {"title": name, "body": f"<h1>{escape(name)}</h1>{code}"}, "page.html"


def copy_files(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for name, path in _files.items():
            if path.suffix in AS_THEY_ARE:
                to = Path(app.outdir) / "files" / name
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
