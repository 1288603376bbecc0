from opd.wire.v1 import teacher_pb2 as _teacher_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadTeacherRequest(_message.Message):
    __slots__ = ("teacher", "model")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    model: str
    def __init__(self, teacher: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadTeacherResponse(_message.Message):
    __slots__ = ("teacher",)
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    teacher: _teacher_pb2.TeacherInfo
    def __init__(self, teacher: _Optional[_Union[_teacher_pb2.TeacherInfo, _Mapping]] = ...) -> None: ...

class UnloadTeacherRequest(_message.Message):
    __slots__ = ("teacher", "grace_seconds")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    grace_seconds: float
    def __init__(self, teacher: _Optional[str] = ..., grace_seconds: _Optional[float] = ...) -> None: ...

class UnloadTeacherResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepTeacherRequest(_message.Message):
    __slots__ = ("teacher",)
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    def __init__(self, teacher: _Optional[str] = ...) -> None: ...

class SleepTeacherResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeTeacherRequest(_message.Message):
    __slots__ = ("teacher",)
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    def __init__(self, teacher: _Optional[str] = ...) -> None: ...

class WakeTeacherResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("teacher", "folder", "expected_weights_hash")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    folder: str
    expected_weights_hash: str
    def __init__(self, teacher: _Optional[str] = ..., folder: _Optional[str] = ..., expected_weights_hash: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("weights_hash",)
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    weights_hash: str
    def __init__(self, weights_hash: _Optional[str] = ...) -> None: ...
