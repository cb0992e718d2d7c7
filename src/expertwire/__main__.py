"""`python -m expertwire`: the same as the `expertwire` command."""

import sys

from expertwire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
