"""Checks of `opd doctor` that need the student package, found through the entry-point group `opd.examinations`."""
