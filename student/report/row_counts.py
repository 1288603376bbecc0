"""Metrics of a step's rows that need no model: counted on each rank, then summed."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from student.data.figures import quoted, repetition
from student.data.outcome import Outcome, reward_of
from student.data.row import Row
from student.scoring.rewards.chain import fired_metrics

if TYPE_CHECKING:
    from student.job.job import Job
    from student.rollout.sampling import Sampling

MOST_NAMES = 64
"""Maximum number of domains, or of teachers, that are counted in every step even without rows."""


def count_rows(rows: Sequence[Row], sampled: int, stop_ratios: Sequence[float] = ()) -> dict[str, float]:
    """Counts of this rank's rows.

    Args:
        rows: the rows of the batch.
        sampled: number of response tokens sampled, including those of rows that were dropped.
        stop_ratios: log T - log S of the stop tokens, nats; see `student.scoring.stops`.
    """
    # Sums and counts instead of means, because they are summed over ranks before any division.
    asked = [row.verdict for row in rows if row.verdict is not None]
    judged = [verdict.value for verdict in asked if verdict.known]
    rewards = [reward for reward in map(reward_of, rows) if reward is not None]
    hints = [(row, found) for row in rows if (found := _contexts(row))]  # seldom any
    parts: defaultdict[str, float] = defaultdict(float)
    for name, value in (part for row in rows for part in row.reward_parts.items()):
        parts[f"part/{name}/sum"] += value
        parts[f"part/{name}/count"] += 1
    return {
        "rows": len(rows),
        "sampled": sampled,
        "tokens": sum(row.length for row in rows),
        "repetition": sum(repetition(row.response_ids) for row in rows),
        "stops": len(stop_ratios),
        "stop_log_ratio": sum(stop_ratios),
        "truncated": sum(row.truncated for row in rows),
        "contexts": len(hints),
        "unread": sum(bool(row.unread) for row in rows),
        "hinted": sum(any(not np.array_equal(ids, row.prompt_ids) for ids in found) for row, found in hints),
        "quoted": sum(max(quoted(row.response_ids, ids, row.prompt_ids) for ids in found) for row, found in hints),
        "payload": sum(score.wire_bytes for row in rows for score in row.signals.values()),
        "scored": sum(row.length for row in rows if row.signals),
        "unasked": sum(score.unasked for row in rows for score in row.signals.values() if score.wire_bytes),
        "answered": sum(row.length for row in rows for score in row.signals.values() if score.wire_bytes),
        "asked": len(asked),
        "judged": len(judged),
        "verdict": sum(judged),
        "rewarded": len(rewards),
        "reward": sum(rewards),
        **parts,
    }


def _contexts(row: Row) -> list[NDArray[np.uint32]]:
    """Prompts that a model read for the row in place of the student's: contexts of teachers, hints of the sampler."""
    own = [] if row.behaviour_prompt_ids is None else [row.behaviour_prompt_ids]
    return [*row.contexts.values(), *own]


def row_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics from counts, of one rank or summed over all."""
    rows = max(1.0, counts["rows"])
    metrics = {
        "response_tokens": float(counts["sampled"]),
        "response_length": counts["tokens"] / rows,
        "truncation_rate": counts["truncated"] / rows,
        "repetition": counts["repetition"] / rows,
        "payload_bytes": float(counts["payload"]),
    }
    if counts["scored"]:
        metrics["payload_bytes_per_token"] = counts["payload"] / counts["scored"]
    if counts["unasked"]:
        metrics["unasked_share"] = counts["unasked"] / max(1.0, counts["answered"])
    if counts["contexts"] or counts["unread"]:
        # 0 if every context equals the student's prompt; an empty hint is not an error but has no effect.
        metrics["hinted_share"] = counts["hinted"] / rows
        metrics["hint_quoted"] = counts["quoted"] / max(1.0, counts["contexts"])
        metrics["context_missing_share"] = counts["unread"] / rows
    if counts["stops"]:
        metrics["stop_log_ratio"] = counts["stop_log_ratio"] / counts["stops"]
    if counts["rewarded"]:
        metrics["reward"] = counts["reward"] / counts["rewarded"]
    if counts["asked"]:
        metrics["unknown_share"] = 1.0 - counts["judged"] / counts["asked"]
    if counts["judged"]:
        metrics["verdict"] = counts["verdict"] / counts["judged"]
    for name in [name for name in counts if name.startswith("part/") and name.endswith("/count")]:
        stem = name.removesuffix("/count")
        metrics[f"reward_{stem}"] = counts[f"{stem}/sum"] / counts[name]
    return metrics | fired_metrics(counts)


def step_metrics(
    job: "Job", rows: Sequence[Row], sampling: "Sampling", stop_ratios: Sequence[float], step: int
) -> dict[str, float]:
    """Metrics of a step from what its parts counted, summed over the ranks in one exchange; their counts start again.

    Args:
        job: the run's parts.
        rows: this rank's rows of the batch.
        sampling: everything that was sampled for the step.
        stop_ratios: see `count_rows`.
        step: the step.
    """
    sampled = sum(row.length for row in sampling.rows)
    mine = count_rows(rows, sampled, stop_ratios) | sampling.counts()
    mine["staleness"] = float(sum(step - int(row.policy_version[0]) for row in sampling.rows))
    mine |= job.plugins.rewards.take() | job.services.costs.take() | job.sampler.take()
    counts = job.learner.ranks.total(mine)
    along, square = (counts.pop(f"engine/update_{name}", 0.0) for name in ("along", "square"))
    spent = {name: value for name, value in counts.items() if name.startswith(("cost/", "engine/"))}
    if square:
        spent["engine/update_held"] = along / square
    metrics = row_metrics(counts) | sampling.metrics(counts) | spent
    if job.ahead is not None:
        metrics["staleness"] = counts["staleness"] / max(1.0, counts["sampled_rows"])
    return metrics


def outcome_metrics(outcomes: Sequence[Outcome], known: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Trained tokens by domain and by teacher, if there are several; over all ranks.

    Args:
        outcomes: the outcomes of the step.
        known: the domains and teachers that prompts can have, under "domain" and "teacher". Those without a row in this
            step count 0, so that a name that never occurs is noticed. If there are more than MOST_NAMES, only those
            with rows are counted, to keep the record of a step short.
    """
    metrics: dict[str, float] = {}
    for label in ("domain", "teacher"):
        names = known.get(label, ())
        tokens = dict.fromkeys(names if len(names) <= MOST_NAMES else (), 0.0)
        for outcome in outcomes:
            name = getattr(outcome, label) or "none"
            tokens[name] = tokens.get(name, 0.0) + outcome.tokens * outcome.trained
        if len(tokens) > 1:
            metrics |= {f"{label}_tokens/{name}": count for name, count in sorted(tokens.items())}
    return metrics
