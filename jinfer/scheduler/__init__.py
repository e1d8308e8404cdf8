"""Requests, the queue and the step plan. Plain Python: nothing here imports JAX."""

from jinfer.scheduler.plan import Chunk, DecodeRow, StepPlan
from jinfer.scheduler.request import FinishReason, Given, Request, Status, position_limit
from jinfer.scheduler.scheduler import Scheduler

__all__ = ["Chunk", "DecodeRow", "FinishReason", "Given", "Request", "Scheduler", "Status", "StepPlan",
           "position_limit"]
