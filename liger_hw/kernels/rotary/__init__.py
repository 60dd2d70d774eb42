"""Rotary position embeddings: rope, interleaved_rope, llama4_rope, qwen2vl_mrope, vision_rope, qk_norm_rope."""
