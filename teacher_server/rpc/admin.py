"""The handlers of `AdminService`, which change the loaded teachers and their weights; they need the scope `admin`."""

import logging
import re
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from opd.errors import ConfigError, InvalidRequestError
from opd.wire.v1 import admin_pb2 as pb
from opd.wire.v1 import admin_pb2_grpc
from teacher_server.calls.caller import CALLER
from teacher_server.calls.score_call import Shared
from teacher_server.residency.describe import teacher_info

_log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_GRACE_SECONDS = 3600.0
MAX_PATH_CHARS = 4096
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Serves operators. Every call is logged with the name of the token that made it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def LoadTeacher(self, request: pb.LoadTeacherRequest, context: Context) -> pb.LoadTeacherResponse:
        """Loads a teacher and tests it."""
        if not _NAME.fullmatch(request.teacher):
            raise InvalidRequestError(
                f"teacher is {request.teacher[:128]!r}, but a name has 1 to 128 characters of [A-Za-z0-9._/-]."
            )
        if not 1 <= len(request.model) <= MAX_PATH_CHARS:
            raise InvalidRequestError(
                f"model has {len(request.model)} characters, but it must have 1 to {MAX_PATH_CHARS}."
            )
        self._log("load", request.teacher, model=request.model)
        try:
            teacher = await self._shared.teachers.load(request.teacher, request.model)
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error
        return pb.LoadTeacherResponse(teacher=teacher_info(teacher.info, teacher.bounds, teacher.state))

    async def UnloadTeacher(self, request: pb.UnloadTeacherRequest, context: Context) -> pb.UnloadTeacherResponse:
        """Drains a teacher and frees its memory."""
        if not 0 <= request.grace_seconds <= MAX_GRACE_SECONDS:
            raise InvalidRequestError(
                f"grace_seconds is {request.grace_seconds:g}, but it must be 0 to {MAX_GRACE_SECONDS:g}."
            )
        self._log("unload", request.teacher)
        await self._shared.teachers.unload(request.teacher, request.grace_seconds)
        return pb.UnloadTeacherResponse()

    async def SleepTeacher(self, request: pb.SleepTeacherRequest, context: Context) -> pb.SleepTeacherResponse:
        """Moves a teacher's weights off the device."""
        self._log("sleep", request.teacher)
        await self._shared.teachers.sleep(request.teacher)
        return pb.SleepTeacherResponse()

    async def WakeTeacher(self, request: pb.WakeTeacherRequest, context: Context) -> pb.WakeTeacherResponse:
        """Moves a sleeping teacher's weights back to the device."""
        self._log("wake", request.teacher)
        await self._shared.teachers.wake(request.teacher)
        return pb.WakeTeacherResponse()

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        """Replaces a teacher's weights between two batches, and returns their hash."""
        if not 1 <= len(request.folder) <= MAX_PATH_CHARS or "\0" in request.folder:
            raise InvalidRequestError(f"folder must have 1 to {MAX_PATH_CHARS} characters, none of them NUL.")
        self._log("update weights", request.teacher, folder=request.folder)
        try:
            weights_hash = await self._shared.teachers.update_weights(
                request.teacher, Path(request.folder), request.expected_weights_hash
            )
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error
        self._shared.metrics.weight_updates.labels(request.teacher).inc()
        return pb.UpdateWeightsResponse(weights_hash=weights_hash)

    def _log(self, action: str, teacher: str, **fields: Any) -> None:
        _log.info(
            "admin call", extra={"action": action, "teacher": teacher[:128], "principal": CALLER.get().name, **fields}
        )
