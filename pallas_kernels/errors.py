"""What a kernel raises when the request is valid but this backend cannot serve it."""


class UnsupportedKernel(NotImplementedError):
    """The named implementation does not exist or does not run here."""
