"""What `Describe` announces of a teacher."""

from opd.wire.bounds import RequestBounds, kind_code
from opd.wire.tensors import dtype_code
from opd.wire.types import PayloadKind
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.engines.base import EngineInfo, TokenizerIdentity

_TOKENS = 4096
"""Most tokens in a description: some 50 kB."""


def tokenizer_info(tokenizer: TokenizerIdentity, tokens_from: int | None = None) -> pb.TokenizerInfo:
    """The contract's description of a tokenizer; with some of its tokens if the caller asks for those from an id on."""
    return pb.TokenizerInfo(
        fingerprint=tokenizer.fingerprint,
        chat_template_hash=tokenizer.chat_template_hash,
        size=tokenizer.size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        pad_id=tokenizer.pad_id,
        tokens=() if tokens_from is None else tokenizer.tokens[tokens_from : tokens_from + _TOKENS],
    )


def teacher_info(info: EngineInfo, bounds: RequestBounds, state: int, tokens_from: int | None = None) -> pb.TeacherInfo:
    """The contract's description of a teacher; its tokenizer's tokens as `tokenizer_info` has them."""
    message = pb.TeacherInfo(
        name=bounds.teacher,
        engine=info.engine,
        model=info.model,
        weights_hash=info.weights_hash,
        compute_dtype=dtype_code(info.compute_dtype),
        vocab_size=info.vocab_size,
        tokenizer=tokenizer_info(info.tokenizer, tokens_from),
        # Those of the bounds, not of the engine: `full` is served only if the server allows it.
        payloads=[kind_code(kind) for kind in PayloadKind if kind in bounds.payloads],
        supports_temperature=info.supports_temperature,
        limits=pb.Limits(
            max_sequence_tokens=bounds.max_sequence_tokens,
            max_k=bounds.max_k,
            max_sequences=bounds.max_sequences,
            max_request_tokens=bounds.max_request_tokens,
            max_request_bytes=bounds.max_request_bytes,
        ),
        deterministic=info.deterministic,
        padding_rows=info.padding_rows,
        stop_token_ids=info.stop_token_ids,
        supports_spans=bounds.spans,
    )
    message.state = state  # type: ignore[assignment]
    if info.head is not None:
        message.head.CopyFrom(
            pb.HeadInfo(
                hash=info.head.hash,
                hidden_size=info.head.hidden_size,
                logit_scale=info.head.logit_scale,
                soft_cap=info.head.soft_cap,
                dtype=dtype_code(info.head.dtype),
                has_bias=info.head.has_bias,
            )
        )
    return message
