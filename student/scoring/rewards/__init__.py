"""Rewards in the loop: the base class, the chain of a recipe, and groups over all rounds."""
