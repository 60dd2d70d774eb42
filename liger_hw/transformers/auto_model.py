"""`AutoLigerKernelForCausalLM`: load any causal LM with the kernels in place."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from .apply import MODEL_TYPE_TO_APPLY_LIGER_FN, patch, patch_instance


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` that patches the models it makes, and nothing else, to run on liger_hw's kernels."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model and patch it. Keywords of its patch function (rope, swiglu, ...) go there, all others to
        `AutoModelForCausalLM.from_pretrained`."""
        config = kwargs.get("config")
        if config is None or isinstance(config, str):
            of_config = {
                k: v
                for k, v in kwargs.items()
                if k in ("trust_remote_code", "revision", "cache_dir", "token", "subfolder")
            }
            config = AutoConfig.from_pretrained(config or pretrained_model_name_or_path, **of_config)
        options = _pop_options(config, kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # (model, info) with output_loading_info=True
        patch_instance(model, **options)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Make a model with random weights and patch it; keywords as for `from_pretrained`."""
        options = _pop_options(config, kwargs)
        model = super().from_config(config, **kwargs)
        patch_instance(model, **options)
        return model


def _pop_options(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove from `kwargs` the keywords of the config's patch function, and return them."""
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config.model_type, patch)
    names = set(inspect.signature(function).parameters) - {"model", "kwargs"}
    return {name: kwargs.pop(name) for name in list(kwargs) if name in names}
