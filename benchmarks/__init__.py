"""Benchmarks: each `python -m benchmarks.NAME` measures one thing and writes benchmarks/results/NAME.json, stamped.

methods.py measures times and energy, rivals.py holds what is compared, provenance.py stamps results, tables.py and
plotting.py show them, report.py copies them into the documents. `python -m benchmarks` runs them within a time budget.
compare_builds.py compares two builds.
"""
