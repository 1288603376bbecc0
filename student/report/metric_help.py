"""What the metrics of a step mean: the help of their Prometheus series, in one sentence each.

Metrics that only some plug-ins have are described where they are computed; their series say their name.
"""

#: Text by the short name of metrics.jsonl.
TEXTS = {
    "reverse_kl": "Reverse KL from the student to the teacher, mean per response token",
    "student_entropy": "Entropy of the student's next-token distribution, mean per response token",
    "teacher_entropy": "Entropy of the teacher's next-token distribution, mean per response token",
    "student_head_mass": "Probability that the student gives to the candidate ids, mean per response token",
    "teacher_head_mass": "Probability that the teacher gives to the candidate ids, mean per response token",
    "topk_overlap": "Share of the student's top-k ids that are among the teacher's top k",
    "tail_sampled": "Share of response tokens that were sampled outside the candidate ids",
    "importance_weight": "Importance weight of the current policy over the sampling policy, mean per token",
    "importance_truncated": "Share of tokens whose importance weight reached its cap",
    "scored_while_learning": "Share of the step's rows that were still being scored when learning began",
    "staleness": "Steps between the weights that sampled a row and those that learn from it, mean over rows",
    "updates": "Optimizer updates made in the step",
    "updates_skipped": "Optimizer updates skipped because no rank had a row for them",
    "rollout_rounds": "Rounds of sampling that the rollout strategy made",
    "sampled_rows": "Rows sampled, including those that the strategy dropped",
    "episodes_broken": "Share of sampled episodes whose environment raised, hung, died or gave an invalid answer",
    "positions_shared": "Share of the positions of rows that learning did not read again, because rows begin alike",
    "grad_norm": "Norm of the gradient before clipping",
    "grad_clipped": "Share of optimizer updates whose gradient was clipped",
    "learning_rate": "Learning rate",
    "response_length": "Tokens per response, mean over trained rows",
    "truncation_rate": "Share of responses that reached the length limit",
    "repetition": "Share of a response's 4-grams that occur earlier in it, mean over rows",
    "stop_log_ratio": "log T - log S at the student's stop tokens; far below 0, the teacher would not stop there",
    "effopd/jumps": "EffOPD jumps kept since the start",
    "effopd/tried": "Longest extrapolation that EffOPD's latest search tried",
    "window": "Maximum number of response tokens that are trained on, mean over domains",
    "adwin/at_longest_share": "Share of domains whose ADWIN window is the longest candidate",
    "adwin/at_shortest_share": "Share of domains whose ADWIN window is the shortest candidate",
    "hinted_share": "Share of rows for which a model read a prompt other than the student's",
    "hint_quoted": "Share of a response's 4-grams that occur in a model's own prompt but not in the student's",
    "context_missing_share": "Share of rows for which a model's own prompt is missing or too long",
    "clipped_share": "Share of tokens on which the surrogate was clipped",
    "unknown_share": "Share of verified responses without a known verdict",
    "mismatch/log_ratio": "Mean absolute difference of log-probs between trainer and rollout engine, per token",
    "mismatch/max_log_ratio": "Largest absolute difference of log-probs between trainer and rollout engine",
    "mismatch/kl": "Unbiased estimate of the KL from the rollout engine to the trainer, per token",
    "engine/syncs": "Times that rollout engines took new weights in the step, over all ranks",
    "engine/sync_seconds": "Seconds that rollout engines spent taking new weights in the step, added up over ranks",
    "engine/update_held": "Share of what was learned that is left in rollout weights, which are rounded; see rollouts",
    "engine/rows_reissued": "Rows that were sent to another rollout server, because theirs was lost, in the step",
    "engine/rows_filled": "Rows whose candidates the student computed, because servers returned too few, in the step",
    "engine/servers_lost": "Times that a rollout server could not be given the weights in the step",
    "engine/weights_loaded": "Times that a rollout server loaded weights in the step",
    "engine/restarts": "Restarts of rollout engines in the step, over all ranks",
    "checkpoint/waited_seconds": "Seconds the step waited for a checkpoint that is written in the background",
    "checkpoint/write_seconds": "Seconds that writing the last checkpoint took in the background",
    "checkpoint/failed": "Checkpoints that could not be written in the background, since the start",
    "reward": "Reward, mean over rows whose reward is known",
    "verdict": "Verdict of the verifier, mean over rows whose verdict is known",
    "ema_moved": "Whether the moving average followed the student in the step, 0 or 1",
    "follow/seconds": "Seconds until the servers of the following teacher had the student's average",
    "follow/gap": "Largest difference in log-probs between the served average and the student's own, nats",
    "ema_distance": "Euclidean distance between the student's weights and their moving average",
    "tokens_per_second": "Response tokens sampled per second of the step",
    "payload_bytes_per_token": "Bytes of tensors received from teachers per scored response token",
    "episode_windows": "Sequences per episode whose history was cut, mean",
    "summaries": "Summaries that the student wrote of an episode, mean over episodes",
    "summaries_empty": "Share of the summaries that are empty",
    "summaries_cut": "Share of the summaries that reached their length limit",
    "context_saved": "Tokens of history that summaries saved in a turn of an episode, mean over turns",
    "unasked_share": "Share of response positions not asked for, because an environment or a prefix wrote them",
    "rollout_seconds": "Seconds of sampling, including sampling during training",
    "sampler_idle_seconds": "Seconds the sampler waited for the learner",
}

#: Text by the name of an evaluation's figure, after "eval/".
EVALUATION_TEXTS = {
    "accuracy": "Share of held-out prompts answered correctly",
    "reverse_kl": "Reverse KL from the student to the teacher on held-out prompts, mean per response token",
    "reverse_kl_per_byte": "The same reverse KL, mean per byte of the answers' text",
    "response_length": "Tokens per response on held-out prompts",
    "truncation_rate": "Share of responses to held-out prompts that reached the length limit",
    "repetition": "Share of a response's 4-grams that occur earlier in it, on held-out prompts",
}


def help_of(name: str) -> str:
    """One sentence about a metric, with its time; its own words where nothing is known about it."""
    head, _, rest = name.partition("/")
    if rest.startswith("pass_at_"):
        k = rest.removeprefix("pass_at_")
        return f"Share of held-out prompts with a correct answer among {k} (unbiased estimate), latest evaluation."
    if head == "eval":
        return f"{EVALUATION_TEXTS.get(rest) or _words(name)}, latest evaluation."
    if name.startswith("reward_part/"):
        return f"Part {rest!r} of the reward, mean over rows, latest step."
    return f"{TEXTS.get(name) or _words(name)}, latest step."


def _words(name: str) -> str:
    text = name.replace("/", " ").replace("_", " ")
    return text[:1].upper() + text[1:]
