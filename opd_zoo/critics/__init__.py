"""Critics with losses of their own."""
