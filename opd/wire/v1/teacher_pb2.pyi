from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_F32: _ClassVar[Dtype]
    DTYPE_F16: _ClassVar[Dtype]
    DTYPE_BF16: _ClassVar[Dtype]
    DTYPE_U32: _ClassVar[Dtype]
    DTYPE_U18: _ClassVar[Dtype]
    DTYPE_U16_AFFINE: _ClassVar[Dtype]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_ZSTD: _ClassVar[Compression]

class TensorRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_ROLE_UNSPECIFIED: _ClassVar[TensorRole]
    TENSOR_ROLE_SAMPLED: _ClassVar[TensorRole]
    TENSOR_ROLE_VALUES: _ClassVar[TensorRole]
    TENSOR_ROLE_IDS: _ClassVar[TensorRole]
    TENSOR_ROLE_LOG_TAIL: _ClassVar[TensorRole]
    TENSOR_ROLE_HIDDEN: _ClassVar[TensorRole]
    TENSOR_ROLE_LOGITS: _ClassVar[TensorRole]
    TENSOR_ROLE_HEAD_WEIGHT: _ClassVar[TensorRole]
    TENSOR_ROLE_HEAD_BIAS: _ClassVar[TensorRole]
    TENSOR_ROLE_GATHER_IDS: _ClassVar[TensorRole]

class PayloadKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAYLOAD_KIND_UNSPECIFIED: _ClassVar[PayloadKind]
    PAYLOAD_KIND_SAMPLED: _ClassVar[PayloadKind]
    PAYLOAD_KIND_TOPK: _ClassVar[PayloadKind]
    PAYLOAD_KIND_GATHER: _ClassVar[PayloadKind]
    PAYLOAD_KIND_HIDDEN: _ClassVar[PayloadKind]
    PAYLOAD_KIND_FULL: _ClassVar[PayloadKind]

class TeacherState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEACHER_STATE_UNSPECIFIED: _ClassVar[TeacherState]
    TEACHER_STATE_LOADING: _ClassVar[TeacherState]
    TEACHER_STATE_READY: _ClassVar[TeacherState]
    TEACHER_STATE_ASLEEP: _ClassVar[TeacherState]
    TEACHER_STATE_DRAINING: _ClassVar[TeacherState]
    TEACHER_STATE_FAILED: _ClassVar[TeacherState]
DTYPE_UNSPECIFIED: Dtype
DTYPE_F32: Dtype
DTYPE_F16: Dtype
DTYPE_BF16: Dtype
DTYPE_U32: Dtype
DTYPE_U18: Dtype
DTYPE_U16_AFFINE: Dtype
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_NONE: Compression
COMPRESSION_ZSTD: Compression
TENSOR_ROLE_UNSPECIFIED: TensorRole
TENSOR_ROLE_SAMPLED: TensorRole
TENSOR_ROLE_VALUES: TensorRole
TENSOR_ROLE_IDS: TensorRole
TENSOR_ROLE_LOG_TAIL: TensorRole
TENSOR_ROLE_HIDDEN: TensorRole
TENSOR_ROLE_LOGITS: TensorRole
TENSOR_ROLE_HEAD_WEIGHT: TensorRole
TENSOR_ROLE_HEAD_BIAS: TensorRole
TENSOR_ROLE_GATHER_IDS: TensorRole
PAYLOAD_KIND_UNSPECIFIED: PayloadKind
PAYLOAD_KIND_SAMPLED: PayloadKind
PAYLOAD_KIND_TOPK: PayloadKind
PAYLOAD_KIND_GATHER: PayloadKind
PAYLOAD_KIND_HIDDEN: PayloadKind
PAYLOAD_KIND_FULL: PayloadKind
TEACHER_STATE_UNSPECIFIED: TeacherState
TEACHER_STATE_LOADING: TeacherState
TEACHER_STATE_READY: TeacherState
TEACHER_STATE_ASLEEP: TeacherState
TEACHER_STATE_DRAINING: TeacherState
TEACHER_STATE_FAILED: TeacherState

