"""Workloads -> timings -> table, JSON and plots: what `liger-hw bench` and `demo` run, as functions.

Of ops: `ops.py` times cases (`cases.py`) against `peers/`. Of whole models: `e2e.py` trains arms (`training.py`).
"""
