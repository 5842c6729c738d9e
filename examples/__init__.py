"""Runnable examples: python -m examples.train_char_gpt, examples.generate_char_gpt, examples.semantic_search."""

INSTALL = 'Install the packages of the examples: pip install ".[examples]"'
