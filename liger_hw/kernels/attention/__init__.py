"""What attention takes beside its products: softmax, sparsemax, multi_token_attention."""
