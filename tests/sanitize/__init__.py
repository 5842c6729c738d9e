"""Runs under sanitizers."""
