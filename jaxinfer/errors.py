"""Every error a caller can cause. All are `ValueError`s and say what was expected, what came, and how to mend it."""


class JaxinferError(ValueError):
    """Root of the tree; catch it to catch every error that bad input can raise."""


class ModelNotFoundError(JaxinferError):
    """The model name or folder leads to no model."""


class UnsupportedModelError(JaxinferError):
    """The model's configuration asks for something that would change the numbers and is not implemented."""


class CheckpointError(JaxinferError):
    """A weight or tokenizer file is missing, truncated, misshapen, or holds other tensors than its config implies."""


class RequestError(JaxinferError):
    """A prompt or sampling parameter is out of range; raised before any device work."""


class ConfigError(JaxinferError):
    """An option of the engine is out of range."""


class MemoryPlanError(JaxinferError):
    """The model and its cache do not fit in the memory they were given."""
