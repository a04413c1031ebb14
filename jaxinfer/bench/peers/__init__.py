"""Scripts that time other programs, each in an environment of its own; none is imported by jaxinfer."""
