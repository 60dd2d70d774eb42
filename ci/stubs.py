"""What type checkers and editors read of the packages whose names load on first use: one `.pyi` beside each.

    python ci/stubs.py            write them, after a public name was added
    python ci/stubs.py --check    say which are not current; status 1 if any

The names and their homes come from each package's own table, the patch functions' signatures from the model families.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PACKAGES = (
    "liger_hw",
    "liger_hw.transformers",
    "liger_hw.transformers.functional",
    "liger_hw.chunked_loss",
    "liger_hw.distributed",
)


def stub(package: str) -> tuple[Path, str]:
    """(path, text) of one package's stub."""
    from liger_hw.transformers.models import specs

    module = importlib.import_module(package)
    functions = {spec.function_name: spec for spec in specs().values()} if package == "liger_hw.transformers" else {}
    imports, defined = [], []
    for name in module.__dir__():
        if name.startswith("_"):
            continue
        home = module.HOME[name]
        if name in functions:
            defined.append(_function(functions[name]))
        elif home.endswith(f".{name}"):
            imports.append(_import(home.rpartition(".")[0], name))
        else:
            imports.append(_import(home, name))
    if functions:
        imports += ["from liger_hw.recompute.levels import Levels", "from liger_hw.transformers.apply import Model"]
    lines = ["# Made by `python ci/stubs.py`; do not edit.", *sorted(imports)]
    lines += ["", "__version__: str"] if package == "liger_hw" else defined
    path = Path(module.__file__)
    return path.with_suffix(".pyi"), "\n".join(lines) + "\n"


def _import(home: str, name: str) -> str:
    line = f"from {home} import {name} as {name}"
    return line if len(line) <= 120 else f"from {home} import (\n    {name} as {name},\n)"


def _function(spec) -> str:
    """The signature that `apply._family_function` gives the family's patch function."""
    parameters = [
        f"{name}: Model | None = None"
        if name == "model"
        else f"{name}: bool{' | None' if default is None else ''} = {default}"
        for name, default in spec.parameters
    ]
    parameters += ["*", "activations: Levels | None = None"]
    parameters += ["**kwargs: object"] if spec.also else []
    body = "".join(f"    {parameter},\n" for parameter in parameters)
    document = f'    """Run {spec.name} models on the kernels; keywords as of `patch`."""'
    return f"\ndef {spec.function_name}(\n{body}) -> PatchReport:\n{document}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a stub is not current")
    arguments = parser.parse_args()
    stale = []
    for path, text in map(stub, PACKAGES):
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(text)
    for name in stale:
        print(f"{name}: not current; run python ci/stubs.py" if arguments.check else f"wrote {name}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
