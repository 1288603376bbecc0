"""Environments: what a student acts in over several turns, by name."""

from opd.registry import Registry
from opd.tasks.environments.base import Environment, EnvironmentTask, Observation

ENVIRONMENTS = Registry("environment", "opd.environments", member="Options")
ENVIRONMENTS.add("lock", "opd.tasks.environments.lock:Lock", "a lock of digits, with states to recover from")
ENVIRONMENTS.add("rooms", "opd.tasks.environments.rooms:Rooms", "rooms, keys and locked doors, with a known gold path")

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentTask", "Observation"]
