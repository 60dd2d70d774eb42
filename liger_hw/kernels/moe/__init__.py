"""Mixture of experts: fused_moe."""
