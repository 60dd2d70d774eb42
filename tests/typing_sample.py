"""A program that a type checker must understand; mypy reads it (tests/test_package.py, `make release-check`)."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import liger_hw
from liger_hw.chunked_loss import LigerFusedLinearDPOLoss
from liger_hw.transformers import LigerRMSNorm, PatchReport, apply_liger_kernel_to_mistral
from liger_hw.transformers.functional import liger_rms_norm

model = torch.nn.Linear(4, 4)
report = liger_hw.patch(model, rope=False, activations={0: "full"})
assert_type(report, PatchReport)
assert_type(apply_liger_kernel_to_mistral(model=model), PatchReport)
assert_type(LigerRMSNorm(4), LigerRMSNorm)
assert_type(liger_rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6), torch.Tensor)
assert_type(LigerFusedLinearDPOLoss(beta=0.1), LigerFusedLinearDPOLoss)
assert_type(liger_hw.revert(model), int)
assert_type(liger_hw.distributed.sync(), str)

liger_hw.patch("mistral")  # type: ignore[arg-type]
liger_hw.patch(model, ropes=True)  # type: ignore[call-arg]
liger_hw.patchh(model)  # type: ignore[attr-defined]
apply_liger_kernel_to_mistral(geglu=True)  # type: ignore[call-arg]
report.undo()  # type: ignore[attr-defined]
