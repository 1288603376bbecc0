"""A teacher's tokenizer on the wire, for students that have another one: data without code, checked on arrival.

    document_of(tokenizer) -> bytes      what travels: zlib of JSON, as teacher.proto says
    encode_tokenizer(info, document)     the messages of GetTokenizer
    TokenizerStreamDecoder               assembles them again
    tokenizer_from(document, info)       a tokenizer that gives the ids and renders the template of the teacher's

A server may be hostile: sizes are bounded before anything is unpacked, the tokenizers library bounds the depth of its
JSON and the work of its patterns, and transformers renders chat templates in a sandbox.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opd.errors import CorruptPayloadError, IncompatibleTeacherError, one_line
from opd.strict_json import read_json
from opd.tokenizer_files import PROBE
from opd.wire.assembly import Assembly
from opd.wire.encoder import chunk_messages
from opd.wire.fingerprint import chat_template_hash, tokenizer_fingerprint
from opd.wire.v1 import teacher_pb2 as pb

MAX_DOCUMENT_BYTES = 128 << 20
"""Largest JSON that is unpacked; that of Gemma's 262,144 tokens has 34 MB."""
MAX_SENT_BYTES = 32 << 20
"""Largest zlib stream that is accepted."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def document_of(tokenizer: Any) -> bytes:
    """What GetTokenizer sends of a `transformers` tokenizer; empty if it has code of its own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return b""
    from tokenizers import Tokenizer

    text = backend.to_str()
    if _ids(Tokenizer.from_str(text), PROBE) != tokenizer.encode(PROBE, add_special_tokens=False):
        return b""
    special = {name: str(token) for name in _SPECIAL if (token := getattr(tokenizer, name, None)) is not None}
    template = getattr(tokenizer, "chat_template", None)
    parts = {"tokenizer": text, "special_tokens": special, "chat_template": template}
    return zlib.compress(json.dumps(parts, ensure_ascii=False).encode(), 1)


def _ids(backend: Any, text: str) -> list[int]:
    backend.no_padding()
    backend.no_truncation()
    return list(backend.encode(text, add_special_tokens=False).ids)


def encode_tokenizer(info: pb.TokenizerInfo, document: bytes, chunk_bytes: int) -> Iterator[pb.GetTokenizerResponse]:
    """The messages of a tokenizer stream: a header, then chunks, built one at a time."""
    digest = hashlib.sha256(zlib.decompress(document)).hexdigest()
    yield pb.GetTokenizerResponse(header=pb.TokenizerHeader(tokenizer=info, byte_length=len(document), sha256=digest))
    for chunk in chunk_messages([memoryview(document)], chunk_bytes):
        yield pb.GetTokenizerResponse(chunk=chunk)


class TokenizerStreamDecoder:
    """Assembles a tokenizer stream.

    Args:
        expected: fingerprint that the tokenizer must have, normally the one from `Describe`; "" for any.
    """

    def __init__(self, expected: str = "") -> None:
        self._expected = expected
        self._header: pb.TokenizerHeader | None = None
        self._assembly = Assembly("a tokenizer", 0)

    def feed(self, message: pb.GetTokenizerResponse) -> None:
        """Take a message of the stream.

        Raises:
            CorruptPayloadError: on any violation of the contract.
        """
        kind = message.WhichOneof("message")
        if kind == "header" and self._header is None:
            self._header = message.header
            found, size = self._header.tokenizer.fingerprint, self._header.byte_length
            if self._expected not in ("", found):
                raise CorruptPayloadError(
                    f"the tokenizer has fingerprint {found!r}, but {self._expected!r} was asked for."
                )
            if not 0 < size <= MAX_SENT_BYTES:
                raise CorruptPayloadError(
                    f"the tokenizer has {size} bytes on the wire, but 1 to {MAX_SENT_BYTES} are accepted."
                )
            self._assembly = Assembly("a tokenizer", size)
        elif kind == "chunk" and self._header is not None:
            self._assembly.add(message.chunk)
        else:
            raise CorruptPayloadError(f"the tokenizer's stream holds {kind or 'an empty message'} out of place.")

    def finish(self) -> bytes:
        """The document, after its size and hash are compared with the header's.

        Raises:
            CorruptPayloadError: if bytes are missing, it is too large when unpacked, or the hash does not match.
        """
        if self._header is None or not self._assembly.complete:
            raise CorruptPayloadError(f"the tokenizer's stream ended after {self._assembly.filled} bytes.")
        document = bytes(self._assembly.buffer)
        if hashlib.sha256(_unpacked(document)).hexdigest() != self._header.sha256:
            raise CorruptPayloadError("the tokenizer that arrived does not have its announced hash; ask again.")
        return document


@contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Refuse whatever the tokenizers library raises within: bare exceptions, and panics, which do not derive from them.

    Raises:
        IncompatibleTeacherError: saying what failed, why, and the fix.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise IncompatibleTeacherError(f"{what}: {one_line(error, 200)}; {fix}.") from error


def _unpacked(document: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(document, MAX_DOCUMENT_BYTES)
    except zlib.error as error:
        raise CorruptPayloadError(f"the tokenizer is not a zlib stream: {error}; ask again.") from error
    if not unpacker.eof:
        raise CorruptPayloadError(
            f"the tokenizer is cut off, or has more than the {MAX_DOCUMENT_BYTES} bytes that are accepted."
        )
    return text


def tokenizer_from(document: bytes, info: pb.TokenizerInfo, teacher: str) -> Any:
    """A `transformers` tokenizer made from a document; nothing of it runs but its template, in a sandbox.

    Args:
        document: from `TokenizerStreamDecoder.finish`, or a store.
        info: what `Describe` says of the tokenizer.
        teacher: name of the teacher, for messages.

    Raises:
        IncompatibleTeacherError: if no tokenizer can be made of it, or not the one that `info` describes.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fix = "serve the teacher from a folder whose tokenizer.json transformers can load"
    with refusing(f"the tokenizer that teacher {teacher!r} sent cannot be read", fix):
        parts = read_json(_unpacked(document))
        backend = Tokenizer.from_str(parts["tokenizer"])
        _ids(backend, PROBE * 8)  # a pattern that runs wild does so here, up to the library's limit
        special = {name: str(token) for name, token in parts["special_tokens"].items() if name in _SPECIAL}
        made = PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=False, name_or_path=f"teacher {teacher}", **special
        )
        made.chat_template = parts["chat_template"]
        found = tokenizer_fingerprint(made), chat_template_hash(made)
    if found != (info.fingerprint, info.chat_template_hash):
        raise IncompatibleTeacherError(
            f"teacher {teacher!r} sent another tokenizer than it describes (fingerprint {found[0][:12]}, not "
            f"{info.fingerprint[:12]}, or another chat template); serve it again from its own folder."
        )
    return made
