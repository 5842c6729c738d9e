"""Measurements that the documents of learn/ show. `python -m learn.bench` runs them all."""
