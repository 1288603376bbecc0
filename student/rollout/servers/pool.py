"""The servers of an engine together: what all of them can do, and that they hold the weights of the last sync.

Each server that answers is given the weights, and then asked for a token after every beginning of the known row. A
server that cannot be reached or cannot load them is left out until the next sync, as long as another holds them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from opd.errors import ConfigError, RolloutEngineError
from student.rollout.servers.dialect import Ask, Dialect
from student.rollout.servers.http import LostError
from student.rollout.servers.server import NotLoadedError, Server

if TYPE_CHECKING:
    from filelock import FileLock

    from student.rollout.engine import EngineSetup
    from student.rollout.servers.packed import Packed
    from student.rollout.servers.settings import ServersSettings

log = logging.getLogger(__name__)
KNOWN_TEMPERATURE = 0.7
"""Not 1, so that a server that gives log-probs of temperature 1 throughout is found out."""
_ASK_AGAIN_SECONDS = 1.0


class Pool:
    """Looks at every server when it is made; the weights of the run come with `spread`.

    Args:
        settings: of the engine.
        dialect: how the servers are asked.
        setup: what the engine was opened with.
        adapters: whether they are sent adapters, and not whole weights.
        lock: of all ranks, for a server's address.
        ask: (prompt, seed) -> what to ask for one token at `KNOWN_TEMPERATURE`, of the weights that are spread.
        count: adds to a count of the engine, by name.

    Attributes:
        servers: all of them.
        longest: most tokens of a row that every one of them allows.
        fills: whether the student finds the candidates, because a server gives too few.
        known: the known row.

    Raises:
        ConfigError: when one cannot be used.
        RolloutEngineError: when one does not answer.
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

        self._settings, self._setup = settings, setup
        self._lock, self._ask, self._count = lock, ask, count
        self.servers = [Server(url, dialect(), settings, adapters=adapters) for url in settings.endpoints]
        self.longest, self.fills = 2**31, False
        for server in self.servers:
            self._look_at(server)
        self.known = KnownRow.of(setup.spec, self.longest)

    def _look_at(self, server: Server) -> None:
        try:
            facts = server.facts()
        except LostError as error:
            raise RolloutEngineError(f"rollout server {error}; start it first, or leave it out.") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"rollout server {server.url} does not say of itself what servers of engine {self._settings.name} do "
                f"({type(error).__name__}: {error}); name the engine of its kind, or another endpoint."
            ) from error
        if facts.wrong:
            raise ConfigError(f"rollout server {server.url} {facts.wrong}.")
        if facts.most_likely < self._setup.spec.candidates:
            self._lacking(server, facts.most_likely)
        self.longest = min(self.longest, facts.longest)

    def _lacking(self, server: Server, most_likely: int) -> None:
        """Take note of a server that gives too few candidates: the student finds them, of all rows.

        Raises:
            ConfigError: where no rank can run the student by itself.
        """
        needed = self._setup.spec.candidates
        said = f"rollout server {server.url} gives at most {most_likely} likely ids, and the objective needs {needed}"
        more = f"start it with --max-logprobs {needed}"
        if self._setup.shards is not None:
            raise ConfigError(f"{said}, which a sharded student (train.sharding) cannot find for a row alone; {more}.")
        if not self.fills:
            log.warning("%s: the student finds them, a forward of each row; to save that, %s.", said, more)
        self.fills = True

    def holding(self, label: str) -> list[Server]:
        """The servers that rows are asked of.

        Raises:
            RolloutEngineError: when there is none.
        """
        servers = [server for server in self.servers if server.label == label and label]
        if not servers:
            raise RolloutEngineError("no rollout server holds the student's weights; sync before sampling.")
        return servers

    def spread(self, weights: Packed) -> None:
        """Have every server that answers hold the weights; wait for one when none does.

        Raises:
            RolloutEngineError: when none took them, or one holds others.
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
            # A lost server may come back and is waited for; a server that refuses the weights would do so again.
            refused = [error for error in failures if isinstance(error, RolloutEngineError)]
            if refused or time.monotonic() >= until:
                said = "; ".join(str(error).rstrip(".") for error in refused or failures)
                raise RolloutEngineError(f"no rollout server holds the student's weights: {said}.")
            time.sleep(_ASK_AGAIN_SECONDS)

    def _renew(self, server: Server, weights: Packed) -> Exception | bool:
        """Have one server hold the weights; whether it loaded them, or why the others must go on without it."""
        failure: Exception
        try:
            loaded = server.update(weights.source, weights.label, self._lock(server.url))
            self._compare(server, weights)
            return loaded
        except (LostError, NotLoadedError) as error:
            failure = error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            # As a proxy does that has a page for a server which is away.
            failure = LostError(f"{server.url} answered otherwise than expected ({type(error).__name__}: {error})")
        server.label, server.lost = None, str(failure)
        return failure

    def _compare(self, server: Server, weights: Packed) -> None:
        """Have the server sample a token after each beginning of the known row, and look up what the student gives it.

        Raises:
            RolloutEngineError: when their log-probs differ.
        """
        from student.rollout.known_row import distance, tolerance

        # Below 2^31 with what is added to it, as `Ask.seed` has to be.
        seed, logp, expected = self._setup.spec.seed % 2**30, [], []
        connection = server.connect(self._settings.sync_seconds)
        try:
            for at, ids in enumerate(self.known.beginnings()):
                answer = server.generate(connection, self._ask(ids, seed + at))
                if not answer.whole or answer.weights != (weights.label,):
                    raise LostError(f"{server.url} was given other weights meanwhile")
                logp += answer.logp
                # Looked up by what was drawn, because servers need not draw the same token.
                expected += [weights.expected[at, token] for token in answer.ids]
        finally:
            connection.close()
        gap = distance(logp, np.array(expected))
        bound = self._settings.tolerance or tolerance(self._setup.dtype(self._settings.dtype))
        if gap > bound:
            server.label, server.lost = None, "it holds other weights"
            raise RolloutEngineError(
                f"after a sync, the log-probs of rollout server {server.url} for the known row are {gap:.3g} nats from "
                f"the student's, over rollout.engine.tolerance {bound:g}: it holds others or computes otherwise; "
                "start it on the student's own model, or raise the tolerance if the numbers of a lower precision are "
                "meant."
            )
