"""The name `liger_kernel` for code written for Liger Kernel 0.8.5, answered by liger_hw.

    PYTHONPATH=$(liger-hw shim) python train.py      # TrainingArguments(use_liger_kernel=True), TRL, Axolotl, ...

Only the folder that `liger-hw shim` prints holds a `liger_kernel`; a normal install of liger_hw adds no such name. Its
modules are made by the finder below as they are imported: each looks its names up in modules of liger_hw, so there is
no second list of names to keep. A real liger-kernel is never shadowed in silence: see `refuse_to_shadow`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import env
from ..kernels import home_of
from . import impls
from .replaced import MissingKernel, replacement

NAME = "liger_kernel"
VERSION = "0.8.5"
"""The version of Liger Kernel whose modules and names these are; what `importlib.metadata` answers."""

PATH = Path(__file__).parent / "path"
"""The folder for PYTHONPATH."""

_TRANSFORMERS = "liger_hw.transformers"
_FUNCTIONAL = "liger_hw.transformers.functional"
_LOSSES = "liger_hw.chunked_loss"
_KERNELS = "liger_hw.kernels"
_MEGATRON = "liger_hw.megatron"
_MODULES = "liger_hw.compat.modules"
_FUNCTIONS = "liger_hw.compat.functions"
_CHECKED = "liger_hw.compat.checked"
_GRPO = "liger_hw.compat.grpo"
_BASES = "liger_hw.compat.loss_bases"
_FSDP = "liger_hw.compat.fsdp"
_ORPO = "liger_hw.compat.orpo_trainer"
_FORWARDS = "liger_hw.compat.forwards"
_LOSS_UTILS = "liger_hw.compat.loss_utils"
_OUTPUTS = "liger_hw.compat.output_classes"
_TILED = f"{_KERNELS}.pointwise.tiled_mlp"

MODULES: dict[str, tuple[str, ...]] = {
    "transformers": (_CHECKED, _TRANSFORMERS, _FUNCTIONAL, _MODULES),
    "transformers.functional": (_CHECKED, _FUNCTIONAL, _TRANSFORMERS, _FUNCTIONS, _KERNELS),
    "transformers.cross_entropy": (_CHECKED, f"{_KERNELS}.losses.cross_entropy", _FUNCTIONS),
    "transformers.fused_linear_cross_entropy": (_CHECKED, f"{_KERNELS}.heads.fused_linear_cross_entropy", _FUNCTIONS),
    "transformers.monkey_patch": (_CHECKED, _TRANSFORMERS, "liger_hw.compat.monkey_patch", _FUNCTIONAL, _MODULES),
    "transformers.trainer_integration": (_TRANSFORMERS,),
    "transformers.fsdp": (_FSDP,),
    "transformers.trainer": (_ORPO,),
    "transformers.trainer.orpo_trainer": (_FSDP, _ORPO),  # Axolotl takes `_FSDPForwardRedirection` from there
    "transformers.mhc": (_TRANSFORMERS,),
    "transformers.mlp": (_MODULES,),
    "transformers.tiled_mlp": (_TRANSFORMERS,),
    "transformers.auto_model": (_TRANSFORMERS,),
    "transformers.grpo_loss": ("liger_hw.transformers.grpo_loss", _GRPO, f"{_LOSSES}.grpo_loss"),
    "transformers.experimental": (f"{_KERNELS}.embedding.embedding",),
    "transformers.model": (),
    "transformers.model.loss_utils": (_LOSS_UTILS,),
    "transformers.model.output_classes": (_OUTPUTS,),
    "ops": (_FUNCTIONS, _GRPO, _KERNELS, _TILED),
    "ops.mlp": (_FUNCTIONS,),
    "ops.tiled_mlp": (_FUNCTIONS, _TILED),
    "ops.swiglu": (_FUNCTIONS, f"{_KERNELS}.pointwise.swiglu", f"{_KERNELS}.pointwise.fused_gate_up_swiglu"),
    "ops.experimental": (),
    "ops.backends": (),
    "ops.backends.registry": ("liger_hw.compat.impls",),
    "ops.mhc": (_FUNCTIONS,),
    "ops.grpo_loss": (_LOSSES, _GRPO),
    "ops.fused_moe": (_FUNCTIONS, "liger_hw.compat.routing", f"{_KERNELS}.moe.fused_moe"),
    "ops.utils": ("liger_hw.compat.ops_utils",),
    "chunked_loss": (_LOSSES,),
    **{f"chunked_loss.{name}_loss": (f"{_LOSSES}.preference", _BASES) for name in ("cpo", "simpo", "orpo")},
    **{f"chunked_loss.{name}_loss": (f"{_LOSSES}.distillation", _BASES) for name in ("jsd", "cosine_similarity")},
    "chunked_loss.fused_linear_distillation": (_BASES,),
    "chunked_loss.fused_linear_ppo": (_BASES,),
    "chunked_loss.fused_linear_preference": (_BASES,),
    "chunked_loss.fused_linear_unpaired_preference": (_BASES,),
    "functional": ("liger_hw.compat.functional",),
    "megatron": (_MEGATRON,),
    "megatron.cross_entropy": (_MEGATRON,),
    "megatron.monkey_patch": (_MEGATRON,),
    "megatron.rms_norm": (_MEGATRON,),
    "megatron.swiglu": (_MEGATRON,),
    "utils": ("liger_hw.compat.utils",),
}
"""Module of liger_kernel -> the modules of liger_hw that hold its names; an op's own module is found by its name."""

