"""`python -m liger_hw.bench ...` is `liger-hw bench ...`."""

import sys

from ..cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
