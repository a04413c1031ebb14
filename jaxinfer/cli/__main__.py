"""`python -m jaxinfer.cli`."""

from jaxinfer.cli import main

main()
