"""Models of transformers, and the examples."""
