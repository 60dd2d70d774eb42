"""Model families: one small spec a file. `FAMILIES` lists them; a new family is a new file and a name here."""

from __future__ import annotations

FAMILIES = ("llama", "mistral")
"""Family names: `models/<name>.py` defines `SPEC` and `apply_liger_kernel_to_<name>`."""
