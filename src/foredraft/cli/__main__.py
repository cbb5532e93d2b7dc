"""`python -m foredraft.cli`: the command line without its script."""

import sys

from foredraft.cli import main

sys.exit(main())
