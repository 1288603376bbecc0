"""The student's answers as lines of samples.jsonl: prompt, answer, verdict, reward, divergence, length and tokens.

`pieces` has an entry per token: its text, its divergence in nats (of the kind that `measure` names), and the teacher's
most likely tokens with their probabilities.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from student.data.needs import TEACHER
from student.data.outcome import reward_of
from student.data.row import Row
from student.report.token_view import View, pieces, view_of_row
from student.rollout.transcript import transcript_of


def sample_of(row: Row, tokenizer: Any, kl: float | None = None, view: View | None = None) -> dict[str, Any]:
    """One answer as a line of samples.jsonl.

    Args:
        row: the answer.
        tokenizer: the student's tokenizer.
        kl: its reverse KL to the teacher, nats per token; if None, the mean log-ratio of its tokens is used, if known.
        view: the reverse KL of its tokens; if None, their log-ratios are used, if known.
    """
    prompt, verdict = row.prompt, row.verdict
    measure, view = ("reverse_kl", view) if view else view_of_row(row)
    return {
        "uid": prompt.uid,
        "prompt": prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages],
        "answer": row.text,
        "reference": prompt.answer,
        "verdict": None if verdict is None else str(verdict.status),
        "reason": "" if verdict is None else verdict.reason,
        "reward": reward_of(row),
        "kl": mean_log_ratio(row) if kl is None else kl,
        "tokens": row.length,
        "truncated": row.truncated,
        "domain": prompt.domain,
        "teacher": row.teacher or None,
        "measure": measure if view else None,
        "pieces": list(pieces(row.response_ids.tolist(), view, tokenizer)),
        **_episode(row, tokenizer),
    }


def _episode(row: Row, tokenizer: Any) -> dict[str, Any]:
    """The transcript of an episode and the student's actions; empty for other rows."""
    transcript = transcript_of(row, tokenizer)
    if transcript is None:
        return {}
    actions = [tokenizer.decode(row.response_ids[start:end], skip_special_tokens=True) for start, end in row.actions]
    return {"episode": transcript, "answers": actions}


def entries(samples: Iterable[Mapping[str, Any]], *, step: int, label: str) -> list[dict[str, Any]]:
    """Lines of samples.jsonl.

    Args:
        samples: results of `sample_of`.
        step: number of steps that the weights have been trained for.
        label: "train", or the name of the evaluation.
    """
    return [{"step": step, "label": label, **sample} for sample in samples]


def mean_log_ratio(row: Row) -> float | None:
    """Mean of log S - log T over the trained tokens of a sampled row, nats: one draw of its reverse KL.

    None if the teacher's log-probs of these tokens are not known.
    """
    for (role, _), scores in row.signals.items():
        if role.partition("/")[0] == TEACHER and scores.sampled is not None and row.on_policy:
            known = row.loss_mask & np.isfinite(row.behaviour_logp)
            return float(np.mean((row.behaviour_logp - scores.sampled)[known])) if known.any() else None
    return None
