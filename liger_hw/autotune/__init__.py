"""Finding, storing and sharing launch configurations."""
