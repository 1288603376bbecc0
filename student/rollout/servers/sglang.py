"""The calls of an SGLang server.

Log-probs are those at the row's temperature, unless the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB. Seeds have an
effect only with --enable-deterministic-inference. Adapters need --enable-lora, a --max-lora-rank and
--lora-target-modules all.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from opd.errors import RolloutEngineError, one_line
from student.rollout.servers.dialect import PARTIAL, Answer, Ask, Dialect, Facts, barred, most_bytes
from student.rollout.servers.http import Connection, LostError, RefusedError

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

_LABEL_SECONDS = 60.0  # timeout for a call that a server answers without computing
_FLUSH_SECONDS = 60.0


class SglangDialect(Dialect):
    """See `student.rollout.servers.dialect.Dialect`."""

    engine: ClassVar[str] = "SGLang"
    receives: ClassVar[bool] = False

    def facts(self, connection: Connection, *, adapters: bool, nccl: bool) -> Facts:
        server = connection.call("/server_info")
        wrong = ""
        if adapters and not server.get("enable_lora"):
            wrong = (
                "does not accept adapters; start it with --enable-lora, --max-lora-rank and --lora-target-modules all, "
                "or set rollout.engine.merge_adapters: true"
            )
        # A row that may grow longer would be refused, or cut short: this already is the smaller of context and cache.
        return Facts(int(server["max_req_input_len"]), 2**31, wrong, str(server.get("version", "")))

    def holds(self, connection: Connection, *, adapters: bool) -> frozenset[str]:
        if not adapters:
            return frozenset({str(connection.call("/model_info")["weight_version"])})
        return frozenset(str(model["id"]) for model in connection.call("/v1/models")["data"] if model.get("parent"))

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        """See `Dialect.load`; SGLang itself waits for its rows and empties its cache."""
        try:
            _replace(connection, folder, label)
        except (RolloutEngineError, LostError):
            # It may hold some or all of the new weights under the label of the old ones.
            with suppress(RolloutEngineError, LostError), connection.another(_LABEL_SECONDS) as short:
                short.call("/update_weight_version", {"new_version": PARTIAL, "abort_all_requests": False})
            raise

    def receive(self, connection: Connection, weights: "HeldWeights", label: str) -> None:
        """See `Dialect.receive`; not supported."""
        raise RolloutEngineError(f"{connection.url} can take weights only from a folder.")

    def load_adapter(self, connection: Connection, folder: Path, label: str, old: frozenset[str]) -> None:
        connection.call("/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})
        for name in sorted(old - {label}):
            connection.call("/unload_lora_adapter", {"lora_name": name})

    def generate(self, connection: Connection, ask: Ask, *, adapters: bool) -> Answer:
        """See `Dialect.generate`.

        SGLang ends a row at end tokens of the model's own too, and would end none at `stops` if it were told to ignore
        them (`ignore_eos`). A row that ended at a token outside `stops` is therefore continued from there.
        """
        found = _sampled(connection, ask, adapters=adapters)
        while found.whole and 0 < len(found.ids) < ask.limit and found.ids[-1] not in ask.stops:
            rest = replace(ask, prompt=ask.prompt + found.ids, limit=ask.limit - len(found.ids))
            more = _sampled(connection, rest, adapters=adapters)
            if not more.ids:
                return more
            found = Answer(
                found.ids + more.ids,
                found.logp + more.logp,
                found.top + more.top,
                found.top_logp + more.top_logp,
                tuple(dict.fromkeys(found.weights + more.weights)),
            )
        return found


def _replace(connection: Connection, folder: Path, label: str) -> None:
    change = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    try:
        found = connection.call("/update_weights_from_disk", change)
    except RefusedError as error:
        if "flush" not in str(error):
            raise
        # Rows whose client hung up end a step later, and keep the cache from being emptied.
        connection.call(f"/flush_cache?timeout={_FLUSH_SECONDS:g}", {})
        found = connection.call("/update_weights_from_disk", change)
    if not found["success"]:
        raise RolloutEngineError(f"{connection.url} did not load the weights: {one_line(found['message'], 300)}")


def _sampled(connection: Connection, ask: Ask, *, adapters: bool) -> Answer:
    """What the server samples until it ends the row."""
    sampling = {
        "temperature": ask.temperature,
        "max_new_tokens": ask.limit,
        "stop_token_ids": ask.stops,
        # Keep the stop token, which is the last token of the row and trained on.
        "no_stop_trim": True,
        # Draws differ by seed and position, so a row that is continued goes on as if it had not ended.
        "sampling_seed": ask.seed,
        **barred(ask.barred),
    }
    body = {"input_ids": ask.prompt, "sampling_params": sampling, "return_logprob": True, "stream": False}
    body |= {"top_logprobs_num": ask.top} if ask.top else {}
    body |= {"lora_path": ask.weights} if adapters else {}
    found = connection.call("/generate", body, most_bytes=most_bytes(ask))
    meta, ids = found["meta_info"], found["output_ids"]
    if meta["finish_reason"]["type"] not in ("stop", "length"):
        return Answer([], [], [], [], (), whole=False)
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != ids:
        raise RolloutEngineError(f"{connection.url} returned log-probs of other tokens than it sampled.")
    likely = meta["output_top_logprobs"] if ask.top else []
    top, top_logp = ([[entry[place] for entry in row] for row in likely] for place in (1, 0))
    spans = [str(span["version"]) for span in meta.get("weight_versions") or ()]
    weights = (ask.weights,) if adapters else tuple(dict.fromkeys(spans)) or (str(meta["weight_version"]),)
    return Answer(ids, [entry[0] for entry in entries], top, top_logp, weights)
