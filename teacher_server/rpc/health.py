"""The standard health service: "" for the server, and each teacher by name.

Our own rather than grpcio-health-checking's asyncio class, whose `Watch` forgets the other watchers of a service as
soon as one of them leaves.
"""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Statuses and their watchers.

    Args:
        watch_seconds: after which a watch ends.
    """

    def __init__(self, watch_seconds: float = 3600.0) -> None:
        self._watch_seconds = watch_seconds
        self._statuses: dict[str, int] = {"": Response.NOT_SERVING}
        self._changed = asyncio.Condition()
        self._draining = False

    def status(self, service: str) -> int | None:
        """The status of a service now, None when it is not known."""
        return self._statuses.get(service)

    @property
    def serving(self) -> bool:
        """Whether the server as a whole is SERVING."""
        return self.status("") == Response.SERVING

    async def set(self, service: str, *, serving: bool) -> None:
        """Set a service's status; while draining all stay NOT_SERVING."""
        self._statuses[service] = Response.SERVING if serving and not self._draining else Response.NOT_SERVING
        await self._notify()

    async def forget(self, service: str) -> None:
        """Remove a service."""
        self._statuses.pop(service, None)
        await self._notify()

    async def drain(self) -> None:
        """Set all services to NOT_SERVING for good."""
        self._draining = True
        self._statuses = dict.fromkeys(self._statuses, Response.NOT_SERVING)
        await self._notify()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """The status now."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:128]!r} is not known here.")
        return Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The status now and at every change, until the caller leaves or the time for a watch is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._watch_seconds):
                await self._watch(request, context)

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        last: int | None = None
        while True:
            status = self._statuses.get(request.service, Response.SERVICE_UNKNOWN)
            if status != last:
                last = status
                # Then once more from the top: the status may have changed while this was on its way.
                await context.write(Response(status=status))
                continue
            async with self._changed:
                # Under the lock again: a change between the check above and `wait` would go unnoticed.
                if self._statuses.get(request.service, Response.SERVICE_UNKNOWN) == last:
                    await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
