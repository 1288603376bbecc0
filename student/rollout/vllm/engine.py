"""Rollout engine vllm: vLLM runs the model in this process, and tokens are drawn from the rows' own random streams.

A resumed run therefore samples the same rows, and rows equal those of engine transformers up to rounding: they differ
only if a uniform number falls within the rounding of a boundary between two tokens. Log-probs are those of the
distribution sampled from, at the row's temperature. Any number of candidates is possible.

    sync     replace all weights in place (`weights`), or only the adapters beside them (`adapters`), empty the prefix
             cache, compare the known row
    sample   one request per row; each row leaves as soon as it has ended
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import ConfigError, DataError, RolloutEngineError, one_line
from opd.lengths import most_positions
from student.plugin.traits import Traits
from student.rollout.engine import EngineSetup, OnRow, RolloutEngine, ignore
from student.rollout.lost import EngineLostError
from student.rollout.vllm.settings import VllmSettings, check_vllm
from student.rollout.vllm.sleep import Sleep

if TYPE_CHECKING:
    from torch import Tensor

    from student.data.plan import PlannedRow
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.requests import Request
    from student.rollout.rows import Finish
    from student.rollout.vllm.adapters import Adapters
    from student.rollout.vllm.draws import Draw
    from student.settings.recipe import Recipe

Ended = Callable[[int, Sequence[int]], object]
_RESTARTS = 2
_SPARE = 256
"""Cache tokens on top of the recipe's: vLLM rounds the longest row up to whole blocks and keeps one block back."""


