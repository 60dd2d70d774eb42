"""Ops of hybrid models around linear attention and short convolutions, all with a causal convolution of few taps."""
