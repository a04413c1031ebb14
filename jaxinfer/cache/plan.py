"""How much memory goes where, decided before anything is allocated."""

from dataclasses import dataclass

import jax
import numpy as np
import psutil

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.errors import ConfigError, MemoryPlanError

CPU_CACHE_BYTES = 1 << 30  # pool on CPU unless the user says otherwise
DEVICE_FRACTION = 0.9  # of an accelerator's memory that the plan may use


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of weights, pages and temporaries, and what fits in the pages.

    Attributes:
        max_model_len: longest prompt plus output in tokens.
        max_gathered_tokens: tokens of context that a decode call may copy out of the pages; 0 where it never does.
    """

    available_bytes: int
    weight_bytes: int
    temporary_bytes: int
    kv_bytes_per_token: int
    dtype: np.dtype
    page_size: int
    num_pages: int
    max_model_len: int
    max_gathered_tokens: int

    @property
    def page_bytes(self) -> int:
        """The whole pool."""
        return self.num_pages * self.page_size * self.kv_bytes_per_token

    @property
    def num_cached_tokens(self) -> int:
        """Tokens the pool holds."""
        return self.num_pages * self.page_size

    @property
    def summary(self) -> str:
        """The plan in one line."""
        return (
            f"Memory: {_size(self.weight_bytes)} weights, {_size(self.page_bytes)} pages for "
            f"{self.num_cached_tokens:,} tokens, at most {_size(self.temporary_bytes)} temporaries; "
            f"context up to {self.max_model_len:,} tokens"
        )

    def __str__(self) -> str:
        gathered = self.max_gathered_tokens * self.kv_bytes_per_token
        rows = [
            ("weights", _size(self.weight_bytes), ""),
            (
                "pages",
                _size(self.page_bytes),
                f"{self.num_pages} pages of {self.page_size} tokens, {self.num_cached_tokens:,} tokens in all, "
                f"{self.kv_bytes_per_token:,} bytes a token in {self.dtype}",
            ),
            (
                "temporaries",
                _size(self.temporary_bytes),
                f"at most, {_size(gathered)} of it context copied for decoding" if gathered else "at most",
            ),
            ("available", _size(self.available_bytes), f"longest context {self.max_model_len:,} tokens"),
        ]
        return "\n".join(f"{name:<12} {size:>9}  {note}".rstrip() for name, size, note in rows)


def plan_memory(
    config: ModelConfig, options: EngineConfig, *, weight_bytes: int, dtype: np.dtype, gather_context: bool
) -> MemoryPlan:
    """Size the page pool from what weights and temporaries leave.

    Args:
        config: the model.
        options: the user's sizes.
        weight_bytes: the parameters on the device.
        dtype: of the cache.
        gather_context: decode steps copy the context they read; see `cache.pages.GatheredKV`.

    Raises:
        ConfigError: `max_model_len` is beyond the model's context.
        MemoryPlanError: weights and one sequence of `max_model_len` do not fit.
    """
    if (options.max_model_len or 0) > config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len must be at most {config.max_position_embeddings:,}, the model's context in tokens, "
            f"got {options.max_model_len:,}"
        )
    available = device_bytes()
    per_token = config.kv_bytes_per_token(dtype.itemsize)
    step_bytes = _step_bytes(config, options)
    left = (available - weight_bytes - step_bytes) // (2 if gather_context else 1)
    max_model_len = options.max_model_len or config.max_position_embeddings
    default = options.max_num_seqs * max_model_len * per_token
    if jax.default_backend() == "cpu":
        default = min(default, max(CPU_CACHE_BYTES, (options.max_model_len or 0) * per_token))
    num_pages = max(0, min(options.kv_cache_bytes or default, left)) // (options.page_size * per_token)
    fits = num_pages * options.page_size
    if fits < (options.max_model_len or 1) or (options.kv_cache_bytes or 0) > left:
        raise MemoryPlanError(
            f"pages for a sequence of {options.max_model_len or options.page_size:,} tokens at {per_token:,} bytes "
            f"each must fit in what {_size(weight_bytes)} of weights and {_size(step_bytes)} of temporaries leave of "
            f"{_size(available)}, got room for {fits:,} tokens; lower max_model_len or change kv_cache_bytes"
        )
    gathered = fits if gather_context else 0
    return MemoryPlan(
        available_bytes=available,
        weight_bytes=weight_bytes,
        temporary_bytes=step_bytes + gathered * per_token,
        kv_bytes_per_token=per_token,
        dtype=dtype,
        page_size=options.page_size,
        num_pages=num_pages,
        max_model_len=min(max_model_len, fits),
        max_gathered_tokens=gathered,
    )


def device_bytes() -> int:
    """Memory a plan may use: most of an accelerator's, or what the host has free."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(DEVICE_FRACTION * stats["bytes_limit"])
    return psutil.virtual_memory().available


def _step_bytes(config: ModelConfig, options: EngineConfig) -> int:
    """Float32 activations of the widest layer, and logits with what sampling makes of them."""
    widest = config.qkv_dim + config.hidden_size + 2 * config.intermediate_size * (1 + config.gated_mlp)
    return 4 * (2 * options.max_num_batched_tokens * widest + 4 * options.max_num_seqs * config.vocab_size)


def _size(num_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes:.1f} GiB"
