"""`liger-hw hub`: print the folder that the `kernels` package loads the layers of liger_hw from.

    LocalLayerRepository(Path("FOLDER"), layer_name="RMSNorm")         kernels
    KernelConfig({"RMSNorm": "FOLDER:RMSNorm"}, use_local_kernel=True) transformers

`liger_hw.kernel_config()` writes that configuration for every layer of a model.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", action="store_true", help="print the layers instead, each with the name it serves")


def run(arguments: argparse.Namespace) -> int:
    from ..hub import LAYERS, REPOSITORY

    if not arguments.layers:
        print(REPOSITORY)
        return 0
    for name, layers in LAYERS.items():
        print(f"{name:<20} {' '.join(layers)}")
    return 0
