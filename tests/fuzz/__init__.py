"""A package, so that pytest puts tests/ on sys.path and not this folder, whose numbers.py is no standard one."""
