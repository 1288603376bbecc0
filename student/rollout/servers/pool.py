"""All servers of an engine: what they have in common, and whether each holds the weights of the last sync.

A sync gives the weights to each server that answers, and then samples a token after every beginning of the known row. A
server that cannot be reached or cannot load them is left out until the next sync, as long as another server holds them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from opd.engine_versions import note_version
from opd.errors import ConfigError, OpdError, RolloutEngineError, one_line
from student.rollout.servers.dialect import Ask, Dialect
from student.rollout.servers.http import LostError
from student.rollout.servers.server import MALFORMED, NotLoadedError, Server

if TYPE_CHECKING:
    from filelock import FileLock

    from student.rollout.engine import EngineSetup
    from student.rollout.servers.packed import Packed
    from student.rollout.servers.settings import ServersSettings

log = logging.getLogger(__name__)
KNOWN_TEMPERATURE = 0.7
"""Different from 1, so that a server that always returns log-probs of temperature 1 is detected."""
_ASK_AGAIN_SECONDS = 1.0


class Pool:
    """The servers of an engine. Construction checks every server; `spread` sends the weights.

    Args:
        settings: the engine's settings.
        dialect: the calls of this kind of server.
        setup: what the engine was opened with.
        adapters: whether the servers are sent adapters instead of whole weights.
        lock: returns a lock shared by all ranks, for a server's address.
        ask: (prompt, seed) -> a request for one token at `KNOWN_TEMPERATURE` from the weights that were spread.
        count: adds to a count of the engine, by name.

    Attributes:
        servers: all servers.
        longest: maximum tokens of a row that all of them allow.
        fills: whether the student finds the candidates, because a server returns too few.
        known: the known row.

    Raises:
        ConfigError: if no server can be used, and the first one answers.
        RolloutEngineError: if no server can be used, and the first one does not answer.
    """

    def __init__(
        self,
        settings: ServersSettings,
        dialect: type[Dialect],
        setup: EngineSetup,
        *,
        adapters: bool,
        lock: Callable[[str], FileLock],
        ask: Callable[[list[int], int], Ask],
        count: Callable[[str, float], None],
    ) -> None:
        from student.rollout.known_row import KnownRow

        self._settings, self._setup, self._engine = settings, setup, dialect.engine
        self._lock, self._ask, self._count = lock, ask, count
        self.servers = [Server(url, dialect(), settings, adapters=adapters) for url in settings.endpoints]
        self.longest, self.fills = 2**31, False
        failures = []
        for server in self.servers:
            try:
                self._look_at(server)
            except (LostError, ConfigError, RolloutEngineError, *MALFORMED) as error:
                server.lost = one_line(error)
                failures.append(self._unusable(server, error))
        if len(failures) == len(self.servers):
            raise failures[0]
        for failure in failures:
            log.warning("%s It is left out until it can be used, which is tried again at each sync.", failure)
        self.known = KnownRow.of(setup.spec, self.longest)

    def _look_at(self, server: Server) -> None:
        facts = server.facts()
        if facts.wrong:
            raise ConfigError(f"rollout server {server.url} {facts.wrong}.")
        self._check_barred(server, facts.most_barred)
        note_version(self._engine, facts.version, f"rollout server {server.url}")
        if facts.most_likely < self._setup.spec.candidates:
            self._lacking(server, facts.most_likely)
        self.longest, server.known = min(self.longest, facts.longest), True

    def _check_barred(self, server: Server, most: int) -> None:
        """Refuse a student whose head has more padding rows than the server can keep from being drawn.

        Raises:
            ConfigError: with both numbers.
        """
        rows = int(self._setup.model.config.get_text_config().vocab_size)
        if rows - self._setup.spec.valid_vocab > most:
            raise ConfigError(
                f"the student's head has {rows - self._setup.spec.valid_vocab} rows without a token, but rollout "
                f"server {server.url} can keep at most {most} ids from being drawn; remove such rows with "
                "resize_token_embeddings, or set rollout.engine to {name: vllm}."
            )

    def _unusable(self, server: Server, error: Exception) -> OpdError:
        if isinstance(error, ConfigError):
            return error
        if isinstance(error, MALFORMED):
            return ConfigError(
                f"rollout server {server.url} does not describe itself as servers of engine {self._settings.name} do "
                f"({type(error).__name__}: {one_line(error, 200)}); set rollout.engine.name to the engine for servers "
                "of its kind, or name another endpoint."
            )
        return RolloutEngineError(
            f"rollout server {one_line(error)}; start it first, or remove it from rollout.engine.endpoints."
        )

    def _admit(self, server: Server) -> None:
        """Look at a server that could not be used when the run began; it must allow what the others do.

        Raises:
            NotLoadedError: if it does not.
        """
        facts = server.facts()
        fewer = facts.most_likely < self._setup.spec.candidates and not self.fills
        if facts.wrong:
            raise NotLoadedError(f"rollout server {server.url} {facts.wrong}.")
        if facts.longest < self.longest or fewer:
            raise NotLoadedError(
                f"rollout server {server.url} allows {facts.longest} tokens and {facts.most_likely} likely ids, fewer "
                "than the others; start it with their limits."
            )
        server.known = True

    def _lacking(self, server: Server, most_likely: int) -> None:
        """Handle a server that returns too few candidates: the student finds the candidates of all rows instead.

        Raises:
            ConfigError: if no rank can run the student by itself.
        """
        needed = self._setup.spec.candidates
        said = f"rollout server {server.url} returns at most {most_likely} likely ids, but the objective needs {needed}"
        more = f"start it with --max-logprobs {needed}"
        if self._setup.shards is not None:
            raise ConfigError(
                f"{said}, and with a sharded student (train.sharding) a rank cannot compute them for a row by itself; "
                f"{more}."
            )
        if not self.fills:
            log.warning(
                "%s: the student computes them instead, with a forward pass over each row; to save that, %s.",
                said,
                more,
            )
        self.fills = True

    def holding(self, label: str) -> list[Server]:
        """The servers that hold the weights called `label`.

        Raises:
            RolloutEngineError: if there are none.
        """
        servers = [server for server in self.servers if server.label == label and label]
        if not servers:
            raise RolloutEngineError("no rollout server holds the student's weights; sync before sampling.")
        return servers

    def spread(self, weights: Packed) -> None:
        """Send the weights to every server that answers; wait for one if none does.

        Raises:
            RolloutEngineError: if no server loaded them, or those that did turn out to hold other weights.
        """
        until = time.monotonic() + self._settings.patience_seconds
        while True:
            with ThreadPoolExecutor(len(self.servers)) as pool:
                found = list(pool.map(lambda server: self._renew(server, weights), self.servers))
            self._count("weights_loaded", sum(loaded is True for loaded in found))
            failures = [error for error in found if isinstance(error, Exception)]
            for error in failures:
                self._count("servers_lost", 1)
                log.warning("%s", error)
            if any(server.label == weights.label for server in self.servers):
                return
            # A lost server may come back, and is waited for; a server that refused the weights would refuse them again.
            refused = [error for error in failures if isinstance(error, RolloutEngineError)]
            if refused or time.monotonic() >= until:
                said = "; ".join(str(error).rstrip(".") for error in refused or failures)
                raise RolloutEngineError(f"no rollout server holds the student's weights: {said}.")
            time.sleep(_ASK_AGAIN_SECONDS)

    def _renew(self, server: Server, weights: Packed) -> Exception | bool:
        """Send the weights to one server; returns whether it had to load them, or the error why it is left out."""
        failure: Exception
        try:
            if not server.known:
                self._admit(server)
            loaded = server.update(weights.source, weights.label, self._lock(server.url))
            self._compare(server, weights)
            return loaded
        except (LostError, RolloutEngineError) as error:
            failure = error
        except MALFORMED as error:
            # For example a proxy that answers with an HTML page while the server behind it is away.
            failure = LostError(f"{server.url} sent an unexpected answer ({type(error).__name__}: {error})")
        server.label, server.lost = None, str(failure)
        return failure

    def _compare(self, server: Server, weights: Packed) -> None:
        """Sample a token after each beginning of the known row, and compare its log-prob with the student's.

        Raises:
            RolloutEngineError: if the log-probs differ by more than the tolerance.
        """
        from student.rollout.known_row import distance, tolerance

        # Small enough to stay below 2^31, as `Ask.seed` must, with what is added to it.
        seed, logp, expected = self._setup.spec.seed % 2**30, [], []
        connection = server.connect(self._settings.sync_seconds)
        try:
            for at, ids in enumerate(self.known.beginnings()):
                answer = server.generate(connection, self._ask(ids, seed + at))
                if not answer.whole or answer.weights != (weights.label,):
                    raise LostError(f"{server.url} was given other weights meanwhile")
                logp += answer.logp
                # Looked up for the token that was drawn, because servers need not draw the same one.
                expected += [weights.expected[at, token] for token in answer.ids]
        finally:
            connection.close()
        gap = distance(logp, np.array(expected))
        bound = self._settings.tolerance or tolerance(
            *(self._setup.dtype(asked) for asked in (self._settings.dtype, "auto"))
        )
        if gap > bound:
            raise RolloutEngineError(
                f"after a sync, the log-probs of rollout server {server.url} for the known row differ from the "
                f"student's by {gap:.3g} nats, over rollout.engine.tolerance {bound:g}: the server holds other "
                "weights or computes differently; start it on the student's own model, or raise the tolerance if it "
                "computes in a lower precision on purpose."
            )