class SampledPayload(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TopKPayload(_message.Message):
    __slots__ = ("k", "value_dtype")
    K_FIELD_NUMBER: _ClassVar[int]
    VALUE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    k: int
    value_dtype: Dtype
    def __init__(self, k: _Optional[int] = ..., value_dtype: _Optional[_Union[Dtype, str]] = ...) -> None: ...

class GatherPayload(_message.Message):
    __slots__ = ("k", "value_dtype")
    K_FIELD_NUMBER: _ClassVar[int]
    VALUE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    k: int
    value_dtype: Dtype
    def __init__(self, k: _Optional[int] = ..., value_dtype: _Optional[_Union[Dtype, str]] = ...) -> None: ...

class HiddenPayload(_message.Message):
    __slots__ = ("value_dtype",)
    VALUE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    value_dtype: Dtype
    def __init__(self, value_dtype: _Optional[_Union[Dtype, str]] = ...) -> None: ...

class FullPayload(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("token_ids", "prompt_length", "gather_ids", "gather_ids_dtype", "crc32c", "spans")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GATHER_IDS_FIELD_NUMBER: _ClassVar[int]
    GATHER_IDS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    prompt_length: int
    gather_ids: bytes
    gather_ids_dtype: Dtype
    crc32c: int
    spans: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., prompt_length: _Optional[int] = ..., gather_ids: _Optional[bytes] = ..., gather_ids_dtype: _Optional[_Union[Dtype, str]] = ..., crc32c: _Optional[int] = ..., spans: _Optional[bytes] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "teacher", "sequences", "sampled", "topk", "gather", "hidden", "full", "temperature", "expected_weights_hash", "accept_zstd", "chunk_bytes", "client", "accept_batches")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_ZSTD_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    teacher: str
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    sampled: SampledPayload
    topk: TopKPayload
    gather: GatherPayload
    hidden: HiddenPayload
    full: FullPayload
    temperature: float
    expected_weights_hash: str
    accept_zstd: bool
    chunk_bytes: int
    client: str
    accept_batches: bool
    def __init__(self, request_id: _Optional[str] = ..., teacher: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ..., sampled: _Optional[_Union[SampledPayload, _Mapping]] = ..., topk: _Optional[_Union[TopKPayload, _Mapping]] = ..., gather: _Optional[_Union[GatherPayload, _Mapping]] = ..., hidden: _Optional[_Union[HiddenPayload, _Mapping]] = ..., full: _Optional[_Union[FullPayload, _Mapping]] = ..., temperature: _Optional[float] = ..., expected_weights_hash: _Optional[str] = ..., accept_zstd: bool = ..., chunk_bytes: _Optional[int] = ..., client: _Optional[str] = ..., accept_batches: bool = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("role", "dtype", "rows", "cols", "byte_length", "compression", "crc32c")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    BYTE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    role: TensorRole
    dtype: Dtype
    rows: int
    cols: int
    byte_length: int
    compression: Compression
    crc32c: int
    def __init__(self, role: _Optional[_Union[TensorRole, str]] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ..., byte_length: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ScoreHeader(_message.Message):
    __slots__ = ("request_id", "weights_hash", "sequence_count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    weights_hash: str
    sequence_count: int
    def __init__(self, request_id: _Optional[str] = ..., weights_hash: _Optional[str] = ..., sequence_count: _Optional[int] = ...) -> None: ...

class SequenceHeader(_message.Message):
    __slots__ = ("sequence", "ids_crc32c", "tensors")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IDS_CRC32C_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    ids_crc32c: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, sequence: _Optional[int] = ..., ids_crc32c: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("admission_seconds", "queue_seconds", "batch_wait_seconds", "engine_seconds", "encode_seconds", "send_seconds", "total_seconds")
    ADMISSION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    admission_seconds: float
    queue_seconds: float
    batch_wait_seconds: float
    engine_seconds: float
    encode_seconds: float
    send_seconds: float
    total_seconds: float
    def __init__(self, admission_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., batch_wait_seconds: _Optional[float] = ..., engine_seconds: _Optional[float] = ..., encode_seconds: _Optional[float] = ..., send_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class ScoreTrailer(_message.Message):
    __slots__ = ("timings", "model_tokens", "scored_tokens")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    timings: Timings
    model_tokens: int
    scored_tokens: int
    def __init__(self, timings: _Optional[_Union[Timings, _Mapping]] = ..., model_tokens: _Optional[int] = ..., scored_tokens: _Optional[int] = ...) -> None: ...

class ScoreBatch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ScoreResponse]
    def __init__(self, messages: _Optional[_Iterable[_Union[ScoreResponse, _Mapping]]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("header", "sequence", "chunk", "trailer", "batch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    header: ScoreHeader
    sequence: SequenceHeader
    chunk: Chunk
    trailer: ScoreTrailer
    batch: ScoreBatch
    def __init__(self, header: _Optional[_Union[ScoreHeader, _Mapping]] = ..., sequence: _Optional[_Union[SequenceHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., trailer: _Optional[_Union[ScoreTrailer, _Mapping]] = ..., batch: _Optional[_Union[ScoreBatch, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("teacher", "tokens_from")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FROM_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    tokens_from: int
    def __init__(self, teacher: _Optional[str] = ..., tokens_from: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_sequence_tokens", "max_k", "max_sequences", "max_request_tokens", "max_request_bytes")
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_K_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_sequence_tokens: int
    max_k: int
    max_sequences: int
    max_request_tokens: int
    max_request_bytes: int
    def __init__(self, max_sequence_tokens: _Optional[int] = ..., max_k: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_request_tokens: _Optional[int] = ..., max_request_bytes: _Optional[int] = ...) -> None: ...

class TokenizerInfo(_message.Message):
    __slots__ = ("fingerprint", "chat_template_hash", "size", "eos_id", "bos_id", "pad_id", "tokens")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_ID_FIELD_NUMBER: _ClassVar[int]
    BOS_ID_FIELD_NUMBER: _ClassVar[int]
    PAD_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    chat_template_hash: str
    size: int
    eos_id: int
    bos_id: int
    pad_id: int
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fingerprint: _Optional[str] = ..., chat_template_hash: _Optional[str] = ..., size: _Optional[int] = ..., eos_id: _Optional[int] = ..., bos_id: _Optional[int] = ..., pad_id: _Optional[int] = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HeadInfo(_message.Message):
    __slots__ = ("hash", "hidden_size", "logit_scale", "soft_cap", "dtype", "has_bias")
    HASH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOGIT_SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HAS_BIAS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    hidden_size: int
    logit_scale: float
    soft_cap: float
    dtype: Dtype
    has_bias: bool
    def __init__(self, hash: _Optional[str] = ..., hidden_size: _Optional[int] = ..., logit_scale: _Optional[float] = ..., soft_cap: _Optional[float] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., has_bias: bool = ...) -> None: ...

class TeacherInfo(_message.Message):
    __slots__ = ("name", "engine", "model", "weights_hash", "compute_dtype", "vocab_size", "tokenizer", "head", "payloads", "supports_temperature", "limits", "deterministic", "state", "stop_token_ids", "padding_rows", "supports_spans")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PADDING_ROWS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_SPANS_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: str
    model: str
    weights_hash: str
    compute_dtype: Dtype
    vocab_size: int
    tokenizer: TokenizerInfo
    head: HeadInfo
    payloads: _containers.RepeatedScalarFieldContainer[PayloadKind]
    supports_temperature: bool
    limits: Limits
    deterministic: bool
    state: TeacherState
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    padding_rows: int
    supports_spans: bool
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., weights_hash: _Optional[str] = ..., compute_dtype: _Optional[_Union[Dtype, str]] = ..., vocab_size: _Optional[int] = ..., tokenizer: _Optional[_Union[TokenizerInfo, _Mapping]] = ..., head: _Optional[_Union[HeadInfo, _Mapping]] = ..., payloads: _Optional[_Iterable[_Union[PayloadKind, str]]] = ..., supports_temperature: bool = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., deterministic: bool = ..., state: _Optional[_Union[TeacherState, str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., padding_rows: _Optional[int] = ..., supports_spans: bool = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("teachers", "server_version", "instance_id")
    TEACHERS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    teachers: _containers.RepeatedCompositeFieldContainer[TeacherInfo]
    server_version: str
    instance_id: str
    def __init__(self, teachers: _Optional[_Iterable[_Union[TeacherInfo, _Mapping]]] = ..., server_version: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class GetHeadRequest(_message.Message):
    __slots__ = ("teacher", "expected_hash", "chunk_bytes")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HASH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    expected_hash: str
    chunk_bytes: int
    def __init__(self, teacher: _Optional[str] = ..., expected_hash: _Optional[str] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class HeadHeader(_message.Message):
    __slots__ = ("head", "tensors")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    head: HeadInfo
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    def __init__(self, head: _Optional[_Union[HeadInfo, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ...) -> None: ...

class GetHeadResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: HeadHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[HeadHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("teacher", "expected_fingerprint", "chunk_bytes")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    expected_fingerprint: str
    chunk_bytes: int
    def __init__(self, teacher: _Optional[str] = ..., expected_fingerprint: _Optional[str] = ..., chunk_bytes: _Optional[int] = ...) -> None: ...

class TokenizerHeader(_message.Message):
    __slots__ = ("tokenizer", "byte_length", "sha256")
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    BYTE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    tokenizer: TokenizerInfo
    byte_length: int
    sha256: str
    def __init__(self, tokenizer: _Optional[_Union[TokenizerInfo, _Mapping]] = ..., byte_length: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: TokenizerHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[TokenizerHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TeacherLoad(_message.Message):
    __slots__ = ("teacher", "queued_sequences", "queued_tokens", "running_tokens", "tokens_per_second", "drain_seconds", "state")
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    teacher: str
    queued_sequences: int
    queued_tokens: int
    running_tokens: int
    tokens_per_second: float
    drain_seconds: float
    state: TeacherState
    def __init__(self, teacher: _Optional[str] = ..., queued_sequences: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., running_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., drain_seconds: _Optional[float] = ..., state: _Optional[_Union[TeacherState, str]] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("teachers", "token_budget_left", "instance_id")
    TEACHERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_LEFT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    teachers: _containers.RepeatedCompositeFieldContainer[TeacherLoad]
    token_budget_left: int
    instance_id: str
    def __init__(self, teachers: _Optional[_Iterable[_Union[TeacherLoad, _Mapping]]] = ..., token_budget_left: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class OverloadDetail(_message.Message):
    __slots__ = ("request_tokens", "used_tokens", "budget_tokens", "retry_after_seconds", "request_bytes", "used_bytes", "budget_bytes")
    REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_tokens: int
    used_tokens: int
    budget_tokens: int
    retry_after_seconds: float
    request_bytes: int
    used_bytes: int
    budget_bytes: int
    def __init__(self, request_tokens: _Optional[int] = ..., used_tokens: _Optional[int] = ..., budget_tokens: _Optional[int] = ..., retry_after_seconds: _Optional[float] = ..., request_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ...) -> None: ...
