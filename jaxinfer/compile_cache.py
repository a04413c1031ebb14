"""Compiled programs survive the process, so that only a model's first run waits for the compiler."""

import jax

from jaxinfer.io.hub import cache_dir


def enable_compile_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was already told where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
