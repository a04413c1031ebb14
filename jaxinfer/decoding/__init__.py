"""Maths on logits: what a step does between the model's output and the token it emits."""
