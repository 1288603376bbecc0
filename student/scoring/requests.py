"""What is asked about a row, and what the answers mean: functions of the row alone, which send and change nothing.

    row  --route, contexts, stops-->  calls  --models-->  answers  --stops, spans, mixture-->  signals

`Requests.of` gives the calls and `Requests.signals` turns their answers into `row.signals`. A row routed to several
teachers, or read in windows, has several calls for one signal.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.wire.spans import put_back
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from student.data.needs import LOCAL_MODELS, REFERENCE, TEACHER, Needs, SignalNeed, teacher_role
from student.data.row import Row, SignalKey
from student.scoring.routing import Destination, Router, RouteRule, RoutingSettings, mix_scores
from student.scoring.stops import StopMap
from student.settings.teachers import TeacherSettings


def build_router(settings: TeacherSettings, served: Sequence[str]) -> Router:
    """The routes of a recipe: a prompt's own teacher, else its domain's, else the default or the only served model.

    Raises:
        ConfigError: if a route names a model that is neither served nor in this process.
    """
    others = [name for name in served if name != settings.reference]  # of two models, the one left is the teacher
    default = settings.default if settings.default is not None or len(others) != 1 else others[0]
    rules = [RouteRule(when={"domain": domain}, teacher=teacher) for domain, teacher in settings.routes.items()]
    routing = RoutingSettings(rules=rules, default=default, combine=settings.combine)
    return Router(routing, [*served, *(name for name in LOCAL_MODELS if name not in served)])


def destination(router: Router, prompt: Prompt) -> Destination:
    """Where answers to `prompt` are scored.

    Raises:
        ConfigError: if nothing names a teacher for it.
    """
    return router.route({"uid": prompt.uid, "teacher": prompt.teacher, "domain": prompt.domain})


@dataclass(frozen=True, slots=True)
class Target:
    """A model that answers for a role.

    Attributes:
        role: the role under which the row keeps the signal.
        model: name of the model.
        weight: weight of this model in the signal.
        local: whether the model is in this process.
    """

    role: str
    model: str
    weight: float
    local: bool

    def is_here(self, model: str) -> bool:
        """Whether it is `model`, in this process."""
        return self.local and self.model == model


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request to a model about a row.

    Attributes:
        target: the model, and the role under which the row keeps the answer.
        need: the need that it serves.
        reads: name of the context under which the model reads the row.
        spec: the payload that is asked for; differs from the need's where stop tokens are mapped.
        item: the ids; its response starts at position `first` of the row's response.
        first: see `item`; a row of several windows needs a call for each. 0 for a row in the teacher's own tokens.
    """

    target: Target
    need: SignalNeed
    reads: str
    spec: PayloadSpec
    item: ScoreItem
    first: int

    @property
    def key(self) -> SignalKey:
        """The key of the answer in `row.signals`."""
        return self.target.role, self.need.spec.kind


