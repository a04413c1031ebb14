"""What surrounds the steps on the host: requests, scheduling, batches, text."""
