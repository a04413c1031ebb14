"""Attention over paged KV: definition, implementations and their entry point."""
