"""Rollout engines vllm_server and sglang_server: separate servers, which all ranks share.

    sync     weights (the adapters of a LoRA student) go to a folder named by their hash, or over NCCL (see `transfer`);
             a sharded student writes one file per rank. Each server loads them once, for the first rank that asks, and
             every rank checks it by sampling after the known row
    sample   one request per row, to any server that has room; an answer names the weights that sampled it, and a row
             sampled with other weights, or with two versions, is requested again

Requests and answers carry token ids. Log-probs are those of the distribution sampled from, at the row's temperature.
The servers draw the tokens: each request carries a seed from the row's random stream, so a server of the same version
repeats its draw, but other engines draw other tokens. A server that does not answer, refuses a row or sends an
impossible one is left out until the next sync. No row is lost with it: its rows go to the other servers, and if none is
left, the run waits until one comes back, sends it the weights and continues.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from opd.errors import ConfigError, DataError, RolloutEngineError
from student.plugin.traits import Traits
from student.rollout.engine import EngineSetup, OnRow, RolloutEngine, ignore
from student.rollout.lost import EngineLostError
from student.rollout.servers.dialect import Answer, Ask, Dialect
from student.rollout.servers.packed import Packed
from student.rollout.servers.pool import KNOWN_TEMPERATURE, Pool
from student.rollout.servers.settings import ServersSettings
from student.rollout.servers.sglang import SglangDialect
from student.rollout.servers.vllm import VllmDialect

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.plan import PlannedRow
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.requests import Request
    from student.rollout.rows import Finish
    from student.settings.recipe import Recipe

log = logging.getLogger(__name__)
_FRUITLESS = 5
"""How many times in succession all servers may be lost without finishing a single row."""


class ServersEngine(RolloutEngine[ServersSettings]):
    """Samples with servers; see the module docstring. Subclasses set the dialect."""

    traits = Traits(holds_weights=True, on_device=False, takes_shards=True, shared=True)
    dialect: ClassVar[type[Dialect]]

    def __init__(self, settings: ServersSettings) -> None:
        super().__init__(settings)
        self._label = ""

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        for admin in (False, True):
            self.settings.api_key(admin=admin)
        lora = recipe.model.lora
        merged = lora is not None and (self.settings.merge_adapters or lora.dora)
        if lora is not None:
            from student.rollout.weights import check_merges

            check_merges(recipe.model, self.settings.name, merged=merged)
        if self.settings.transfer == "nccl":
            from student.rollout.servers.transfer import check_transfer

            if not self.dialect.receives:
                raise ConfigError(
                    f"rollout.engine {self.settings.name} can take weights only from a folder, but "
                    "rollout.engine.transfer is nccl; set rollout.engine.transfer: folder, or sample with vllm_server."
                )
            check_transfer(recipe, merged=merged)
        if self.settings.folder is None:
            # Next to the run's folder, not in it, because only the first rank may create the run's folder.
            beside = recipe.run.absolute().with_name(f"{recipe.run.name}.rollout")
            self.settings = self.settings.model_copy(update={"folder": beside})

    def open(self, setup: EngineSetup) -> None:
        """Check every server; the first sync sends the weights.

        Raises:
            ConfigError: if a server cannot be used.
            RolloutEngineError: if a server does not answer.
        """
        from student.model.lora import sends_adapters
        from student.rollout.held_update import HeldUpdate
        from student.rollout.servers.folder import WeightsFolder
        from student.rollout.servers.transfer import check_sender

        # Rows may be sampled ahead in a thread, and a fast tokenizer must not be used by two threads at once.
        super().open(dataclasses.replace(setup, tokenizer=copy.deepcopy(setup.tokenizer)))
        if self.settings.folder is None:
            raise ConfigError("rollout.engine.folder is not set; name a folder that the servers can read.")
        if self.settings.transfer == "nccl":
            check_sender(setup.model.device)
        self._dtype = setup.dtype(self.settings.dtype)
        self._held = HeldUpdate(setup.model, self._dtype)
        self._adapters = sends_adapters(setup.model) and not self.settings.merge_adapters
        self._folder = WeightsFolder(
            self.settings.folder, "" if setup.shards is None else setup.shards.run, setup.space
        )
        self._pool = Pool(
            self.settings,
            self.dialect,
            setup,
            adapters=self._adapters,
            lock=self._folder.lock,
            ask=lambda prompt, seed: self._ask(prompt, 1, KNOWN_TEMPERATURE, [], seed, 0),
            count=self._count,
        )

    def sync(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync`.

        Raises:
            RolloutEngineError: if the weights cannot be written, no server loads them, or a server does not hold the
                student's weights afterwards.
        """
        packed = self.pack(parameters, version)
        packed.load()
        packed.drop()

    def pack(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> Packed:
        """See `RolloutEngine.pack`.

        Raises:
            OpdError: if the weights cannot be written, by this rank or, for a sharded student, by another one.
        """
        from student.model.sharding import full
        from student.rollout.known_row import LikelyIds, Reader, read_together
        from student.rollout.servers.held import HeldWeights
        from student.rollout.servers.weights import shares, written

        began = time.monotonic()
        setup, shards, given = self.setup, self.setup.shards, dict(parameters)
        source: Path | HeldWeights
        if self.settings.transfer == "nccl":
            held = HeldWeights(setup.model, given.items(), self._dtype, self._held)
            label, source = held.label, held
        elif shards is None or self._adapters:
            whole = {name: full(tensor.detach()) for name, tensor in given.items()}
            label, source = self._folder.put(
                *written(setup.model, whole, self._dtype, self._held, adapters=self._adapters)
            )
        else:
            files = shares(setup.model, given.items(), self._dtype, self._held, shards.ranks)
            label, source = self._folder.put_together(files, setup.model.config.to_json_string(), shards.ranks)
        self._held.report(self._count)
        if shards is None:
            expected = Reader(setup.model, setup.spec).distributions(self._pool.known, given, KNOWN_TEMPERATURE)
        else:
            expected = read_together(shards.student, self._pool.known, setup.spec, KNOWN_TEMPERATURE)
        self._count("sync_seconds", time.monotonic() - began)
        likely = LikelyIds(setup.model, setup.spec, given) if self._pool.fills else None
        packed = Packed(self, label, source, version, expected, likely)
        # Kept on disk until `drop`, even if newer weights are written, for servers that come back.
        self._folder.hold(label)
        return packed

    def drop(self, packed: Packed) -> None:
        """Stop keeping the weights on disk for servers that come back."""
        self._folder.hold(packed.label, times=-1)

    def load(self, packed: Packed) -> None:
        """Make the servers sample with these weights from now on; raises as `sync` does."""
        began = time.monotonic()
        self.version, self._weights, self._label = packed.version, packed, packed.label
        self._pool.spread(self._weights)
        self._count("syncs", 1)
        self._count("sync_seconds", time.monotonic() - began)

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        """See `RolloutEngine.sample`.

        Raises:
            DataError: for a row that may become longer than the servers allow.
            RolloutEngineError: if all servers are lost, and none comes back in time or finishes a row.
        """
        from student.rollout.rows import sample_rows

        setup = self.setup
        rows: list[Row | None] = [None] * len(planned)
        fruitless = 0
        while left := [i for i, row in enumerate(rows) if row is None]:
            some = [planned[i] for i in left]
            try:
                got: Sequence[Row | None] = sample_rows(
                    setup.model,
                    setup.tokenizer,
                    some,
                    setup.spec,
                    self._decode,
                    policy_version=self.version,
                    purpose=purpose,
                    on_row=on_row,
                )
            except EngineLostError as error:
                log.warning("%s", error)
                got = error.rows
                # Otherwise, servers that crash on the same row whenever they come back would be waited for forever.
                fruitless = 0 if any(row is not None for row in got) else fruitless + 1
                if fruitless == _FRUITLESS:
                    raise RolloutEngineError(
                        f"all rollout servers were lost {fruitless} times in a row before one of {len(some)} rows was "
                        f"finished; look into their logs. The last failure: {error}"
                    ) from error
                self._pool.spread(self._weights)
            for i, row in zip(left, got, strict=True):
                rows[i] = row
        return [row for row in rows if row is not None]

    def close(self) -> None:
        """Remove the weights from the disk; the servers keep running with what they hold."""
        if hasattr(self, "_folder"):
            self._folder.close()

    def _ask(self, prompt: list[int], limit: int, temperature: float, stops: list[int], seed: int, top: int) -> Ask:
        head = int(self.setup.model.config.get_text_config().vocab_size)
        barred = range(self.setup.spec.valid_vocab, head)
        return Ask(prompt, limit, temperature, stops, seed, top, barred, self._label)

    def _decode(self, requests: Sequence[Request], order: Sequence[int], finish: Finish) -> None:
        from student.rollout.servers.crowd import Crowd

        asks = [self._asked(requests[i]) for i in order]

        def take(place: int, answer: Answer) -> None:
            self._deliver(requests[order[place]], answer)
            finish(order[place])

        crowd = Crowd(self._pool.holding(self._label), asks, self.settings.in_flight)
        try:
            crowd.run(take)
        finally:
            self._count("rows_reissued", crowd.reissued)

    def _asked(self, request: Request) -> Ask:
        if request.longest > self._pool.longest:
            raise DataError(
                f"{request.planned.prompt.name} and its answer may become {request.longest} tokens long, over the "
                f"{self._pool.longest} that the rollout servers allow; lower rollout.max_new_tokens, or start the "
                "servers with a larger maximum length."
            )
        planned = request.planned
        # From the row's own random stream, so that a repeated request has the same seed, on any server.
        seed = int(request.uniforms()[0] * 2**31)
        prompt = [int(token) for token in request.input_ids]
        stops = sorted(int(token) for token in request.stops)
        top = 0 if self._pool.fills else self.setup.spec.candidates
        return self._ask(prompt, planned.max_new_tokens, planned.temperature, stops, seed, top)

    def _deliver(self, request: Request, answer: Answer) -> None:
        """Pass an answer's tokens, which `answer_check` has checked, to its request."""
        from student.rollout.servers.weights import chosen

        spec = self.setup.spec
        likely: Sequence[NDArray[np.uint32] | None] = [None] * len(answer.ids)
        if self._weights.likely is not None:
            likely = list(self._weights.likely.of(request.input_ids.tolist(), answer.ids))
            self._count("rows_filled", 1)
        elif answer.top:
            likely = [chosen(top, spec.candidates, spec.keep_ids) for top in answer.top]
        for token in zip(answer.ids, answer.logp, likely, strict=True):
            request.take(*token)


class VllmServerEngine(ServersEngine):
    """VLLM servers that all ranks share, over HTTP.

    Samples with vLLM servers; see `student.rollout.servers.vllm` for how they are started.
    """

    dialect = VllmDialect


class SglangServerEngine(ServersEngine):
    """SGLang servers that all ranks share, over HTTP.

    Samples with SGLang servers; see `student.rollout.servers.sglang` for how they are started.
    """

    dialect = SglangDialect
