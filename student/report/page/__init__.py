"""The report of a run: an HTML file for people and a JSON file for scripts, both made from the run folder alone."""
