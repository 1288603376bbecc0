"""Prompt samplers and curricula of reinforcement learning: methods that choose what a step learns from."""
