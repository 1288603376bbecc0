"""What programs under test import first; loaded once, by the process that `forked` forks them from."""
# ruff: noqa: F401 - loading them is the purpose

import os

import grpc.aio
import grpc_health.v1.health
import torch.distributed.tensor
import torch.distributed.tensor.debug
import transformers.models.qwen3.modeling_qwen3

import opd.cli
import opd.maths
import student.job.job
import student.job.session
import teacher_server.cli
import teacher_server.server

os.fsync = lambda _: None  # as in tests/conftest.py
