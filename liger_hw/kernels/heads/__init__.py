"""Losses of hidden states and a head's weight, without all logits at once: the fused_linear ops. Core: `linear_head.py`."""
