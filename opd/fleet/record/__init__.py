"""Scores on disk: recorded, replayed, and looked up before the fleet is asked."""
