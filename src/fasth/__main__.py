"""``python -m fasth``: the command ``fasth``, and ``fasth info`` if nothing else is asked for."""

import sys

from fasth.tools.cli import main

sys.exit(main(sys.argv[1:] or ["info"]))
