"""`python -m benchmarks` is `python -m benchmarks.run_all`."""

from benchmarks.run_all import main

main()
