"""Cases, references, bounds and calls that several tests use."""
