"""The ops, one file each. Files that start with an underscore are what they share."""
