"""The gRPC surface: services, security and the flow of a call."""
