"""Fast, exact inference of decoder language models in JAX."""

from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxinferError, RequestError
from jaxinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxinfer.engine.outputs import RequestOutput
    from jaxinfer.llm import LLM

__all__ = ["LLM", "JaxinferError", "RequestError", "RequestOutput", "SamplingParams"]

_LAZY = {"LLM": "jaxinfer.llm", "RequestOutput": "jaxinfer.engine.outputs"}


def __getattr__(name: str) -> Any:
    """Import what needs jax only when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
