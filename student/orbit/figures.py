"""How modes differ: accuracy and tokens of each mode under its budget, and figures across modes.

All are computed from the answers to the same problems in every mode. An answer that did not end within its mode's
budget is wrong, whatever the verifier says about the part within it.
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
    """Count answers over the budget of their mode as wrong."""
    for row in rows:
        name = mode_of(row.prompt)
        if name is not None and name in modes and over_budget(row, modes[name].budget):
            row.verdict = Verdict.of(False, f"it did not end within the {modes[name].budget} tokens of mode {name}")


def is_trained(row: Row, modes: Mapping[str, ModeSettings]) -> bool:
    """Whether the row is in a mode that is trained, or in none."""
    name = mode_of(row.prompt)
    return name is None or name not in modes or modes[name].weight > 0


def mode_figures(rows: Sequence[Row], modes: Mapping[str, ModeSettings]) -> dict[str, float]:
    """Figures of judged answers.

    Args:
        rows: answers to the same problems in all modes.
        modes: by name.

    Returns:
        accuracy/MODE: share of known verdicts that are correct within the budget; tokens/MODE: mean tokens;
        violations/MODE: share over the budget; truncation/MODE: share that the length limit cut, which is the budget
        unless the evaluation has slack; monotone: share of problems whose tokens never rise from a trained mode to the
        next smaller one; and those of `across_modes`.
    """
    by_mode = {name: [row for row in rows if mode_of(row.prompt) == name] for name in modes}
    figures: dict[str, float] = {}
    for name, found in by_mode.items():
        if not found:
            continue
        judged = [value for row in found if (value := row.verdict_value) is not None]
        figures |= {
            f"tokens/{name}": _mean([float(row.length) for row in found]),
            f"violations/{name}": _mean([float(over_budget(row, modes[name].budget)) for row in found]),
            f"truncation/{name}": _mean([float(row.truncated) for row in found]),
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
    """Figures that compare modes, from tokens/MODE and accuracy/MODE.

    Returns:
        neighbour_ratio/MODE: tokens of the mode over those of the next smaller one; hypervolume: see there, up to the
        largest budget; for a mode that is never trained interpolation/MODE: where its tokens lie between those of the
        trained neighbours of its budget, 0 at the smaller and 1 at the larger one.
    """
    tokens = {name: figures[f"tokens/{name}"] for name in modes if f"tokens/{name}" in figures}
    trained = [name for name in widest_first(modes) if name in tokens]
    found = {
        f"neighbour_ratio/{wide}": tokens[wide] / tokens[narrow] for wide, narrow in pairwise(trained) if tokens[narrow]
    }
    points = [(tokens[name], figures[f"accuracy/{name}"]) for name in trained if f"accuracy/{name}" in figures]
    if points:
        found["hypervolume"] = hypervolume(points, float(max(modes[name].budget for name in trained)))
    for name in tokens.keys() - set(trained):
        wider = [other for other in trained if modes[other].budget > modes[name].budget]
        narrower = [other for other in trained if modes[other].budget < modes[name].budget]
        if wider and narrower and tokens[wider[-1]] != tokens[narrower[0]]:
            low, high = tokens[narrower[0]], tokens[wider[-1]]
            found[f"interpolation/{name}"] = (tokens[name] - low) / (high - low)
    return found


def hypervolume(points: Sequence[tuple[float, float]], longest: float) -> float:
    """Area under the best accuracy of any mode with at most x tokens, x from 0 to `longest`, over `longest`: in [0, 1].

    Args:
        points: (tokens, accuracy) of each mode.
        longest: tokens at which the area ends; more count as `longest`.
    """
    area, best, last = 0.0, 0.0, 0.0
    for tokens, accuracy in sorted(points):  # a step function: it rises where a better mode becomes affordable
        here = min(tokens, longest)
        area, last, best = area + best * (here - last), here, max(best, accuracy)
    return (area + best * (longest - last)) / longest


def recovery(
    figures: Mapping[str, float], start: Mapping[str, float], modes: Mapping[str, ModeSettings]
) -> dict[str, float]:
    """recovery/MODE: (accuracy - start) / (teacher - start), where the teacher's accuracy is known and not that.

    0 is the start, the merge in ORBIT, and 1 the teacher.
    """
    found = {}
    for name, mode in modes.items():
        now, first = figures.get(f"accuracy/{name}"), start.get(f"accuracy/{name}")
        if now is None or first is None or mode.teacher_accuracy is None or mode.teacher_accuracy == first:
            continue
        found[f"recovery/{name}"] = (now - first) / (mode.teacher_accuracy - first)
    return found


def asked_in(row: Row, name: str, mode: ModeSettings) -> Row:
    """The row for another mode's teacher to score; the student's own prompt and response stay."""
    return replace(row, prompt=mode.mark(row.prompt, name), contexts={}, signals={}, teacher="", teachers=())


def describe_modes(figures: Mapping[str, float]) -> str:
    """The figures in one line for the console; empty without modes."""
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
    """Share of problems, of those asked in all modes, whose mean tokens never rise as budgets fall; None for none."""
    lengths: dict[str, dict[str, list[int]]] = {}
    for name, rows in by_mode.items():
        for row in rows:
            lengths.setdefault(repr(row.prompt.extra[UNMARKED]), {}).setdefault(name, []).append(row.length)
    means = [[_mean(found[name]) for name in by_mode] for found in lengths.values() if len(found) == len(by_mode)]
    falls = [all(narrow <= wide for wide, narrow in pairwise(problem)) for problem in means]
    return _mean([float(fall) for fall in falls]) if falls and len(by_mode) > 1 else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
