"""What a run will take, computed before it begins: `opd plan`."""
