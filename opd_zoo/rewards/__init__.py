"""Rewards of rows, turns and tokens."""
