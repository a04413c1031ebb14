"""Files in, arrays and token ids out: checkpoints, tokenizers, and where to find them."""
