"""Rewards: from answers and verdicts to numbers that a policy learns from."""
