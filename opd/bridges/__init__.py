"""Teachers of ours for trainers that ask a Python object and not a server."""
