"""`liger-hw check MODEL`: what a patch would change in a model, and why it would leave the rest alone.

    liger-hw check mistral          a model type of transformers, in its default configuration
    liger-hw check Qwen/Qwen3-8B    a Hugging Face id, whose config.json is read from the cache or the hub
    liger-hw check config.json      a file, or the folder of a checkpoint

The model is built without weights, on torch's meta device, and patched by `apply_liger_kernel_to_<family>` or
`liger_hw.patch`. Exit code 1 if no part of it would run on a kernel.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from typing import Any

from ..autotune import models
from ..text import StatusLine, first_line, fold, json_text
from . import UsageError, needs


def check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face id, a config.json or its folder, or a model type such as mistral")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_check(arguments: argparse.Namespace) -> int:
    needs("transformers")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    screen = StatusLine()
    try:
        screen.update(f"[1/3] importing transformers, for the configuration of {arguments.model!r}")
        config = _config(arguments.model)
        from ..transformers import MODEL_TYPE_TO_APPLY_LIGER_FN, patch

        screen.update(f"[2/3] building the model of a {type(config).__name__} without weights")
        model = _model(config)
        screen.update(
            f"[3/3] running the parts of {type(model).__name__} on small inputs, to compare them with the references"
        )
        function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(config.model_type, patch)
        report = function(model=model)
    finally:
        screen.end()
    call = f"liger_hw.transformers.{function.__name__}" if function is not patch else "liger_hw.patch"
    if arguments.json:
        groups = Counter((row.part, row.where, row.kernel, row.variant, row.state) for row in report.rows)
        names = ("part", "where", "kernel", "variant", "state", "count")
        rows = [dict(zip(names, (*group, count))) for group, count in groups.items()]
        print(json_text({"model": type(model).__name__, "model_type": config.model_type, "call": call, "rows": rows}))
    else:
        how = "(model); its family has no function" if function is patch else "(), before or after building a model"
        print(fold(f"{type(model).__name__}, model type {config.model_type}\n{report}\nDo it: {call}{how}"))
    return 0 if report.patched else 1


def _config(name: str) -> Any:
    """The transformers config of this name. Without one, `UsageError` suggests a model type."""
    from transformers import CONFIG_MAPPING

    if name in CONFIG_MAPPING:
        return CONFIG_MAPPING[name]()
    name = models.known_id(name) or name
    try:
        return models.published(name)
    except Exception as error:  # transformers raises many kinds: no file, no network, an unknown model type
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        plain = re.sub("[^a-z0-9]", "", name.split("/")[-1].lower())  # qwen38b begins with the model type qwen3
        near = [one for one in CONFIG_MAPPING if plain.startswith(re.sub("[^a-z0-9]", "", one))]
        raise UsageError(
            f"no configuration of {name!r}: {reason.rstrip('.')}. Give a config.json, a Hugging Face id, or a "
            f"model type: liger-hw check {max(near, key=len, default='mistral')}"
        ) from None


def _model(config: Any) -> Any:
    """A model without weights, of the config's class, or else the causal LM of its model type."""
    import torch
    import transformers

    names = getattr(config, "architectures", None)
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    named = (getattr(transformers, name, None) for name in names)
    models = (one for one in named if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel))
    cls = next(models, None) or _causal_lm(config)
    try:
        with torch.device("meta"):
            return cls(config)
    except Exception as error:
        raise UsageError(f"{cls.__name__} cannot be made from this configuration: {first_line(error)}") from None


def _causal_lm(config: Any) -> type:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UsageError(f"transformers has no causal LM of type {config.model_type!r}") from None
