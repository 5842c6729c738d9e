"""Runnable examples: python -m examples.train_char_gpt, python -m examples.semantic_search."""

INSTALL = 'Install the packages of the examples: pip install ".[examples]"'
