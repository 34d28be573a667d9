"""Docstrings as reStructuredText: formulas in them are plain text, and types are known by their public names."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import fasth
import fasth.flows
from fasth import parametrizations, spectrum

# What stays: literals, lines of a session, words in bold and in italics. What is escaped: * and | of formulas, and a _
# at the end of a name.
_STAYS = r"``.+?``|^ *(?:>>>|\.\.\.) [^\n]*|\*\*\w[^*]*\*\*|(?<=\s)\*\w[^*]*\w\*"
_PIECES = re.compile(rf"({_STAYS})|([*|]|(?<=\w)_(?!\w))", re.MULTILINE | re.DOTALL)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", escape, priority=400)  # before napoleon, which makes markup of its own
    app.connect("missing-reference", public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def escape(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    text = _PIECES.sub(lambda piece: piece[1] or "\\" + piece[2], "\n".join(lines))
    lines[:] = text.split("\n")
    if what == "property":
        lines.insert(0, "\\")  # nothing, or napoleon would take what stands before a colon in the first line for a type


def public_name(app: Sphinx, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """A link to ``fasth.SVD`` for the type ``fasth.operators.svd.SVD``; a type of another library is just its name."""
    target = node.get("reftarget", "")
    name = _PUBLIC.get(target) if node.get("refdomain") == "py" else None
    if name and name != target:
        return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
    return None


def _public() -> dict[str, str]:
    """The public name of each class, by the one of the module that it is defined in, and by its own."""
    found = {}
    for module in (fasth, spectrum, parametrizations, fasth.flows):
        for name in module.__all__:
            member = getattr(module, name)
            if isinstance(member, type) and name not in found:
                found[name] = found[f"{member.__module__}.{member.__qualname__}"] = f"{module.__name__}.{name}"
    return found


_PUBLIC = _public()
