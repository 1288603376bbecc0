"""The gRPC layer of the server: services, authentication, and the path of a call from request to trailer."""
