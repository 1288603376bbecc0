"""Resolves the roles of terms (teacher, reference, student ...) to models, served or in this process."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from student.data.needs import LOCAL_MODELS, REFERENCE, TEACHER, Needs, teacher_role
from student.data.row import Row
from student.scoring.routing import Destination, Router, RouteRule, RoutingSettings
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


class Targets:
    """Maps the roles of a recipe to models.

    Args:
        settings: the recipe's `teachers` group.
        needs: what the terms need.
        served: names of the models of the fleet.
        known: models that the handshake has checked; None for all.
    """

    def __init__(
        self,
        settings: TeacherSettings | None,
        needs: Needs,
        served: Iterable[str],
        known: Collection[str] | None = None,
    ) -> None:
        self._settings = settings
        self._served = sorted(served)
        self._known = self._served if known is None else known
        self._router = build_router(settings, self._served) if settings is not None and needs.teacher else None

    def route(self, row: Row) -> Sequence[tuple[str, float]]:
        """Give a row its teachers, with weights; none if no term needs any.

        Raises:
            ConfigError: if no teacher is mapped, or the handshake has not checked the mapped one.
        """
        if self._router is None:
            return ()
        found = destination(self._router, row.prompt)
        parts = found.parts
        for name, _ in parts:
            if name not in self._known and name in self._served:
                raise ConfigError(
                    f"prompt {row.prompt.uid} goes to teacher {name!r}, which was not checked before the run, because "
                    "its task does not declare its domains and teachers; name that teacher in teachers.routes."
                )
        row.teachers = parts if found.combine == "divergence" and len(parts) > 1 else ()
        row.teacher = _named(parts)
        return parts

    def names(self, labels: Labels) -> set[str]:
        """Every value of `row.teacher` for prompts with these pairs of (teacher, domain)."""
        if self._router is None:
            return set()
        found = [self._router.route({"teacher": teacher, "domain": domain}) for teacher, domain in labels]
        return {_named(target.parts) for target in found}

    def of(self, role: str, row: Row, parts: Sequence[tuple[str, float]]) -> list[Target]:
        """The models for `role`; `parts` are those of the row's route.

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
        if row.teachers:
            return [self._target(teacher_role(name), name, 1.0) for name, _ in parts]
        return [self._target(role, name, weight) for name, weight in parts]

    def model_of(self, role: str, row: Row) -> Target:
        """The one model behind a role under which `row` keeps signals."""
        own = {teacher_role(teacher): teacher for teacher, _ in row.teachers}
        if role in own:
            return self._target(role, own[role], 1.0)
        return self.of(role, row, [(row.teacher, 1.0)])[0]

    def _target(self, role: str, model: str, weight: float) -> Target:
        return Target(role, model, weight, local=model not in self._served)


def _named(parts: Sequence[tuple[str, float]]) -> str:
    return parts[0][0] if len(parts) == 1 else " + ".join(f"{weight:g} {name}" for name, weight in parts)
