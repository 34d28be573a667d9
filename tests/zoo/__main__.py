import sys

from zoo.run import main

if __name__ == "__main__":
    sys.exit(main())
