"""Public names that load on first use (PEP 562), so that importing a package loads neither torch nor transformers.

Type checkers read the `.pyi` file beside each such package, which `python ci/stubs.py` writes from the same tables.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Callable, Mapping


def lazy(module: str, home: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """(`__all__`, `__getattr__`, `__dir__`) for `module`, whose public names other modules define.

    home: name -> full name of the module that defines it, or, for a submodule, its full name. A name with a leading
    underscore can be imported but is not listed.
    """
    public = [name for name in home if not name.startswith("_")]

    def find(name: str) -> Any:
        if name.startswith("__"):  # the import system looks up __path__
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in home:
            from difflib import get_close_matches

            near = get_close_matches(name, public, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        definition = import_module(home[name])
        value = definition if home[name].endswith(f".{name}") else getattr(definition, name)
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:
        return sorted({*public, *(name for name in vars(sys.modules[module]) if name.startswith("__"))})

    return public, find, names
