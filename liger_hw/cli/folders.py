"""`shim` and `hub`: the folders from which other programs load liger_hw."""

from __future__ import annotations

import argparse
import os

from .. import compat, env
from ..hub import LAYERS, REPOSITORY
from . import UsageError


def shim_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="say whether it is in use here; exit status 1 if not")


def run_shim(arguments: argparse.Namespace) -> int:
    """`liger-hw shim`: print the folder that answers `import liger_kernel` with liger_hw.

        PYTHONPATH=$(liger-hw shim) python train.py

    For programs that import liger-kernel: `TrainingArguments(use_liger_kernel=True)`, TRL, Axolotl, LLaMA-Factory.
    """
    if arguments.check:
        print(used := compat.use())
        return 0 if used == "in use" else 1
    real = compat.installed()
    if real is not None and not env.LIGER_HW_SHADOW_LIGER:
        raise UsageError(
            f"liger-kernel {real} is installed here and would be hidden. "
            "Uninstall it, or set LIGER_HW_SHADOW_LIGER=1 for this command and for the program"
        )
    print(os.pathsep.join([str(compat.PATH), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return 0


def hub_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", action="store_true", help="print the names in transformers, each with our layers")


def run_hub(arguments: argparse.Namespace) -> int:
    """`liger-hw hub`: print the folder from which the `kernels` package loads the layers of liger_hw.

        LocalLayerRepository(Path("FOLDER"), layer_name="RMSNorm")         kernels
        KernelConfig({"RMSNorm": "FOLDER:RMSNorm"}, use_local_kernel=True) transformers

    `liger_hw.kernel_config()` writes that configuration for every layer of a model.
    """
    if not arguments.layers:
        print(REPOSITORY)
        return 0
    for name, layers in LAYERS.items():
        print(f"{name:<20} {' '.join(layers)}")
    return 0
