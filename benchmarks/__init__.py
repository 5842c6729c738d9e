"""Benchmarks: each `python -m benchmarks.NAME` measures one thing and writes benchmarks/results/NAME.json, stamped.

Read methods.py for how times are taken, rivals.py and backward_rivals.py for what is compared, provenance.py for the
stamp, report.py for how figures reach the README. `python -m benchmarks.run_all` runs everything within a time budget.
"""
