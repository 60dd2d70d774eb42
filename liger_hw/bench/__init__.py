"""Workloads -> timings -> table and JSON: what `liger-hw bench` runs, as functions.

Of ops: `ops.py` times cases (`cases.py`) against `peers/`. Of whole models: `e2e.py` trains arms (`training.py`).
"""
