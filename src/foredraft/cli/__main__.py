"""`python -m foredraft.cli` runs the command line without the installed script."""

import sys

from foredraft.cli import main

sys.exit(main())
