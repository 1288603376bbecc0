"""Engines: what runs the teacher model, behind one small protocol."""
