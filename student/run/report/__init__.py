"""The report of a run: one HTML file for people, and its JSON twin for scripts, both made from the run folder alone."""
