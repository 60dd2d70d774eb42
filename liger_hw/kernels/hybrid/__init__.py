"""What linear attention and short convolutions of hybrid models share: a causal convolution of a few taps."""
