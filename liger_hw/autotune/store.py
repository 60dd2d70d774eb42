"""Where stored configurations live."""


def layers(target):
    """(layer, entries) of everything stored for a target; nothing yet."""
    return []
