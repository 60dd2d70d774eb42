"""Define an operator, launch it, replay it, observe it. Nothing here knows an op."""
