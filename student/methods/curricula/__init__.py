"""Curricula over the turns of episodes and over modes; one file per paper."""
