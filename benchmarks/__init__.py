"""Benchmarks: each `python -m benchmarks.NAME` measures one subject and saves results/*.json, stamped.

`python -m benchmarks` runs them within a time budget. rivals.py holds what is compared, methods.py measures times and
energy, results.py saves results and copies them into the documents, tables.py shows them as tables and plots.
compare_builds.py and the tuners compare kernels in development and save nothing.
"""
