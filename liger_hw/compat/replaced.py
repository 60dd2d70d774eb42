"""Replacements for modules and names of Liger Kernel that are not here."""

from __future__ import annotations

import re

REPLACED = {
    r"transformers\.model\..*": (
        "call apply_liger_kernel_to_<family> or liger_hw.patch(model); a forward of one's own takes "
        "LigerForCausalLMLoss of liger_kernel.transformers.model.loss_utils"
    ),
    r"transformers\.monkey_patch\..*lce_forward": "it is lce_forward of liger_kernel.transformers.model.<family>",
    r".*ExpertParallel.*|transformers\.moe(\..*)?": (
        "expert parallelism is transformers' own (DistributedConfig): patch the model after from_pretrained"
    ),
    r"(ops\.)?backends(\..*)?|ops\.configure(\..*)?": (
        "liger_hw has one implementation, chosen by the device of a tensor; liger_hw.registry has its configurations"
    ),
    r"triton(\..*)?": "liger_hw needs no cache manager of its own",
    r"ops\.utils\.element_mul_kernel": "multiply in torch",
    r"(ops\.)?utils\.\w+": "it serves Liger's own code alone; copy it",
    r"ops\.grpo_loss\..*_kernel": "call liger_kernel.transformers.grpo_loss.triton_grpo_loss",
    r"ops\.\w+\.\w+_(forward|backward|kernel)(_\w+)?": (
        "it is a part of Liger's own op; the whole op is a function of liger_kernel.transformers.functional, and its "
        "autograd function is in this module"
    ),
    r"env_report(\..*)?": "run `liger-hw doctor`",
}
"""Pattern of `module.name` for modules and names of Liger Kernel that are not here -> what to use instead."""


def replacement(name: str) -> str | None:
    """The advice for a module or name of liger_kernel that is not here, or None."""
    return next((instead for pattern, instead in REPLACED.items() if re.fullmatch(pattern, name)), None)
