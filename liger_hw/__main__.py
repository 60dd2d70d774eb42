"""`python -m liger_hw` is `liger-hw`, for where the console script is not on PATH."""

import sys

from .cli import main

sys.exit(main())
