"""Settings of rollout servers in a recipe; does not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from opd.errors import ConfigError
from student.rollout.engine import RolloutEngineSettings


class ServersSettings(RolloutEngineSettings):
    """Settings of rollout engines vllm_server and sglang_server."""

    endpoints: list[str] = Field(
        min_length=1, description="Addresses of the servers, for example http://host:8000; all ranks use all of them."
    )
    folder: Path | None = Field(
        None,
        description="Where weights are written for the servers, which must see it under the same path, and where ranks "
        "agree on who sends them; null: a folder NAME.rollout beside the run's.",
    )
    transfer: Literal["folder", "nccl"] = Field(
        "folder",
        description="How whole weights get to the servers: as files in `folder`; or, with vllm_server alone, from the "
        "student's GPU to theirs over NCCL, for which they are started with "
        '--weight-transfer-config \'{"backend": "nccl"}\'.',
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of the weights that are sent; auto: what the student's own forward computes in."
    )
    merge_adapters: bool = Field(
        False,
        description="Send a LoRA student as whole, merged weights; false sends its adapters alone, which the servers "
        "must have been started for. DoRA is always merged.",
    )
    in_flight: int = Field(256, ge=1, description="Most rows that a rank has under way at one server.")
    row_seconds: float = Field(1800.0, gt=0, description="A server that needs longer for a row counts as lost.")
    sync_seconds: float = Field(900.0, gt=0, description="A server that needs longer for new weights counts as lost.")
    patience_seconds: float = Field(
        300.0, ge=0, description="How long the run waits for a server to come back when all are lost."
    )
    api_key_env: str | None = Field(None, description="Environment variable with the servers' API key.")
    mismatch_rows: int = Field(
        16, ge=0, description="Rows of a step that the student reads again to measure the mismatch; 0: none."
    )
    mismatch_limit: float | None = Field(
        0.2,
        gt=0,
        description="The run stops when the mean |log p - log q| per token of a step is over it, nats; null: never.",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest difference in the log-probs of the known row after a sync, nats; null: 0.005 in float32, "
        "0.3 in halves.",
    )

    @field_validator("endpoints")
    @classmethod
    def _check_endpoints(cls, endpoints: list[str]) -> list[str]:
        for url in endpoints:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"endpoint {url!r} must start with http:// or https://")
        if len(set(endpoints)) < len(endpoints):
            raise ValueError("an endpoint is named twice")
        return [url.rstrip("/") for url in endpoints]

    def api_key(self) -> str | None:
        """The API key of the servers.

        Raises:
            ConfigError: if the environment variable that should hold it is not set.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(f"rollout.engine.api_key_env names {self.api_key_env}, which is not set; set it.")
        return key
