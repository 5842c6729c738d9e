"""The build."""
