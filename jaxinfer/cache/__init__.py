"""The paged KV cache: its arrays on the device, its bookkeeping on the host."""
