"""`python -m fp4compile <command>`."""

import sys

from fp4compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
