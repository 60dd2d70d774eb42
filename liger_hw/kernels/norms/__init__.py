"""Normalisations: rms_norm, fused_add_rms_norm, layer_norm, modulated_rms_norm, group_norm, poly_norm, dyt."""
