"""Prompts composed of others (Composition-RL)."""