class Requests:
    """Maps rows to calls, and answers to signals.

    Args:
        settings: the recipe's `teachers` group.
        needs: what the terms need.
        served: names of the models of the fleet.
        known: served models that the handshake has checked; None for all.
        stops: maps the stop tokens of served models onto the student's; None to leave them as they are.
        late: roles whose contexts are made from outcomes.
    """

    def __init__(
        self,
        settings: TeacherSettings | None,
        needs: Needs,
        served: Iterable[str] = (),
        *,
        known: Collection[str] | None = None,
        stops: StopMap | None = None,
        late: frozenset[str] = frozenset(),
    ) -> None:
        self._settings, self._needs = settings, needs
        self._served = sorted(served)
        self._known = self._served if known is None else known
        self._stops = stops or StopMap((), {})
        self._late = late
        self._router = build_router(settings, self._served) if settings is not None and needs.teacher else None

    def route(self, prompt: Prompt) -> Destination:
        """The teachers of a prompt, with weights; none if no term needs any.

        Raises:
            ConfigError: if no teacher is mapped, or the handshake has not checked the mapped one.
        """
        if self._router is None:
            return Destination(())
        route = destination(self._router, prompt)
        for name, _ in route.parts:
            if name not in self._known and name in self._served:
                raise ConfigError(
                    f"prompt {prompt.uid} goes to teacher {name!r}, which was not checked before the run, because "
                    "its task does not declare its domains and teachers; name that teacher in teachers.routes."
                )
        return route

    def names(self, labels: Labels) -> set[str]:
        """Every value of `row.teacher` for prompts with these pairs of (teacher, domain)."""
        if self._router is None:
            return set()
        return {self._router.route({"teacher": teacher, "domain": domain}).name for teacher, domain in labels}

    def of(self, row: Row) -> list[Call]:
        """Everything that is asked about a row, whose contexts it has; see `route` for errors."""
        calls = []
        for need, target, reads in self._readers(row):
            # Models in this process score all positions, because skipping some saves neither bytes nor a projection.
            gather, own = need.spec.kind is PayloadKind.GATHER, not target.local
            if (other := row.translations.get(target.model)) is not None:
                calls.append(Call(target, need, reads, need.spec, other.item, 0))
                continue
            for item, first in row.asked(gather=gather, role=reads, own=own):
                spec, mapped = self._stops.ask(target.model, need.spec, item)
                calls.append(Call(target, need, reads, spec, mapped, first))
        return calls

    def signals(self, row: Row, answers: Iterable[tuple[Call, Scores]]) -> dict[SignalKey, Scores]:
        """The signals of a row from the answers to its calls, or to all calls of some roles; mixes weighted teachers.

        Every array has one row per position of the response; see `put_back` for positions that were not asked about.
        """
        windows: dict[tuple[SignalKey, Target], list[tuple[Scores, ScoreItem, int]]] = {}
        translated: dict[SignalKey, Scores] = {}
        for call, answer in answers:
            if (other := row.translations.get(call.target.model)) is not None:
                translated[call.key] = other.scores(answer, row.behaviour_logp)
                continue
            scores = self._stops.apply(call.target.model, call.need.spec, call.item, answer)
            windows.setdefault((call.key, call.target), []).append((scores, call.item, call.first))
        models: dict[SignalKey, list[tuple[Scores, float]]] = {}
        for (key, target), parts in windows.items():
            ids = row.candidates if key[1] is PayloadKind.GATHER else None
            models.setdefault(key, []).append((put_back(parts, row.length, ids), target.weight))
        found = {key: scores[0][0] if len(scores) == 1 else mix_scores(scores) for key, scores in models.items()}
        return found | translated

    def positions(self, rows: Iterable[Row]) -> dict[str, int]:
        """Prompt and response positions in the calls for `rows`, by role; each teacher of a row counts separately.

        Positions read by models in this process count as role "local".
        """
        counts: dict[str, int] = {}
        for row in rows:
            for need, target, reads in self._readers(row):
                role = "local" if target.local else need.role
                other = row.translations.get(target.model)
                asked = (
                    row.asked_positions(role=reads, own=not target.local)
                    if other is None
                    else len(other.item.token_ids)
                )
                counts[role] = counts.get(role, 0) + asked
        return counts

    def model_of(self, role: str, row: Row) -> Target:
        """The one model behind a role under which `row` keeps signals."""
        own = {teacher_role(teacher): teacher for teacher, _ in row.teachers}
        if role in own:
            return self._target(role, own[role], 1.0)
        return self._targets(role, Destination(((row.teacher, 1.0),)))[0]

    def _readers(self, row: Row) -> Iterator[tuple[SignalNeed, Target, str]]:
        """Which model reads a row for which need, and the name of the context that it reads."""
        route = self.route(row.prompt)
        for need in self._needs.signals:
            for target in self._targets(need.role, route):
                # A teacher may have its own context, kept under its name; otherwise it reads that of all teachers, kept
                # under the role.
                own = target.model in row.contexts or target.model in self._late
                yield need, target, target.model if need.role == TEACHER and own else need.role

    def _targets(self, role: str, route: Destination) -> list[Target]:
        """The models for `role`.

        Raises:
            ConfigError: for a role that does not exist, or a reference that the recipe does not name.
        """
        if role == REFERENCE:
            if self._settings is None or self._settings.reference is None:
                raise ConfigError("the objective needs a reference; set teachers.reference to a served model.")
            return [self._target(role, self._settings.reference, 1.0)]
        if role in LOCAL_MODELS:
            return [Target(role, role, 1.0, local=True)]
        if role != TEACHER:
            raise ConfigError(f"a term needs signals of role {role!r}, which does not exist.")
        if route.summed:
            return [self._target(teacher_role(name), name, 1.0) for name, _ in route.summed]
        return [self._target(role, name, weight) for name, weight in route.parts]

    def _target(self, role: str, model: str, weight: float) -> Target:
        return Target(role, model, weight, local=model not in self._served)