_RENAMED = {"experimental.embedding": "embedding", "experimental.mm_int8int2": "mm_int8int2"}


def use() -> str:
    """`in use` where `import liger_kernel` gives this package, else `not in use` and why; it is imported to see."""
    try:
        file = importlib.import_module(NAME).__file__
    except ImportError as error:
        return f"not in use: {error}"
    return "in use" if str(PATH) in str(file) else f"not in use: {NAME} is {file}"


def homes(name: str) -> tuple[str, ...] | None:
    """Modules of liger_hw that stand behind `liger_kernel.<name>`; None when there is no such module."""
    if name in MODULES:
        return MODULES[name]
    group, _, op = name.partition(".")
    if family := _family(name):
        return (_FORWARDS, _LOSS_UTILS, _OUTPUTS) if _forwards().classes_of(family) else None
    if group in ("transformers", "ops") and op:
        home = home_of(_RENAMED.get(op, op))
        if home is None:
            return None
        return (home, _TRANSFORMERS, _MODULES, _FUNCTIONS) if group == "transformers" else (_FUNCTIONS, home)
    if group == "chunked_loss" and op and "." not in op:
        home = f"{_LOSSES}.{op}"
        return (home, _BASES) if not op.startswith("_") and importlib.util.find_spec(home) else None
    return None


def _family(name: str) -> str:
    """The family of a module `transformers.model.<family>`; "" for another module."""
    package, _, family = name.rpartition(".")
    return family if package == "transformers.model" else ""


def _forwards() -> Any:
    return importlib.import_module(_FORWARDS)


def refuse_to_shadow() -> None:
    """Raise `ImportError` when a real liger-kernel is installed too, unless LIGER_HW_SHADOW_LIGER=1 allows it."""
    real = installed()
    if real is not None and not env.get("LIGER_HW_SHADOW_LIGER"):
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
    """Makes the modules below `liger_kernel`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != NAME or not name:
            return None
        if homes(name) is None:
            instead = replacement(name)
            if instead:  # without a name, so that `from module import name` says this too
                raise ModuleNotFoundError(f"{fullname} is not in liger_hw's shim: {instead}")
            return None
        # every module is a package: `from module import name` asks for a module `name` where the attribute is missing
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        spec.origin = f"{homes(name)} by {__name__}"
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.partition(".")[2]
        behind = homes(name) or ()
        module.__doc__ = f"{module.__name__} of Liger Kernel {VERSION}, answered by {', '.join(behind) or 'liger_hw'}."

        def __getattr__(attribute: str) -> Any:
            if not attribute.startswith("__"):
                value = _kernel(name, attribute) or _lookup(behind, attribute)
                if value is not _ABSENT:
                    setattr(module, attribute, value)
                    return value
                if homes(f"{name}.{attribute}") is not None:  # a module below that is not imported yet
                    return importlib.import_module(f"{module.__name__}.{attribute}")
            instead = replacement(f"{name}.{attribute}")
            raise AttributeError(
                f"module {module.__name__!r} (liger_hw's shim) has no attribute {attribute!r}"
                + (f": {instead}" if instead else "")
            )

        if (family := _family(name)) and name not in MODULES:
            module.__class__ = _forwards().FamilyModule
            module.fill(family)  # type: ignore[attr-defined]
        module.__getattr__ = __getattr__  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted({*vars(module), *_public(behind)})  # type: ignore[method-assign]
        module.__all__ = _public(behind)


_ABSENT = object()


def _kernel(module: str, name: str) -> MissingKernel | None:
    """What stands for a Triton kernel of Liger's in `liger_kernel.<module>`; None where the name is no kernel's."""
    instead = replacement(f"{module}.{name}")
    if instead is None or not module.startswith("ops.") or not name.endswith("_kernel"):
        return None
    return MissingKernel(f"{NAME}.{module}.{name}", instead)


def _lookup(behind: tuple[str, ...], attribute: str) -> Any:
    for home in behind:
        for module in _searched(home):
            if home == _TRANSFORMERS and attribute not in {*vars(module), *module.HOME}:
                continue  # it would look here
            value = getattr(module, attribute, _ABSENT)
            if isinstance(value, ModuleType) and value.__name__.startswith("liger_hw."):
                continue  # a module of that name is the shim's own
            if value is not _ABSENT:
                return value
    return _ABSENT


def _searched(home: str) -> list[ModuleType]:
    """The module; for the kernels' package, the module of every op."""
    if home != _KERNELS:
        return [importlib.import_module(home)]
    from .. import registry

    return [importlib.import_module(op.function.__module__) for op in registry.ops().values()]


def _public(behind: tuple[str, ...]) -> list[str]:
    names = {name for home in behind for module in _searched(home) for name in getattr(module, "__all__", vars(module))}
    return sorted(name for name in names if name.lower().startswith(("liger", "apply_liger", "autoliger")))


def take_the_name(module: ModuleType) -> None:
    """Called by the `liger_kernel` package on the shim's path: make its modules importable, or refuse."""
    refuse_to_shadow()
    module.__version__ = VERSION
    module.__path__ = []  # every module below comes from the finder

    def __getattr__(name: str) -> Any:  # a module below that is not imported yet, as `functional`
        if name in MODULES:
            return importlib.import_module(f"{NAME}.{name}")
        if name in impls.__all__:
            return getattr(impls, name)
        raise AttributeError(f"module {NAME!r} (liger_hw's shim) has no attribute {name!r}")

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
