"""Liger's name for the negated log-probabilities of a linear head: `liger_fused_linear_log_probs`, of rows.

nll = -log p[y] of p = softmax(input @ weight^T / temperature)
"""

from __future__ import annotations

import torch

from .fused_linear_log_probs import liger_fused_linear_log_probs


def liger_fused_linear_scaled_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    selected_token_ids: torch.Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Per-token NLL of softmax(input @ weight^T / temperature), and on request entropy and chosen log-probabilities.

    input: [n_rows, hidden]; weight: [vocab, hidden]; target: [n_rows]. The arguments are explained at
    `liger_fused_linear_log_probs`. Returns nll [n_rows] in fp32, or a tuple (nll, entropy [n_rows] if return_entropy,
    selected [n_rows, k] if selected_token_ids is given). Raises `ValueError` as that function does.
    """
    options = {"ignore_index": ignore_index, "return_entropy": return_entropy}
    options |= {"selected_token_ids": selected_token_ids, "accum_dtype": accum_dtype}
    output = liger_fused_linear_log_probs(input, weight, target, temperature=temperature, **options)
    if isinstance(output, torch.Tensor):
        return -output
    return -output.log_probs, *(t for t in (output.entropy, output.selected) if t is not None)
