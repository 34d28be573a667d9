import sys

from fasth.reproduce.study.command import main

if __name__ == "__main__":
    sys.exit(main())
