"""Scores kept on disk: recorded, replayed, and answered before the fleet is asked."""
