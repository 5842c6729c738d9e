"""Sequences over several processes."""
