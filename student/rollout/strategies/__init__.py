"""Rollout strategies: a paper a file."""
