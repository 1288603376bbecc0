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
        min_length=1, description="Addresses of the servers, for example http://host:8000. All ranks use all of them."
    )
    folder: Path | None = Field(
        None,
        description="Folder where weights are written for the servers, which must see it under the same path, and "
        "where the ranks agree on which of them sends. null means a folder NAME.rollout next to the run folder.",
    )
    transfer: Literal["folder", "nccl"] = Field(
        "folder",
        description="How whole weights reach the servers: folder, as files in `folder`; or nccl (vllm_server only), "
        "from the student's GPU to theirs over NCCL, for which the servers must be started with "
        '--weight-transfer-config \'{"backend": "nccl"}\'.',
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type in which the weights are sent; auto is the type in which the student's own forward "
        "pass computes.",
    )
    merge_adapters: bool = Field(
        False,
        description="Send a LoRA student as whole, merged weights; false sends only its adapters, for which the "
        "servers must have been started. DoRA is always merged.",
    )
    in_flight: int = Field(256, ge=1, description="Maximum number of rows that a rank has in flight at one server.")
    row_seconds: float = Field(
        1800.0, gt=0, description="Seconds that a server may take for a row before it counts as lost."
    )
    sync_seconds: float = Field(
        900.0, gt=0, description="Seconds that a server may take to load new weights before it counts as lost."
    )
    patience_seconds: float = Field(
        300.0, ge=0, description="Seconds that the run waits for a server to come back when all of them are lost."
    )
    api_key_env: str | None = Field(
        None, description="Name of the environment variable that holds the servers' API key."
    )
    admin_api_key_env: str | None = Field(
        None,
        description="Name of the environment variable that holds the key of the calls that replace weights, for SGLang "
        "servers started with --admin-api-key; null means that of `api_key_env`.",
    )
    mismatch_rows: int = Field(
        16,
        ge=0,
        description="Number of rows per rank and step whose log-probs the student recomputes, to measure the "
        "mismatch between the servers and the student; 0 measures nothing.",
    )
    mismatch_limit: float | None = Field(
        0.2,
        gt=0,
        description="Largest accepted mismatch of a step, the mean |log p - log q| per token in nats between student "
        "and servers; beyond it the run stops. null never stops it.",
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="Largest accepted difference in nats between the log-probs of servers and student on a known row, "
        "checked after each sync. null means 0.005, or 0.3 if either computes in half precision.",
    )

    @field_validator("endpoints")
    @classmethod
    def _check_endpoints(cls, endpoints: list[str]) -> list[str]:
        for url in endpoints:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"endpoint {url!r} must start with http:// or https://")
        if len(set(endpoints)) < len(endpoints):
            raise ValueError("the same endpoint is named twice")
        return [url.rstrip("/") for url in endpoints]

    def api_key(self, *, admin: bool = False) -> str | None:
        """The API key of the servers; with `admin`, the one for replacing weights.

        Raises:
            ConfigError: if the environment variable that should hold it is not set.
        """
        field = "admin_api_key_env" if admin and self.admin_api_key_env else "api_key_env"
        name: str | None = getattr(self, field)
        if name is None:
            return None
        key = os.environ.get(name)
        if not key:
            raise ConfigError(
                f"rollout.engine.{field} names the environment variable {name}, which is not set; set it."
            )
        return key
