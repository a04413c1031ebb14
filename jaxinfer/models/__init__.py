"""One decoder, and the families that are data for it."""
