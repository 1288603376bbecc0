"""A prompt in another wording: its identity (uid), answer and labels stay."""

from dataclasses import replace

from opd.tasks.prompt import Prompt


def in_template(prompt: Prompt, text: str) -> Prompt:
    """The prompt with `text` in place of its text, or of the last user message of a chat; {prompt} inserts the old."""
    if prompt.messages is None:
        return replace(prompt, text=text.replace("{prompt}", prompt.text or ""))
    messages = [dict(message) for message in prompt.messages]
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=len(messages) - 1)
    messages[last]["content"] = text.replace("{prompt}", messages[last]["content"])
    return replace(prompt, messages=tuple(messages))
