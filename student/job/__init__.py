"""Builds the parts of a job and runs the loop."""
