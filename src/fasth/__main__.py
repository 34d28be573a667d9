"""``python -m fasth``: the command ``fasth``; without arguments ``fasth info``."""

import sys

from fasth.tools.cli import main

sys.exit(main(sys.argv[1:] or ["info"]))
