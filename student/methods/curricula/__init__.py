"""Curricula over the turns of episodes: a paper a file."""