class VllmRollout(RolloutEngine[VllmSettings]):
    """VLLM in process, with a random stream per row."""

    traits = Traits(holds_weights=True, takes_shards=True)

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings)
        self._llm: Any = None
        self._whole = False
        self._sleep = Sleep(enabled=settings.sleep)
        self._given: dict[str, Tensor] = {}
        self._adapters: Adapters | None = None

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        check_vllm(self.settings, recipe)

    def open(self, setup: EngineSetup) -> None:
        """Start vLLM with random weights, or with the base where it applies adapters itself.

        The first sync brings what the student has learned.

        Raises:
            ConfigError: if vLLM cannot run the model, or `sleep` is set on a CPU.
        """
        # Rows may be sampled ahead in a thread, and a fast tokenizer must not be used by two threads at once.
        super().open(dataclasses.replace(setup, tokenizer=copy.deepcopy(setup.tokenizer)))
        import torch

        from student.rollout.held_update import HeldUpdate
        from student.rollout.known_row import KnownRow
        from student.rollout.vllm.adapters import lora_options, merged

        self._dtype = setup.dtype(self.settings.dtype)
        self._held = HeldUpdate(setup.model, self._dtype)
        sleep = self.settings.sleep
        self._sleep = Sleep(enabled=sleep)
        if sleep and not torch.cuda.is_available():
            raise ConfigError("rollout.engine.sleep frees GPU memory, but there is no GPU here; remove it.")
        config = setup.model.config.get_text_config()
        cache = setup.spec.cache_tokens
        self._longest = min(most_positions(config) or cache, cache)
        options = {
            "dtype": self._dtype,
            "revision": setup.revision,
            "max_model_len": self._longest,
            "max_num_seqs": setup.spec.batch_rows,
            "kv_cache_memory_bytes": (cache + _SPARE) * cache_bytes(config, 4 if self._dtype == "float32" else 2),
            # The share of memory that vLLM requires to be free before it reads the line above.
            "gpu_memory_utilization": 0.05,
            "seed": 0,
            "enable_sleep_mode": sleep,
        }
        options |= lora_options(setup.model, self._dtype) | self.settings.options
        self._known = KnownRow.of(setup.spec, self._longest)
        self._start(options)
        if self._adapters is not None and (problem := self._adapters.problem(self._llm)):
            self.close()
            self._start(options | merged(problem))

    def _start(self, options: dict[str, Any]) -> None:
        from student.model.lora import sends_adapters
        from student.rollout.vllm.adapters import Adapters
        from student.rollout.vllm.launch import start
        from student.rollout.vllm.streams import RowStreams

        model, path = self.setup.model, self.setup.path
        applies = bool(options.get("enable_lora")) and sends_adapters(model)
        self._adapters = Adapters(model, self._dtype, self._held) if applies else None
        ours: dict[str, Any] = {"skip_tokenizer_init": True, "async_scheduling": False}
        ours |= {"load_format": "auto" if applies else "dummy", "logits_processors": [RowStreams]}
        self._llm, self._whole = start(path, options | ours), False
        try:
            self._score_known_row()
        except EngineLostError as error:
            raise ConfigError(f"vLLM knows the model class of student {path!r} but cannot run it: {error}") from error

    def sync(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync`.

        Raises:
            RolloutEngineError: if vLLM does not hold the student's weights afterwards, even after a restart; it is then
                not sampled from until a sync succeeds.
        """
        began = time.monotonic()
        self._given, self.version = dict(parameters), version
        # If the student is sharded, every layer is gathered from all ranks.
        with nullcontext() if self.setup.shards is None else self.setup.shards.ranks.bound():
            try:
                self._renew()
            except EngineLostError:
                if not self._may_restart():
                    raise
                self._renew()
                self._count("restarts", 1)
        self._count("syncs", 1)
        self._count("sync_seconds", time.monotonic() - began)

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        """See `RolloutEngine.sample`. If vLLM fails, it is restarted and samples the rows that are left.

        Raises:
            DataError: for a row that may become longer than the model or the cache allows.
            EngineLostError: if vLLM failed three times, or once in a run of several ranks.
        """
        found: list[Row | None] = [None] * len(planned)
        failures = 0
        while left := [i for i, row in enumerate(found) if row is None]:
            try:
                if failures:
                    self._renew()
                    self._count("restarts", 1)
                rows: Sequence[Row | None] = self._rows([planned[i] for i in left], purpose, on_row)
            except EngineLostError as error:
                failures += 1
                if failures > _RESTARTS or not self._may_restart():
                    raise
                rows = error.rows
            # `rows` is empty if vLLM failed before it started on them.
            for i, row in zip(left, rows, strict=False):
                found[i] = row
        return [row for row in found if row is not None]

    def rest(self) -> None:
        """See `RolloutEngine.rest`.

        Raises:
            EngineLostError: if vLLM did not release the GPU's memory.
        """
        if self._llm is not None:
            try:
                self._sleep.rest(self._llm)
            except EngineLostError:
                self._abandon()
                raise

    def _rows(self, planned: Sequence[PlannedRow], purpose: tuple[object, ...], on_row: OnRow) -> list[Row]:
        from student.rollout.rows import sample_rows

        setup = self.setup
        self._wake()
        return sample_rows(
            setup.model,
            setup.tokenizer,
            planned,
            setup.spec,
            self._decode,
            policy_version=self.version,
            purpose=purpose,
            on_row=on_row,
        )

    def close(self) -> None:
        """Stop vLLM and free its memory."""
        llm, self._llm, self._whole = self._llm, None, False
        if llm is not None:
            from student.rollout.vllm.launch import end

            end(llm)

    def _renew(self) -> None:
        """Load the weights of the last sync into vLLM, restarting it if needed, and clear what older weights cached."""
        from student.rollout.known_row import Reader, distance, read_together, tolerance
        from student.rollout.weights import checkpoint_tensors

        if self._llm is None:
            self.open(self.setup)
        self._wake()
        self._whole = False
        try:
            if self._adapters is not None:
                self._adapters.load(self._llm, self._given)
            else:
                tensors = self._held.through(checkpoint_tensors(self.setup.model, self._given.items()))
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        except Exception as error:
            self._abandon()  # some of its layers may be half loaded
            reason = one_line(error, 300)
            raise EngineLostError(f"vLLM did not take the student's weights: {reason}.") from error
        self._held.report(self._count)
        if self._llm.reset_prefix_cache() is False:
            raise RolloutEngineError(
                "vLLM did not empty its prefix cache, so it would sample with what old weights computed."
            )
        setup, known, shards = self.setup, self._known, self.setup.shards
        if shards is None:
            expected = Reader(setup.model, setup.spec).log_probs(known, self._given)
        else:
            expected = known.of_answer(read_together(shards.student, known, setup.spec, 1.0))
        gap = distance(self._score_known_row(), expected)
        bound = self.settings.tolerance or tolerance(self._dtype, setup.dtype("auto"))
        if gap > bound:
            raise RolloutEngineError(
                f"after a sync, vLLM's log-probs of the known row differ from the student's by {gap:.3g} nats, over "
                f"rollout.engine.tolerance {bound:g}: it holds other weights or computes differently; set "
                "rollout.engine to {name: transformers}, or raise the tolerance if vLLM computes in a lower precision "
                "on purpose."
            )
        self._whole = True

    def _score_known_row(self) -> list[float]:
        """The log-probs that vLLM gives the known row's answer, nats."""
        from student.rollout.known_row import ANSWER
        from student.rollout.vllm.draws import Draw

        # The uniforms are not used, because a draw with given tokens takes these.
        draw = Draw(self.setup.spec, np.full(ANSWER, 0.5), 1.0, self._known.answer)
        self._run([(draw, self._known.prompt, frozenset(), len(self._known.answer))], lambda place, ids: None)
        return draw.logp

    def _decode(self, requests: Sequence[Request], order: Sequence[int], finish: Finish) -> None:
        from student.rollout.vllm.draws import Draw

        if not self._whole:
            raise RolloutEngineError("vLLM does not hold the student's weights; sync it before it samples.")
        work, draws = [], []
        for i in order:
            request = requests[i]
            # All rows are checked before vLLM gets the first one.
            if request.longest > self._longest:
                raise DataError(
                    f"{request.planned.prompt.name} and its answer may become {request.longest} tokens long, over the "
                    f"{self._longest} that the model and rollout.cache_tokens allow; lower rollout.max_new_tokens or "
                    "raise rollout.cache_tokens."
                )
            draws.append(Draw(self.setup.spec, request.uniforms(), request.planned.temperature))
            work.append((draws[-1], request.input_ids.tolist(), request.stops, request.planned.max_new_tokens))

        def ended(place: int, token_ids: Sequence[int]) -> None:
            draws[place].deliver(requests[order[place]], token_ids)
            finish(order[place])

        self._run(work, ended)

    def _run(self, work: Sequence[tuple[Draw, Sequence[int], frozenset[int], int]], ended: Ended) -> None:
        """Run requests (draw, prompt, stop ids, maximum tokens), and call ended(index, tokens) as each ends.

        Raises:
            EngineLostError: if vLLM failed; it has then been closed.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from student.rollout.vllm.draws import DRAWS

        engine = self._llm.llm_engine
        lora = None if self._adapters is None else self._adapters.request
        running: dict[str, int] = {}
        names = [draw.name for draw, *_ in work]
        try:
            for place, (draw, prompt, stops, limit) in enumerate(work):
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=limit,
                    stop_token_ids=sorted(stops),
                    # The model's own end tokens are ignored: as in all engines, only the stop ids above end a row.
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    extra_args={"draw": draw.name},
                )
                DRAWS[draw.name] = draw
                running[draw.name] = place
                asked = {"prompt_token_ids": list(prompt)}
                self._guarded(partial(engine.add_request, draw.name, asked, params, lora_request=lora))
            while running:
                for output in self._guarded(engine.step):
                    if output.finished and output.request_id in running:
                        ended(running.pop(output.request_id), output.outputs[0].token_ids)
        finally:
            if running and self._llm is not None:
                engine.abort_request(list(running))
            for name in names:
                DRAWS.pop(name, None)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
            self._abandon()
            raise EngineLostError(f"vLLM failed while it sampled ({reason}).") from error

    def _abandon(self) -> None:
        """Close an engine that has failed, ignoring errors."""
        try:
            self.close()
        except Exception:
            self._llm = None

    @staticmethod
    def _may_restart() -> bool:
        """Whether vLLM can be restarted: not with several ranks, because they start it by collective steps."""
        from student.rollout.vllm.launch import alone

        return alone()

    def _wake(self) -> None:
        if self._llm is not None:
            try:
                self._sleep.wake(self._llm)
            except EngineLostError:
                self._abandon()
                raise


def cache_bytes(config: Any, itemsize: int) -> int:
    """Bytes of keys and values per token over all layers, if every layer has full attention."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or math.ceil(config.hidden_size / config.num_attention_heads))
    return 2 * int(config.num_hidden_layers) * heads * size * itemsize
