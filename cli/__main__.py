"""`python -P -m llmc.cli` is the `llmc` command."""

import sys

from llmc.cli.main import main

sys.exit(main())
