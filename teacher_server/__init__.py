"""The teacher server: gRPC services, security, admission, batching, residency, and engines behind one protocol."""
