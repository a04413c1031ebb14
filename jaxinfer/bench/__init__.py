"""Benchmarks that users can run, and the scripts that time other programs beside them."""
