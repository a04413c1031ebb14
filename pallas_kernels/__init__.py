"""Attention kernels on paged KV caches. Depends on jax and numpy alone; usable without jaxinfer."""

from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.gathered import gathered_attention

__all__ = ["UnsupportedKernel", "gathered_attention", "paged_attention"]
