"""Figures of modes: accuracy and tokens of each mode within its budget, and comparisons between modes.

All are computed from answers to the same problems in every mode. An answer that did not end within its mode's budget
counts as wrong, whatever the verifier says about the part within it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from opd.tasks.modes import UNMARKED, ModeSettings, mode_of
from opd.tasks.verdict import Verdict
from student.data.row import Row

OWN = ("accuracy", "tokens", "violations", "truncation")
"""Figures of a single mode."""


def over_budget(row: Row, budget: int) -> bool:
    """Whether the answer did not end within `budget` tokens."""
    return row.truncated or row.length > budget


def judge_budgets(rows: Sequence[Row], modes: Mapping[str, ModeSettings]) -> None:
    """Set the verdict of every answer over the budget of its mode to wrong, in place."""
    for row in rows:
        name = mode_of(row.prompt)
        if name is not None and name in modes and over_budget(row, modes[name].budget):
            row.verdict = Verdict.of(False, f"it did not end within the {modes[name].budget} tokens of mode {name}")


def is_trained(row: Row, modes: Mapping[str, ModeSettings]) -> bool:
    """Whether the row is in a mode with a weight above 0, or in no mode."""
    name = mode_of(row.prompt)
    return name is None or name not in modes or modes[name].weight > 0


def mode_figures(rows: Sequence[Row], modes: Mapping[str, ModeSettings]) -> dict[str, float]:
    """Compute the figures of judged answers.

    Args:
        rows: answers to the same problems in all modes, after `judge_budgets`.
        modes: settings of the modes by name.

    Returns:
        Figures by name. For each mode that has answers:
            accuracy/MODE: mean of the known verdicts, in which answers over the budget count as wrong.
            tokens/MODE: mean number of response tokens.
            violations/MODE: share of answers over the budget.
            truncation/MODE: share of answers cut by the length limit, which is the budget unless the evaluation allows
                slack.
        And across modes:
            monotone: share of problems whose mean number of tokens never rises from a trained mode to the one with the
                next smaller budget.
            Those of `across_modes`.
    """
    by_mode = {name: [row for row in rows if mode_of(row.prompt) == name] for name in modes}
    figures: dict[str, float] = {}
    for name, answers in by_mode.items():
        if not answers:
            continue
        judged = [value for row in answers if (value := row.verdict_value) is not None]
        figures |= {
            f"tokens/{name}": _mean([float(row.length) for row in answers]),
            f"violations/{name}": _mean([float(over_budget(row, modes[name].budget)) for row in answers]),
            f"truncation/{name}": _mean([float(row.truncated) for row in answers]),
        }
        if judged:
            figures[f"accuracy/{name}"] = _mean(judged)
    figures |= across_modes(figures, modes)
    monotone = _monotone({name: by_mode[name] for name in widest_first(modes) if by_mode[name]})
    if monotone is not None:
        figures["monotone"] = monotone
    return figures


def widest_first(modes: Mapping[str, ModeSettings]) -> list[str]:
    """Names of the trained modes, from the largest budget to the smallest."""
    trained = [name for name, mode in modes.items() if mode.weight]
    return sorted(trained, key=lambda name: -modes[name].budget)


def across_modes(figures: Mapping[str, float], modes: Mapping[str, ModeSettings]) -> dict[str, float]:
    """Compute the figures that compare modes, from tokens/MODE and accuracy/MODE.

    Returns:
        Figures by name:
            neighbour_ratio/MODE: mean tokens of a trained mode, divided by those of the next smaller one.
            hypervolume: see `hypervolume`, up to the largest budget of the trained modes.
            interpolation/MODE: for a mode that is not trained, the position of its mean tokens between those of the
                trained modes with the next smaller budget, at 0, and the next larger one, at 1.
    """
    tokens = {name: figures[f"tokens/{name}"] for name in modes if f"tokens/{name}" in figures}
    trained = [name for name in widest_first(modes) if name in tokens]
    compared = {
        f"neighbour_ratio/{wide}": tokens[wide] / tokens[narrow] for wide, narrow in pairwise(trained) if tokens[narrow]
    }
    points = [(tokens[name], figures[f"accuracy/{name}"]) for name in trained if f"accuracy/{name}" in figures]
    if points:
        compared["hypervolume"] = hypervolume(points, float(max(modes[name].budget for name in trained)))
    for name in tokens.keys() - set(trained):
        wider = [other for other in trained if modes[other].budget > modes[name].budget]
        narrower = [other for other in trained if modes[other].budget < modes[name].budget]
        if wider and narrower and tokens[wider[-1]] != tokens[narrower[0]]:
            low, high = tokens[narrower[0]], tokens[wider[-1]]
            compared[f"interpolation/{name}"] = (tokens[name] - low) / (high - low)
    return compared


def hypervolume(points: Sequence[tuple[float, float]], longest: float) -> float:
    """Mean over x from 0 to `longest` of the best accuracy that any mode reaches with at most x tokens: in [0, 1].

    Args:
        points: (mean tokens, accuracy) of each mode.
        longest: end of the range of x in tokens. Points beyond it count as if they were at `longest`, and add nothing.
    """
    area, best, last = 0.0, 0.0, 0.0
    for tokens, accuracy in sorted(points):  # a step function that rises where a better mode becomes affordable
        here = min(tokens, longest)
        area, last, best = area + best * (here - last), here, max(best, accuracy)
    return (area + best * (longest - last)) / longest


def recovery(
    figures: Mapping[str, float], start: Mapping[str, float], modes: Mapping[str, ModeSettings]
) -> dict[str, float]:
    """Compute recovery/MODE: (accuracy - start) / (teacher's accuracy - start), with accuracies within the budget.

    0 means no change from the start, which in ORBIT is the merged model, and 1 means the teacher's accuracy. Modes
    whose teacher's accuracy is unknown, or equal to that of the start, are left out.

    Args:
        figures: present figures, see `mode_figures`.
        start: those of the start.
        modes: settings of the modes by name.
    """
    recovered = {}
    for name, mode in modes.items():
        now, first = figures.get(f"accuracy/{name}"), start.get(f"accuracy/{name}")
        if now is None or first is None or mode.teacher_accuracy is None or mode.teacher_accuracy == first:
            continue
        recovered[f"recovery/{name}"] = (now - first) / (mode.teacher_accuracy - first)
    return recovered


def asked_in(row: Row, name: str, mode: ModeSettings) -> Row:
    """A copy of the row for the teacher of mode `name` to score, with that mode's mark on the prompt and no signals.

    The token ids of prompt and response stay those of the student.
    """
    return replace(row, prompt=mode.mark(row.prompt, name), contexts={}, signals={}, teacher="", teachers=())


def describe_modes(figures: Mapping[str, float]) -> str:
    """The figures of modes in one line for the console; empty if there are none."""
    parts = []
    for name in [key.removeprefix("tokens/") for key in figures if key.startswith("tokens/")]:
        accuracy = figures.get(f"accuracy/{name}")
        text = (
            f"{name} {'unknown' if accuracy is None else f'{accuracy:.3f}'} in {figures[f'tokens/{name}']:.1f} tokens"
        )
        notes = [f"{figures[f'violations/{name}']:.0%} over budget"] if figures[f"violations/{name}"] else []
        if f"neighbour_ratio/{name}" in figures:
            notes.append(f"{figures[f'neighbour_ratio/{name}']:.2f} times the next")
        if f"interpolation/{name}" in figures:
            notes.append(f"not trained, {figures[f'interpolation/{name}']:.2f} of the way to the wider one")
        if f"recovery/{name}" in figures:
            notes.append(f"recovery {figures[f'recovery/{name}']:.2f}")
        parts.append(text + (f" ({', '.join(notes)})" if notes else ""))
    if "monotone" in figures:
        parts.append(f"{figures['monotone']:.0%} of problems monotone")
    if "hypervolume" in figures:
        parts.append(f"hypervolume {figures['hypervolume']:.3f}")
    own, across = _leakage(figures)
    if own and across:
        parts.append(f"KL to the own teacher {_mean(own):.4f}, to others {_mean(across):.4f} nats per token")
    return ", ".join(parts)


def _leakage(figures: Mapping[str, float]) -> tuple[list[float], list[float]]:
    pairs = {tuple(key.split("/")[1:]): value for key, value in figures.items() if key.startswith("leakage/")}
    own = [value for (mode, teacher), value in pairs.items() if mode == teacher]
    return own, [value for (mode, teacher), value in pairs.items() if mode != teacher]


def _monotone(by_mode: Mapping[str, Sequence[Row]]) -> float | None:
    """Share of the problems asked in all modes whose mean tokens never rise as budgets fall.

    None if there are no such problems, or fewer than two modes. `by_mode` has the largest budget first.
    """
    lengths: dict[str, dict[str, list[int]]] = {}
    for name, rows in by_mode.items():
        for row in rows:
            lengths.setdefault(repr(row.prompt.extra[UNMARKED]), {}).setdefault(name, []).append(row.length)
    means = [[_mean(by_name[name]) for name in by_mode] for by_name in lengths.values() if len(by_name) == len(by_mode)]
    falls = [all(narrow <= wide for wide, narrow in pairwise(problem)) for problem in means]
    return _mean([float(fall) for fall in falls]) if falls and len(by_mode) > 1 else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
