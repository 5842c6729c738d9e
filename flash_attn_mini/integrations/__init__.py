"""Adapters to other libraries. Each imports its library at the first use."""
