"""The learning path."""
