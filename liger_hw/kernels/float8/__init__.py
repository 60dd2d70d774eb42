"""Training with products in FP8: quantisation to FP8 with scales that are powers of two, and a linear layer of it."""
