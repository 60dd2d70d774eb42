"""What `liger-hw bench` runs: `ops.py` times the cases of ops (`cases.py`) against `peers/`."""
