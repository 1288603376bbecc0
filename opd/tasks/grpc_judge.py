"""A client of JudgeService (protos/opd/wire/v1/judge.proto), which gets the scores of answers from a judge over gRPC.

Scores are cached by content, like the answers of chat models, so that a step that is taken again is judged alike.
"""

from collections.abc import Mapping
from typing import Any

import grpc
from pydantic import Field

from opd.tasks.chat import CachingClient, CallFailed, ServiceSettings
from opd.wire.channel import ClientSecurity, open_blocking_channel
from opd.wire.v1 import judge_pb2, judge_pb2_grpc

_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,  # from a handler that raises, like HTTP's 500
)
"""Failures after which another call may succeed; the same kinds of failures are retried over HTTP."""


class GrpcSettings(ServiceSettings):
    """How a judge is called over gRPC."""

    endpoint: str = Field(description='Address of the judge, as "host:port" or "unix:path".')
    security: ClientSecurity = Field(
        default_factory=ClientSecurity, description="TLS, and the token or certificate presented to the judge."
    )


class GrpcJudgeClient(CachingClient):
    """Asks a judge over gRPC; the first call opens the channel.

    Raises:
        ConfigError: if a token would leave this host unencrypted; checked at once instead of for every answer.
        AuthError: if a token or certificate cannot be read.
    """

    settings: GrpcSettings

    def __init__(self, settings: GrpcSettings) -> None:
        super().__init__(settings)
        open_blocking_channel(settings.endpoint, settings.security).close()
        settings.security.metadata()
        self._channel: grpc.Channel | None = None

    @property
    def name(self) -> str:
        """The address of the judge."""
        return self.settings.endpoint

    def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """See `CachingClient.call`; returns {"score": None} if the judge cannot tell."""
        with self._lock:
            if self._channel is None:
                self._channel = open_blocking_channel(self.settings.endpoint, self.settings.security)
            stub = judge_pb2_grpc.JudgeServiceStub(self._channel)
        try:
            found = stub.Judge(
                judge_pb2.JudgeRequest(**body),
                timeout=self.settings.timeout,
                metadata=self.settings.security.metadata(),
            )
        except grpc.RpcError as error:
            raise CallFailed(f"{error.code().name}: {error.details()}"[:200], again=error.code() in _AGAIN) from error
        return {"score": found.score if found.HasField("score") else None}

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
