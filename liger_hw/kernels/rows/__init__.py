"""Common code of kernels over rows: tiles of rows, unaligned rows, sums over columns."""
