"""Episodes: rows whose prompt names an environment are played turn by turn, all episodes of a batch in parallel.

    prompt + first observation -> the student's turn -> observation -> the student's turn -> ... -> end

The result is one row: `turns` are the student's spans, and the environment's ids stand between them with `loss_mask`
False and `tool_mask` True. Sampled ids are never re-encoded; they are scored and trained exactly as they were sampled.
The random stream of a turn is keyed by the row's key and the turn, so an episode does not depend on its batch.

If an environment has no place for all episodes of a batch, the others are played once these have ended.

An episode that breaks (its environment raises, hangs or dies) ends there: what was sampled is kept as a row that is
not trained on, with an unknown verdict. The tag `ended` says how an episode ended: success, failure, done (not known
whether solved), turns, tokens, context, replay, or broken. The KV cache is rebuilt in each turn, so the cost of an
episode grows with the square of its turns.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.tasks.encode import encode_prompt
from opd.tasks.environments.base import ENVIRONMENT, Observation, measures_of
from opd.tasks.environments.pool import EnvironmentPool, EpisodeError
from opd.tasks.environments.worlds import InProcess, Seen, Worlds
from opd.tasks.turns import Answered, check_append_only, encode_turns, with_observation
from opd.tasks.verdict import Verdict
from student.data.plan import EpisodePlan, PlannedRow
from student.data.row import EpisodeTrace, Row
from student.data.streams import stream
from student.rollout.episode import Episode
from student.rollout.summaries import CONTEXT, Summaries, notes_of
from student.settings.episodes import EpisodeSettings

if TYPE_CHECKING:
    from student.rollout.requests import RolloutSpec

Sample = Callable[[Sequence[PlannedRow], "tuple[object, ...]"], "list[Row]"]
OnRow = Callable[[Row], None]
log = logging.getLogger(__name__)
_PLACE_SECONDS = 0.5  # an environment's server takes a moment to notice that a place is free


class EpisodePlayer:
    """Plays the planned rows whose prompts name an environment.

    Args:
        settings: the limits.
        tokenizer: the student's tokenizer.
        spec: settings that every rollout of the run shares.
    """

    def __init__(self, settings: EpisodeSettings, tokenizer: Any, spec: RolloutSpec) -> None:
        self._settings, self.tokenizer, self.spec = settings, tokenizer, spec
        self._stops = spec.stops(tokenizer)
        self._summaries: Summaries | None = None
        if settings.history == "summary":
            self._summaries = Summaries(settings.summary, settings.turn_tokens, tokenizer, self._stops)
        self._worlds: dict[str, Worlds] = {}
        self._places: int | None = None
        self._checked = False

    @staticmethod
    def plays(planned: PlannedRow) -> bool:
        """Whether a planned row is an episode; a row with a given answer is not."""
        return ENVIRONMENT in planned.prompt.extra and planned.answer is None

    def play(
        self, planned: Sequence[PlannedRow], sample: Sample, *, purpose: tuple[object, ...], on_row: OnRow
    ) -> list[Row]:
        """Play one episode per planned row.

        Args:
            planned: rows of prompts with an environment.
            sample: samples one response per planned row, from random streams whose keys begin with the given names.
            purpose: first part of the key of the random streams.
            on_row: called with each row as soon as its episode has ended.

        Returns:
            The rows in the order of `planned`.
        """
        rows: dict[int, Row] = {}
        limit = self._settings.limits.reset_seconds
        until = time.monotonic() + limit
        while len(rows) < len(planned):
            some = [index for index in range(len(planned)) if index not in rows][: self._places]
            late = time.monotonic() >= until
            found = self._play([planned[index] for index in some], sample, purpose, on_row, wait=not late)
            rows |= {some[number]: row for number, row in found.items()}
            if len(found) < len(some):
                if found:
                    self._places, until = len(found), time.monotonic() + limit
                # A place is kept for the next episode of the same number, which those without a place do not have.
                self.close()
                time.sleep(_PLACE_SECONDS)
        return [rows[index] for index in range(len(planned))]

    def _play(
        self,
        planned: Sequence[PlannedRow],
        sample: Sample,
        purpose: tuple[object, ...],
        on_row: OnRow,
        *,
        wait: bool,
    ) -> dict[int, Row]:
        """Play episodes at the same time; with `wait`, those for which there is no place have no row."""
        episodes = {number: self._begin(one) for number, one in enumerate(planned)}
        seeds = {n: self._seed(e.planned, purpose) for n, e in episodes.items()}
        seen = self._each(episodes, lambda worlds, ns: worlds.reset({n: (planned[n].prompt, seeds[n]) for n in ns}))
        for number, found in seen.items():
            if wait and isinstance(found, EpisodeError) and found.kind == "full":
                del episodes[number]
            else:
                self._open(episodes[number], found)
        self._replay(episodes)
        self._repeat(episodes)
        rows: dict[int, Row] = {}
        # One turn of all episodes at a time, so that they share forward passes; those that end leave to be scored.
        while True:
            for number, episode in episodes.items():
                if episode.ended and number not in rows:
                    rows[number] = self._row(episode)
                    on_row(rows[number])
            active = {number: episode for number, episode in episodes.items() if not episode.ended}
            if not active:
                _tell(list(episodes.values()))
                return rows
            self._turn(active, sample, purpose)

    def close(self) -> None:
        """End all environments."""
        for worlds in self._worlds.values():
            worlds.close()
        self._worlds.clear()

    def _seed(self, planned: PlannedRow, purpose: tuple[object, ...]) -> int:
        """The environment's seed: the same for all samples of a prompt, so that they start from the same problem."""
        key = planned.key
        return int(stream(self.spec.seed, *purpose, "environment", key.step, key.uid).integers(2**31))

    def _begin(self, planned: PlannedRow) -> Episode:
        if not self._checked:
            check_append_only(planned.prompt, self.tokenizer)
            self._checked = True
        plan = planned.episode or EpisodePlan()
        turns = min(plan.turns or self._settings.turns, self._settings.turns)
        history = self._settings.history if isinstance(self._settings.history, int) else None
        return Episode(planned, replace(plan, turns=turns), planned.prompt, history)

    def _open(self, episode: Episode, seen: Seen) -> None:
        if isinstance(seen, EpisodeError):
            episode.stop(seen)
            return
        prompt = with_observation(episode.planned.prompt, seen.text, self.tokenizer, seen.tools)
        length, longest = len(encode_prompt(prompt, self.tokenizer)), self.spec.max_prompt_tokens
        if length > longest:
            said = f"prompt and first observation have {length} tokens, over rollout.max_prompt_tokens {longest}"
            episode.stop(EpisodeError("invalid", said))
            return
        episode.prompt, episode.tools = prompt, bool(seen.tools)
        episode.see(seen)
        self._judge(episode, seen)

    def _replay(self, episodes: Mapping[int, Episode]) -> None:
        """Play the given actions first; they are part of the history, and learnt from only if the plan says so."""
        given = list(dict.fromkeys(action for episode in episodes.values() for action in episode.plan.replay))
        encoded = self.tokenizer(given, add_special_tokens=False)["input_ids"] if given else []
        ids_of = dict(zip(given, encoded, strict=True))
        end = [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        for turn in range(max((len(episode.plan.replay) for episode in episodes.values()), default=0)):
            due = {n: e for n, e in episodes.items() if not e.ended and turn < len(e.plan.replay)}
            actions = {number: episode.plan.replay[turn] for number, episode in due.items()}
            found = self._step(due, actions)
            for number, episode in due.items():
                ids = [int(i) for i in ids_of[actions[number]]] + end
                if episode.plan.given:
                    episode.give(actions[number], ids, self.spec.candidates, turn)
                else:
                    episode.replay(ids, self.spec.candidates)
            self._answer(due, found)
            for episode in due.values():
                if episode.ended and not episode.ended.startswith("broken") and not episode.plan.given:
                    # The student has not acted yet, so the outcome of the replay is not the student's success.
                    episode.ended, episode.success = "replay", None
        for episode in episodes.values():
            if episode.plan.given and not episode.ended:
                episode.ended = "turns"  # the given actions did not end the episode

    def _repeat(self, episodes: Mapping[int, Episode]) -> None:
        """Repeat the beginnings of branches with the ids that were sampled; the environment must answer as before."""
        branches = {n: (e, branch) for n, e in episodes.items() if (branch := e.plan.branch) is not None}
        for turn in range(max((branch.turns for _, branch in branches.values()), default=0)):
            due = {n: e for n, (e, branch) in branches.items() if not e.ended and turn < branch.turns}
            for number, episode in due.items():
                row = branches[number][1].row
                start, end = row.turns[turn]
                ids = row.response_ids[start:end].tolist()
                episode.take(row, start, end, str(self.tokenizer.decode(ids, skip_special_tokens=True)))
            actions = {number: self._action(episode) for number, episode in due.items()}
            self._answer(due, self._step(due, actions))
            for number, episode in due.items():
                row = branches[number][1].row
                if episode.ended.startswith("broken"):
                    continue
                if episode.ended or episode.ids != row.response_ids[: row.turns[turn + 1][0]].tolist():
                    episode.success = None
                    episode.stop(EpisodeError("diverged", "the environment answered a repeated action differently"))

    def _turn(self, active: Mapping[int, Episode], sample: Sample, purpose: tuple[object, ...]) -> None:
        """One turn of the student in every active episode, then one of the environment unless that was a summary."""
        summarised = [episode for episode in active.values() if episode.waiting is not None]
        if self._summaries is not None:
            self._summaries.ask(summarised, self.spec.candidates)
        going = {number: episode for number, episode in active.items() if not episode.ended}
        rows = sample([self._planned(episode) for episode in going.values()], purpose) if going else []
        acting: dict[int, Episode] = {}
        for (number, episode), row in zip(going.items(), rows, strict=True):
            if self._summaries is not None and episode.waiting is not None:
                self._summaries.take(episode, row)
            else:
                episode.take(row, len(episode.ids) - episode.seen_from, row.length, row.text)
                acting[number] = episode
        actions = {number: self._action(episode) for number, episode in acting.items()}
        self._answer(acting, self._step(acting, actions), self._summaries)
        for episode in acting.values():
            if not episode.ended and episode.acted >= episode.plan.turns:
                episode.ended = "turns"
        for episode in going.values():
            if not episode.ended and len(episode.ids) >= episode.planned.max_new_tokens:
                episode.ended = "tokens"
        if self._summaries is not None:
            after = [episode for episode in summarised if not episode.ended]
            self._summaries.go_on(after, self.spec.candidates)

    def _action(self, episode: Episode) -> str:
        """The student's turn as text for the environment.

        If there are tools, special tokens are kept, because some tokenizers mark calls by them.
        """
        if not episode.tools:
            return episode.texts[-1]
        start, end = episode.turns[-1]
        ids = [i for i in episode.ids[start:end] if i not in self._stops]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _planned(self, episode: Episode) -> PlannedRow:
        left = episode.planned.max_new_tokens - len(episode.ids)
        longest = self._settings.turn_tokens if episode.waiting is None else self._settings.summary.tokens
        return replace(
            episode.planned,
            key=replace(episode.planned.key, turn=len(episode.turns), parent=-1),
            prompt=episode.prompt,
            max_new_tokens=min(longest, left),
            prefix_ids=tuple(episode.ids[episode.seen_from :]),
            episode=None,
        )

    def _answer(
        self, episodes: Mapping[int, Episode], found: Mapping[int, Seen], summaries: Summaries | None = None
    ) -> None:
        """Append the environments' answers to the last actions, or ask for a summary before them."""
        going = []
        for number, seen in found.items():
            episode = episodes[number]
            if isinstance(seen, EpisodeError):
                episode.stop(seen)
                continue
            self._note(episode, seen)
            if not episode.ended:
                going.append((episode, Answered(seen.text, episode.prompt, episode.ids, seen.results)))
        encoded = encode_turns([turn for _, turn in going], self.tokenizer, self._stops)
        for (episode, turn), ids in zip(going, encoded, strict=True):
            if summaries is not None and summaries.due(episode, len(ids)):
                episode.waiting = turn
            elif len(episode.ids) + len(ids) >= episode.planned.max_new_tokens:
                episode.ended = "tokens"
            else:
                episode.hear(ids, self.spec.candidates)

    def _note(self, episode: Episode, seen: Observation) -> None:
        """Record what an observation says about the last action, and whether it ends the episode."""
        episode.bad_calls += float(seen.info.get("bad_calls", 0))
        if episode.turns and len(episode.rewards) < len(episode.turns):
            episode.rewards.append(seen.reward or 0.0)
            episode.measures |= {f"{name}/{len(episode.turns) - 1}": value for name, value in measures_of(seen).items()}
        self._judge(episode, seen)
        episode.see(seen)

    def _judge(self, episode: Episode, seen: Observation) -> None:
        if not seen.done:
            return
        if seen.success is None and seen.reward is None and ("unknown" in seen.info or not any(episode.rewards)):
            episode.ended = "done"  # the environment does not say whether it was solved
            return
        episode.success = seen.success if seen.success is not None else (seen.reward or 0.0) > 0
        episode.ended = "success" if episode.success else "failure"

    def _row(self, episode: Episode) -> Row:
        """The episode as one row, with the key of the planned row."""
        length, own = len(episode.ids), np.array(episode.own, dtype=np.bool_)
        broken = episode.ended.startswith("broken") or not episode.turns
        cut = episode.ended in ("turns", "tokens", CONTEXT)
        verdict = Verdict.unknown(f"the episode ended by {episode.ended}")
        if not broken and (cut or episode.success is not None):
            verdict = Verdict.of(bool(episode.success), f"the episode ended by {episode.ended}")
        prompt_ids, given, branch = episode.prompt_ids, episode.plan.given, episode.plan.branch
        if prompt_ids is None:
            prompt_ids = np.array(encode_prompt(episode.prompt, self.tokenizer), dtype=np.uint32)
        if not length:  # broken before the first turn, but a row has at least one token
            episode.hear([0], self.spec.candidates)
            length, own = 1, np.zeros(1, dtype=np.bool_)
        # If nothing was sampled, use the current step, because version 0 would count as very old in metric staleness.
        version = episode.planned.key.step if given or not episode.turns else episode.version
        row = Row(
            key=episode.planned.key,
            prompt=episode.planned.prompt,
            prompt_ids=prompt_ids,
            response_ids=np.array(episode.ids, dtype=np.uint32),
            behaviour_logp=np.array(episode.logp, dtype=np.float32),
            policy_version=np.full(length, version, dtype=np.int32),
            loss_mask=own & (not broken),
            truncated=cut,
            text="\n".join(episode.texts),
            candidates=np.stack(episode.candidates) if episode.candidates else None,
            origin="expert" if given else "branch" if branch else "policy",
            turns=tuple(episode.turns),
            episode=EpisodeTrace(
                tool_mask=~own,
                windows=episode.windows,
                summaries=tuple(episode.summaries),
                states=tuple(episode.states),
                agents=tuple(episode.agents) if any(episode.agents) else (),
            ),
            turn_rewards=tuple(episode.rewards),
            verdict=verdict,
            tags={**episode.planned.tags, "ended": episode.ended},
            trained=not broken,
        )
        row.notes |= {"turns": float(episode.acted), "replayed": 0.0 if given else float(len(episode.plan.replay))}
        row.notes |= episode.measures
        if self._summaries is not None:
            row.notes |= notes_of(episode)
        if branch is not None:
            row.notes["branched"] = float(branch.turns)
        if episode.tools:
            row.notes["bad_calls"] = episode.bad_calls
        return row

    def _step(self, episodes: Mapping[int, Episode], actions: Mapping[int, str]) -> dict[int, Seen]:
        return self._each(episodes, lambda worlds, numbers: worlds.step({n: actions[n] for n in numbers}))

    def _each(
        self, episodes: Mapping[int, Episode], call: Callable[[Worlds, list[int]], dict[int, Seen]]
    ) -> dict[int, Seen]:
        """Call `call` once per environment, with the indices of its episodes."""
        by_spec: dict[str, list[int]] = {}
        for number, episode in episodes.items():
            spec = episode.planned.prompt.extra[ENVIRONMENT]
            text = json.dumps({key: spec.get(key) for key in ("name", "options")}, sort_keys=True)
            by_spec.setdefault(text, []).append(number)
        found: dict[int, Seen] = {}
        for text, numbers in by_spec.items():
            if text not in self._worlds:
                spec = json.loads(text)
                isolated = self._settings.isolation == "process"
                limits = self._settings.limits
                self._worlds[text] = EnvironmentPool(spec, limits) if isolated else InProcess(spec, limits)
            found |= call(self._worlds[text], numbers)
        return {number: found[number] for number in episodes}


def _tell(episodes: Sequence[Episode]) -> None:
    """Log how many episodes broke, and why the first of them did."""
    broken = [episode for episode in episodes if episode.why]
    if broken:
        name = broken[0].planned.prompt.extra[ENVIRONMENT].get("name")
        how = broken[0].ended.removeprefix("broken: ")
        said = "%d of %d episodes broke; the first was in environment %r, %s: %s."
        log.warning(said, len(broken), len(episodes), name, how, broken[0].why)
