"""The teacher server: service, batching, admission, security, residency, and engines behind one protocol."""
