"""Errors cross the wire as themselves, with typed details, and garbage never breaks the client."""

from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd import errors
from opd.wire.channel import ClientSecurity, channel_options, is_loopback, open_channel
from opd.wire.status import DETAILS_KEY, MAX_MESSAGE_CHARS, PUSHBACK_KEY, error_from_status, status_of

CROSSING = [cls for cls in errors.all_errors() if cls.status is not None]


@pytest.mark.parametrize("cls", CROSSING, ids=lambda c: c.__name__)
def test_an_error_comes_back_as_the_same_class_with_the_same_sentence(cls: type[errors.OpdError]) -> None:
    status = status_of(cls("what, where, how."))
    assert status.code.name == cls.status
    back = error_from_status(status.code, status.message, status.trailers)
    assert type(back) is cls
    assert str(back) == "what, where, how."


def test_overload_carries_usage_and_pushback() -> None:
    usage = {"request_tokens": 5, "used_tokens": 90, "budget_tokens": 100, "used_bytes": 7}
    status = status_of(errors.OverloadedError("full.", 0.7, usage))
    assert dict(status.trailers)[PUSHBACK_KEY] == "700"
    back = error_from_status(status.code, status.message, status.trailers)
    assert isinstance(back, errors.OverloadedError)
    assert back.retry_after == 0.7
    assert back.usage == usage


def test_a_long_sentence_is_cut_before_it_breaks_the_metadata_limit() -> None:
    status = status_of(errors.InvalidRequestError("x" * 100_000))
    assert len(status.message) == MAX_MESSAGE_CHARS
    assert sum(len(value) for _, value in status.trailers) < 4096


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, "cancelled", errors.CancelledError),
        (grpc.StatusCode.INTERNAL, "stream reset", errors.UnavailableError),
        (grpc.StatusCode.UNKNOWN, "bug", errors.UnavailableError),
        (grpc.StatusCode.UNIMPLEMENTED, "no method", errors.UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many pings", errors.OverloadedError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (5 vs. 4)",
            errors.InvalidRequestError,
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Stream removed (CLIENT: Received message larger than max (5 vs. 4))",
            errors.CorruptPayloadError,
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Sent message larger than max (5 vs. 4)",
            errors.InvalidRequestError,
        ),
        (grpc.StatusCode.UNAUTHENTICATED, "who", errors.AuthError),
    ],
)
def test_statuses_of_the_transport_are_mapped_too(
    code: grpc.StatusCode, message: str, kind: type[errors.OpdError]
) -> None:
    assert type(error_from_status(code, message)) is kind


def test_a_reason_is_believed_of_our_own_servers_alone() -> None:
    status = status_of(errors.DeviceMemoryError("too long."))
    proxy = [
        (key, value.replace(b"opd", b"xyz") if isinstance(value, bytes) else value) for key, value in status.trailers
    ]
    assert type(error_from_status(status.code, status.message, status.trailers)) is errors.DeviceMemoryError
    assert type(error_from_status(status.code, status.message, proxy)) is errors.IncompatibleTeacherError


def test_a_class_name_that_contradicts_the_code_is_not_believed() -> None:
    status = status_of(errors.InvalidRequestError("no."))
    assert type(error_from_status(grpc.StatusCode.UNAVAILABLE, "no.", status.trailers)) is errors.UnavailableError


@given(st.sampled_from(list(grpc.StatusCode)), st.text(), st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_garbage_in_the_trailers_never_breaks_the_client(code: grpc.StatusCode, message: str, data: bytes) -> None:
    assert isinstance(error_from_status(code, message, ((DETAILS_KEY, data), ("x", "y"))), errors.OpdError)


def test_the_channel_preset_is_frozen() -> None:
    options = dict(channel_options())
    assert options["grpc.http2.ping_timeout_ms"] == 5_000
    assert options["grpc.keepalive_time_ms"] == 10_000
    assert options["grpc.keepalive_timeout_ms"] == 5_000
    assert options["grpc.max_reconnect_backoff_ms"] == 2_000
    assert options["grpc.enable_retries"] == 0
    assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 64 * 2**20


@pytest.mark.parametrize("endpoint", ["localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/tmp/x"])
def test_loopback_endpoints_are_known(endpoint: str) -> None:
    assert is_loopback(endpoint)
    assert not is_loopback("10.0.0.1:1")
    assert not is_loopback("localhost.evil.example:1")
    assert not is_loopback("127.evil.example:1")


async def test_missing_credentials_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.AuthError, match="cannot be read"):
        open_channel("h:1", ClientSecurity(ca_file=f"{tmp_path}/none"))
    with pytest.raises(errors.AuthError, match="cannot be read"):
        ClientSecurity(token_file=f"{tmp_path}/none").metadata()
    monkeypatch.delenv("OPD_NO_SUCH_TOKEN", raising=False)
    with pytest.raises(errors.AuthError, match="OPD_NO_SUCH_TOKEN"):
        ClientSecurity(token_env="OPD_NO_SUCH_TOKEN").metadata()
    monkeypatch.setenv("OPD_NO_SUCH_TOKEN", " abc\n")
    assert ClientSecurity(token_env="OPD_NO_SUCH_TOKEN").metadata() == (("authorization", "Bearer abc"),)
    for text in (b"", b"two\nlines", b"two words", "tök".encode(), b"\xff"):
        (tmp_path / "token").write_bytes(text)
        with pytest.raises(errors.AuthError, match="printable ASCII"):
            ClientSecurity(token_file=tmp_path / "token").metadata()
    with pytest.raises(ValueError, match="cert_file and key_file"):
        ClientSecurity(cert_file="x")
