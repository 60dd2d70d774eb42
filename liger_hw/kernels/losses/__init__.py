"""Losses on logits or probabilities: cross_entropy, kl_div, jsd, tvd, fused_ce_tvd, vocab_parallel_cross_entropy."""
