"""Activation memory as a dial."""
