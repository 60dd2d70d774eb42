"""Normalisations over the last dimension, or over groups of channels; most share one forward and one backward core."""
