"""Examples; each runs from the repository root with python -m examples.NAME."""
