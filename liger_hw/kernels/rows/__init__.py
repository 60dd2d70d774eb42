"""What kernels over rows share: tiles of rows, rows that begin anywhere, sums over columns."""
