"""`python -m liger_hw.bench ...` is `liger-hw bench ...`."""

import sys

from ..cli import COMMANDS, main

COMMANDS.setdefault("bench", "the ops against their peers; registry, host and end-to-end costs")
sys.exit(main(["bench", *sys.argv[1:]]))
