"""Defining, launching, replaying and observing operators, for any op."""
