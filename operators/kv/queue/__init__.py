"""Requests that wait for a worker: admission, order, and policy classes."""

from .admission import OVERLAP_REFRESH_AFTER, AdmissionController, QueuedRequest
from .policy import DepthTier, PolicyClass, PolicyDocument, PolicyProfile, PromptSize
from .queue import AdmissionQueue, Waiting

__all__ = [
    "OVERLAP_REFRESH_AFTER",
    "AdmissionController",
    "AdmissionQueue",
    "DepthTier",
    "PolicyClass",
    "PolicyDocument",
    "PolicyProfile",
    "PromptSize",
    "QueuedRequest",
    "Waiting",
]
