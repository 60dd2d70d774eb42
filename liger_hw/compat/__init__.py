"""A package `liger_kernel` for code written for Liger Kernel 0.8.5, which runs liger_hw.

    PYTHONPATH=$(liger-hw shim) python train.py      # TrainingArguments(use_liger_kernel=True), TRL, Axolotl, ...

The package is in the folder that `liger-hw shim` prints. `_Finder` makes its modules when they are imported. Each looks
up its names in modules of liger_hw (`MODULES`). See `refuse_to_shadow` for an installed Liger.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import env
from ..kernels import home_of
from .replaced import replacement

NAME = "liger_kernel"
_TRANSFORMERS = "liger_hw.transformers"
_MISSING = object()
VERSION = "0.8.5"
"""The version of Liger Kernel whose modules and names are provided."""
PATH = Path(__file__).parent / "path"
"""The folder for PYTHONPATH."""
MODULES = {
    "": "compat.impls",
    "transformers": "compat.checked transformers transformers.functional compat.modules",
    "transformers.functional": "compat.checked transformers.functional transformers compat.functions",
    "transformers.cross_entropy": "compat.checked kernels.losses.cross_entropy compat.functions",
    "transformers.fused_linear_cross_entropy": (
        "compat.checked kernels.heads.fused_linear_cross_entropy compat.functions"
    ),
    "transformers.monkey_patch": (
        "compat.checked transformers compat.monkey_patch transformers.functional compat.modules"
    ),
    "transformers.fsdp": "compat.fsdp",
    "transformers.trainer": "compat.orpo_trainer",
    "transformers.trainer.orpo_trainer": "compat.fsdp compat.orpo_trainer",  # Axolotl takes `_FSDPForwardRedirection`
    "transformers.mlp": "compat.modules",
    "transformers.grpo_loss": "transformers.grpo_loss compat.grpo chunked_loss.grpo_loss",
    "transformers.experimental": "kernels.embedding.embedding",
    "transformers.model": "",
    "transformers.model.loss_utils": "compat.loss_utils",
    "transformers.model.output_classes": "compat.forwards",
    "ops": "compat.functions compat.grpo",
    "ops.mlp": "compat.functions",
    "ops.tiled_mlp": "compat.functions kernels.pointwise.tiled_mlp",
    "ops.experimental": "",
    "ops.backends": "",
    "ops.backends.registry": "compat.impls",
    "ops.mhc": "compat.functions",
    "ops.grpo_loss": "chunked_loss compat.grpo",
    "ops.utils": "compat.utils",
    "chunked_loss": "chunked_loss",
    **{f"chunked_loss.{name}_loss": "chunked_loss.preference compat.loss_bases" for name in ("cpo", "simpo", "orpo")},
    "chunked_loss.jsd_loss": "chunked_loss.distillation compat.loss_bases",
    "chunked_loss.cosine_similarity_loss": "chunked_loss.distillation compat.loss_bases",
    "functional": "compat.functional",
    "megatron": "megatron",
    "utils": "compat.utils",
    **{f"transformers.{name}": "transformers" for name in ("auto_model", "mhc", "tiled_mlp", "trainer_integration")},
    **{
        f"chunked_loss.fused_linear_{name}": "compat.loss_bases"
        for name in ("distillation", "ppo", "preference", "unpaired_preference")
    },
    **{f"megatron.{name}": "megatron" for name in ("cross_entropy", "monkey_patch", "rms_norm", "swiglu")},
}
"""Module of liger_kernel -> modules of liger_hw that have its names. `homes` adds the modules of single ops."""


def use() -> str:
    """`in use` if `import liger_kernel` imports this package, else `not in use: ` and the reason."""
    try:
        file = importlib.import_module(NAME).__file__
    except ImportError as error:
        return f"not in use: {error}"
    return "in use" if str(PATH) in str(file) else f"not in use: {NAME} is {file}"


def homes(name: str) -> tuple[str, ...] | None:
    """Modules of liger_hw that have the names of `liger_kernel.<name>`; None if there is no such module."""
    group, _, op = name.partition(".")
    home: str | None
    if name in MODULES:
        modules = MODULES[name]
    elif family := _family(name):
        from .forwards import classes_of

        if not classes_of(family):
            return None
        modules = "compat.forwards compat.loss_utils"
    elif group in ("transformers", "ops") and (home := home_of(op.removeprefix("experimental."))):
        home = home.removeprefix("liger_hw.")
        more = "transformers compat.modules compat.functions"
        modules = f"{home} {more}" if group == "transformers" else f"compat.functions {home}"
    elif group == "chunked_loss" and re.fullmatch("[a-z]\\w*", op) and importlib.util.find_spec(f"liger_hw.{name}"):
        modules = f"{name} compat.loss_bases"
    else:
        return None
    return tuple(f"liger_hw.{module}" for module in modules.split())


def _family(name: str) -> str:
    """The family of a module `transformers.model.<family>`, "" for other modules."""
    package, _, family = name.rpartition(".")
    return family if package == "transformers.model" else ""


def refuse_to_shadow() -> None:
    """Raise `ImportError` if a real liger-kernel is installed too, unless LIGER_HW_SHADOW_LIGER=1 allows it."""
    real = installed()
    if real is not None and not env.LIGER_HW_SHADOW_LIGER:
        raise ImportError(
            f"liger-hw's shim would hide the installed liger-kernel {real}. Take {PATH} off PYTHONPATH to use "
            "liger-kernel, uninstall it, or set LIGER_HW_SHADOW_LIGER=1 to run its users on liger_hw"
        )


def installed() -> str | None:
    """Version of a real liger-kernel in this environment, or None."""
    for distribution in metadata.distributions(name=NAME):
        if Path(str(distribution.locate_file(""))).resolve() != PATH.resolve():
            return distribution.version
    return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != NAME or not name:
            return None
        if homes(name) is None:
            instead = replacement(name)
            if instead:  # without `name=`, so that `from module import name` shows this message
                raise ModuleNotFoundError(f"{fullname} is not in liger_hw's shim: {instead}")
            return None
        # every module is a package, so that `from module import name` looks for a submodule if the attribute is missing
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.origin = f"{homes(name)} by {__name__}"
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        module.__doc__ = f"{module.__name__} of Liger Kernel {VERSION}, provided by liger_hw."
        if (family := _family(name)) and name not in MODULES:
            from .forwards import FamilyModule

            module.__class__ = FamilyModule
            module.fill(family)  # type: ignore[attr-defined]
        _answer(module, name)


def _answer(module: ModuleType, name: str) -> None:
    """Let `liger_kernel.<name>` find its attributes in the modules of `homes`."""
    modules = homes(name) or ()

    def __getattr__(attribute: str) -> Any:
        path = f"{name}.{attribute}".lstrip(".")
        is_triton_kernel = name.startswith("ops.") and attribute.endswith("_kernel")  # ours have other arguments
        if not attribute.startswith("__") and not is_triton_kernel:
            value = _lookup(modules, attribute)
            if value is not _MISSING:
                setattr(module, attribute, value)
                return value
            if homes(path) is not None:  # a submodule that is not imported yet
                return importlib.import_module(f"{NAME}.{path}")
        instead = replacement(path)
        raise AttributeError(
            f"module {module.__name__!r} (liger_hw's shim) has no attribute {attribute!r}"
            + (f": {instead}" if instead else "")
        )

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    module.__dir__ = lambda: sorted({*vars(module), *_public(modules)})  # type: ignore[method-assign]
    module.__all__ = _public(modules)


def _lookup(modules: tuple[str, ...], attribute: str) -> Any:
    for home in modules:
        module = importlib.import_module(home)
        if home == _TRANSFORMERS and attribute not in {*vars(module), *module.HOME}:
            continue  # its __getattr__ looks in compat too
        value = getattr(module, attribute, _MISSING)
        if isinstance(value, ModuleType) and value.__name__.startswith("liger_hw."):
            continue  # the shim makes another module of that name
        if value is not _MISSING:
            return value
    return _MISSING


def _public(modules: tuple[str, ...]) -> list[str]:
    imported = map(importlib.import_module, modules)
    names = {name for module in imported for name in getattr(module, "__all__", vars(module))}
    return sorted(name for name in names if name.lower().startswith(("liger", "apply_liger", "autoliger")))


def take_the_name(module: ModuleType) -> None:
    """Make the modules of `liger_kernel` importable, or raise; called by that package in the shim's folder."""
    refuse_to_shadow()
    module.__version__ = VERSION
    module.__path__ = []  # submodules come from the finder
    _answer(module, "")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
