"""Procedural tasks of the tiny worlds, with worked solutions."""
