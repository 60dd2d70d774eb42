"""Define an operator, launch it, observe it. Nothing here knows an op."""
