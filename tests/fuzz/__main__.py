import sys

from fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
