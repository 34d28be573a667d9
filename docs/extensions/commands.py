"""The directive ``command``: what ``fasth`` says about itself with ``--help``."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from fasth.tools import cli


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Command(Directive):
    """``.. command:: tune`` is the output of ``fasth tune --help``."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        words = self.arguments[0].split() if self.arguments else []
        plain = {"COLUMNS": "88", "NO_COLOR": "1"}
        with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([*words, "--help"])
        block = nodes.literal_block(text=printed.getvalue().rstrip())
        block["language"] = "text"
        return [block]
