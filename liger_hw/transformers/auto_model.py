"""`AutoLigerKernelForCausalLM`: load any causal LM with the kernels in place."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from .apply import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance, patch


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models run on liger_hw's kernels; nothing but the loaded model is patched."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model and patch it. Keywords of its patch function (rope, swiglu, ...) go there, all others to
        `AutoModelForCausalLM.from_pretrained`."""
        config = kwargs.get("config")
        if config is None or isinstance(config, str):
            keep = {
                k: v
                for k, v in kwargs.items()
                if k in ("trust_remote_code", "revision", "cache_dir", "token", "subfolder")
            }
            config = AutoConfig.from_pretrained(config or pretrained_model_name_or_path, **keep)
        function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config.model_type, patch)
        names = set(inspect.signature(function).parameters) - {"model", "kwargs"}
        options = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        model = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        _apply_liger_kernel_to_instance(model, **options)
        return model
