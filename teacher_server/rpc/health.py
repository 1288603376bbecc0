"""The standard gRPC health service, with "" for the server and a service for each teacher, by name.

Written here because the asyncio class of grpcio-health-checking forgets the other watchers of a service as soon as one
of them leaves.
"""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The status of every service, and the calls that watch it.

    Args:
        watch_seconds: seconds after which a watch ends.
    """

    def __init__(self, watch_seconds: float = 3600.0) -> None:
        self._watch_seconds = watch_seconds
        self._statuses: dict[str, int] = {"": Response.NOT_SERVING}
        self._changed = asyncio.Condition()
        self._draining = False

    def status(self, service: str) -> int | None:
        """The status of a service; None if it is unknown."""
        return self._statuses.get(service)

    @property
    def serving(self) -> bool:
        """Whether the server as a whole is SERVING."""
        return self.status("") == Response.SERVING

    async def set(self, service: str, *, serving: bool) -> None:
        """Sets the status of a service. Once draining, every service stays NOT_SERVING."""
        self._statuses[service] = Response.SERVING if serving and not self._draining else Response.NOT_SERVING
        await self._notify()

    async def forget(self, service: str) -> None:
        """Removes a service."""
        self._statuses.pop(service, None)
        await self._notify()

    async def drain(self) -> None:
        """Sets all services to NOT_SERVING, permanently."""
        self._draining = True
        self._statuses = dict.fromkeys(self._statuses, Response.NOT_SERVING)
        await self._notify()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Returns the current status; NOT_FOUND for an unknown service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"service {request.service[:128]!r} is not known; give the name of a served teacher, or none for the "
                "server.",
            )
        return Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Streams the status now and at every change, until the caller leaves or `watch_seconds` are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._watch_seconds):
                await self._watch(request, context)

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        last: int | None = None
        while True:
            status = self._statuses.get(request.service, Response.SERVICE_UNKNOWN)
            if status != last:
                last = status
                # Compare again before waiting: the status may have changed while this was being sent.
                await context.write(Response(status=status))
                continue
            async with self._changed:
                # Compare again under the lock: a change between the check above and `wait` would go unnoticed.
                if self._statuses.get(request.service, Response.SERVICE_UNKNOWN) == last:
                    await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
