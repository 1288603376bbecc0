"""Base of rewards that ask a chat model about answers."""

from __future__ import annotations

from typing_extensions import TypeVar

from opd.tasks.chat import ChatClient, ChatSettings
from student.rl.rewards.asked import Asked, AskedSettings


class AskedChatSettings(AskedSettings, ChatSettings):
    """Settings of rewards that ask a chat model."""


AskedChatSettings_co = TypeVar(
    "AskedChatSettings_co", bound=AskedChatSettings, covariant=True, default=AskedChatSettings
)


class AskedChat(Asked[AskedChatSettings_co]):
    """Base of rewards that ask a chat model, `client`, about answers."""

    def __init__(self, settings: AskedChatSettings_co) -> None:
        super().__init__(settings)
        self.client = ChatClient(settings)
