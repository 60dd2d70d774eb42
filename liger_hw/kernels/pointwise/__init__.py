"""Activations, element by element: swiglu, fused_gate_up_swiglu, geglu, relu_squared. Core: `elementwise.py`."""
