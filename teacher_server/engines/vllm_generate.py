"""vLLM's own prompt log-probs, for the generate runner of the vllm engine: the requests, and reading the outputs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import ConfigError, UnavailableError, one_line
from opd.wire.spans import cut, whole
from opd.wire.types import PayloadKind, Scores
from teacher_server.engines.base import EngineInfo, EngineItem
from teacher_server.engines.engine_topk import from_lists

WORKER_EXTENSION = "teacher_server.engines.vllm_worker.OpdWorkerExtension"


def generate_request(entry: EngineItem) -> tuple[list[int], Any]:
    """The prompt ids and the `SamplingParams` that make vLLM score one sequence."""
    from vllm import SamplingParams

    item, spec = whole(entry.item), entry.spec
    # Detokenising every listed id would cost several times the forward pass; k = -1 (all ids) is never passed.
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "flat_logprobs": True}
    if spec.kind is PayloadKind.GATHER and item.gather_ids is not None:
        wanted = np.concatenate([item.gather_ids, item.response_ids[:, None]], axis=1)
        options["prompt_logprob_token_ids"] = wanted.astype(np.int32)
        options["prompt_logprob_start"] = item.prompt_length - 1
    else:
        options["prompt_logprobs"] = spec.k  # 0 lists only the prompt's own token
    return item.token_ids.tolist(), SamplingParams(**options)


def read_scores(output: Any, entry: EngineItem, info: EngineInfo) -> Scores:
    """`Scores` of one finished request.

    Raises:
        UnavailableError: if vLLM scored other tokens.
        NonFiniteError: if a log-prob is NaN or infinite.
    """
    item, spec = whole(entry.item), entry.spec  # vLLM scores every position
    length = item.response_length
    ids: NDArray[np.integer] | None
    if spec.kind is PayloadKind.GATHER:
        table = np.asarray(output.prompt_token_id_logprobs, np.float32)
        sampled, values, ids = table[:, -1], table[:, :-1], item.gather_ids
    else:
        # Per position: the prompt's own token, then the k most likely; vLLM has no entry for the first position.
        flat, width = output.prompt_logprobs, spec.k + 1
        table = np.asarray(flat.logprobs, np.float32).reshape(-1, width)[-length:]
        listed = np.asarray(flat.token_ids, np.int64).reshape(-1, width)[-length:]
        if not np.array_equal(listed[:, 0], item.response_ids):
            raise UnavailableError(f"{info.engine} returned log-probs of other tokens than it was sent.")
        sampled, values, ids = table[:, 0], table[:, 1:], listed[:, 1:] if spec.k else None
    scores = from_lists(
        sampled.copy(), ids, values, value_dtype=spec.value_dtype, vocabulary=info.vocab_size, teacher=info.model
    )
    return cut(scores, entry.item)


def can_gather(llm: Any) -> bool:
    """Whether this vLLM scores ids that the caller chooses, found out by comparing with its own prompt log-probs."""
    from vllm import SamplingParams

    ids = [1, 2, 3, 4]
    try:
        asked = SamplingParams(
            max_tokens=1, detokenize=False, prompt_logprob_start=1, prompt_logprob_token_ids=[[3, 0], [4, 0]]
        )
        own = SamplingParams(max_tokens=1, detokenize=False, flat_logprobs=True, prompt_logprobs=0)
        first, second = llm.generate([{"prompt_token_ids": ids}] * 2, [asked, own], use_tqdm=False)
        found = np.asarray(first.prompt_token_id_logprobs, np.float32)[:, 0]
        return bool(np.allclose(found, second.prompt_logprobs.logprobs[-2:], atol=0.05))
    except Exception:  # a vLLM without it may refuse with any exception
        return False


def cut_vocabulary(llm: Any, size: int) -> None:
    """Make vLLM normalise over, and list, the first `size` ids only.

    Raises:
        ConfigError: if this vLLM cannot do that.
    """
    try:
        layers = llm.collective_rpc("opd_cut_vocabulary", args=(size,))
    except Exception as error:
        raise _cannot_cut(size, one_line(error, 200)) from error
    if not layers or not all(layers):
        raise _cannot_cut(size, "none of the model's layers computes logits in a way that is known to opd")


def check_cut(llm: Any, size: int) -> None:
    """Check `cut_vocabulary` at one position: exactly the first `size` ids are listed, and their mass is 1.

    Raises:
        ConfigError: if other ids are listed, or the probabilities do not add up.
    """
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=1, detokenize=False, flat_logprobs=True, prompt_logprobs=size)
    try:
        (found,) = llm.generate([{"prompt_token_ids": [0, 0]}], asked, use_tqdm=False)
    except Exception as error:
        raise _cannot_cut(size, one_line(error, 200)) from error
    listed = np.asarray(found.prompt_logprobs.token_ids, np.int64)[-size:]
    total = float(np.exp(np.asarray(found.prompt_logprobs.logprobs, np.float64)[-size:]).sum())
    if not (np.array_equal(np.sort(listed), np.arange(size)) and abs(total - 1.0) < 1e-3):
        raise _cannot_cut(size, f"it lists id {listed.max()}, and the first {size} probabilities add up to {total:.4f}")


def _cannot_cut(size: int, reason: str) -> ConfigError:
    return ConfigError(
        f"the model's head has more rows than the {size} ids of its tokenizer, and this vLLM does not leave them out "
        f"of its log-probs: {reason}; use runner pooling, which does."
    )
