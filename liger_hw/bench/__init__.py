"""The code behind `liger-hw bench`: `ops.py` times the cases of ops (`cases.py`) against `peers/`."""
