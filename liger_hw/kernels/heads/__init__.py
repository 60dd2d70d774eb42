"""Losses of hidden states and a head's weight that never hold all logits; `linear_head.py` is their core."""
