"""A tokenizer on the wire: the same tokenizer arrives, and nothing else is taken for one."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from made_tokenizers import KINDS, byte_level

from opd.errors import CorruptPayloadError, IncompatibleTeacherError
from opd.wire import tokenizer as wire
from opd.wire.fingerprint import chat_template_hash, tokenizer_fingerprint
from opd.wire.tokenizer import TokenizerStreamDecoder, document_of, encode_tokenizer, tokenizer_from
from opd.wire.v1 import teacher_pb2 as pb

TEXT = "Hello wörld\n\t12345 💥 <|note|></s>"


def info_of(tokenizer: Any) -> pb.TokenizerInfo:
    return pb.TokenizerInfo(
        fingerprint=tokenizer_fingerprint(tokenizer), chat_template_hash=chat_template_hash(tokenizer)
    )


def sent(tokenizer: Any, change: Callable[[list[Any]], list[Any]] = lambda messages: messages) -> bytes:
    messages = [*encode_tokenizer(info_of(tokenizer), document_of(tokenizer), 1024)]
    decoder = TokenizerStreamDecoder(info_of(tokenizer).fingerprint)
    for message in change(messages):
        decoder.feed(message)
    return decoder.finish()


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_gives_the_same_ids_and_the_same_template(kind: str) -> None:
    made = KINDS[kind]()
    made.chat_template = "{% for m in messages %}<{{ m['content'] }}>{{ eos_token }}{% endfor %}"
    found = tokenizer_from(sent(made), info_of(made), "t")
    assert found(TEXT)["input_ids"] == made(TEXT)["input_ids"]
    messages = [{"role": "user", "content": "x"}]
    assert found.apply_chat_template(messages, tokenize=False) == "<x></s>"


def test_chunks_out_of_place_or_missing_are_refused() -> None:
    for change in (
        lambda messages: messages[:-1],
        lambda messages: messages[1:],
        lambda messages: [*messages, messages[-1]],
        lambda messages: [messages[0], *messages[2:]],
        lambda messages: [messages[0], *messages],
    ):
        with pytest.raises(CorruptPayloadError):
            sent(byte_level(), change)


def test_another_tokenizer_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(CorruptPayloadError, match="was asked for"):
        TokenizerStreamDecoder("other").feed(
            next(encode_tokenizer(info_of(byte_level()), b"x\x9c\x03\x00\x00\x00\x00\x01", 9))
        )
    with pytest.raises(IncompatibleTeacherError, match="another tokenizer than it describes"):
        tokenizer_from(sent(byte_level()), info_of(byte_level(300)), "t")


def header(size: int) -> pb.GetTokenizerResponse:
    return pb.GetTokenizerResponse(header=pb.TokenizerHeader(byte_length=size, sha256="0"))


def test_sizes_are_bounded_before_anything_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptPayloadError, match="bytes on the wire"):
        TokenizerStreamDecoder().feed(header(wire.MAX_SENT_BYTES + 1))
    monkeypatch.setattr(wire, "MAX_DOCUMENT_BYTES", 1000)
    bomb = zlib.compress(b" " * 100_000)
    decoder = TokenizerStreamDecoder()
    decoder.feed(header(len(bomb)))
    decoder.feed(pb.GetTokenizerResponse(chunk=pb.Chunk(data=bomb)))
    with pytest.raises(CorruptPayloadError, match="more than the 1000 bytes"):
        decoder.finish()


def packed(**parts: Any) -> bytes:
    made = {"tokenizer": byte_level().backend_tokenizer.to_str(), "special_tokens": {}, "chat_template": None}
    return zlib.compress(json.dumps({**made, **parts}).encode())


def bomb() -> str:
    made = json.loads(byte_level().backend_tokenizer.to_str())
    wild = {
        "type": "Split",
        "pattern": {"Regex": "(\\S+\\s*)+[^\\s\\S]"},
        "behavior": "Isolated",
        "invert": False,
    }
    return json.dumps({**made, "pre_tokenizer": wild})


@pytest.mark.parametrize(
    "document",
    [
        zlib.compress(b"{"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b"[]"),
        packed(tokenizer="{}"),
        packed(tokenizer='{"normalizer": ' * 500),
        packed(tokenizer=7),
        packed(special_tokens=[1]),
        packed(chat_template=3),
        packed(tokenizer=bomb()),
    ],
)
def test_hostile_files_are_refused_in_a_sentence(document: bytes) -> None:
    with pytest.raises(IncompatibleTeacherError, match="teacher 't' sent"):
        tokenizer_from(document, info_of(byte_level()), "t")


def test_a_tokenizer_with_code_of_its_own_is_not_sent() -> None:
    class Own:
        backend_tokenizer = byte_level().backend_tokenizer

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1, 2, 3]

    assert document_of(Own()) == b""
    assert document_of(object()) == b""
