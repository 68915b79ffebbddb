"""Read-only views of a run for people in a browser."""
