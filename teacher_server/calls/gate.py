"""The gate that every call passes, whatever door it came in by: who calls, and a slot for the call."""

import logging
import secrets
from contextlib import AbstractContextManager
from typing import Any

from opd.errors import AuthError, ScopeError
from teacher_server.calls.call_slots import CallSlots
from teacher_server.calls.caller import Caller
from teacher_server.calls.tokens import ANONYMOUS, Tokens
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.settings import OpenCallSettings

_log = logging.getLogger(__name__)


class Gate:
    """Lets calls in.

    Args:
        tokens: the server's bearer tokens.
        metrics: counts refused calls and failures.
        settings: how many calls may be open.

    Attributes:
        authorised: slots for calls of callers that may use the teachers.
        unauthenticated: slots for the health checks of all others.
        watches: slots for their health watches.
    """

    def __init__(self, tokens: Tokens, metrics: ServerMetrics, settings: OpenCallSettings) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self.authorised = CallSlots(settings.max_calls, round(settings.max_caller_share * settings.max_calls) or 1)
        # Health checks have slots of their own, so that a server at its limit of calls does not look dead to a load
        # balancer.
        self.unauthenticated = CallSlots(
            settings.max_unauthenticated_calls, -(-settings.max_unauthenticated_calls // 4)
        )
        self.watches = CallSlots(settings.max_watches, -(-settings.max_watches // 4))

    def identify(self, address: str, metadata: Any, scope: str) -> Caller:
        """The caller of a call, before anything of its request is read.

        Args:
            address: where it comes from; see `peer_address`.
            metadata: (key, value) pairs of the call.
            scope: the scope that the call needs; "" for health, which anyone may ask for.

        Raises:
            AuthError: if the call needs a token, and has none or an unknown one.
            ScopeError: if its token lacks the scope that the call needs.
        """
        try:
            # Health needs no scope, but a probe with a valid token still counts as its caller.
            principal = self._tokens.authenticate(metadata, scope or "score")
        except (AuthError, ScopeError) as error:
            if not scope:  # health: probes carry no token
                return Caller("", address, authorised=False)
            reason = "token" if isinstance(error, AuthError) else "scope"
            self._metrics.auth_failures.labels(reason).inc()
            raise
        if principal is ANONYMOUS:
            return Caller("", f"address {address}", authorised=scope != "")
        return Caller(principal.name, f"token {principal.name}", authorised=True)

    def hold(self, caller: Caller, *, watch: bool = False) -> AbstractContextManager[None]:
        """A slot for a call, during the context.

        Raises:
            OverloadedError: if there is none.
        """
        slots = self.watches if watch else self.unauthenticated
        if caller.authorised:
            slots = self.authorised
        # For the metric only: `hold` is what refuses.
        reason = slots.missing(caller.key)
        if reason:
            self._metrics.refused_calls.labels(reason).inc()
        return slots.hold(caller.key)

    def unexpected(self, method: str) -> str:
        """Logs the exception that is being handled under a random id; returns what the caller is told."""
        incident = secrets.token_hex(6)
        self._metrics.unexpected_errors.inc()
        _log.exception("unexpected error", extra={"incident": incident, "method": method})
        return f"the server met an unexpected error; its log has incident {incident}."
