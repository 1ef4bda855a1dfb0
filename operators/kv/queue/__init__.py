"""Requests that wait for a worker: admission, order, and policy classes."""

from .admission import Admission, Applicant
from .policy import DEFAULT_CLASS, DepthTier, PolicyClass, PolicyProfile, PromptSize, QueueUsage
from .profiles import PolicyDocument
from .queue import AdmissionQueue, Waiting
from .rooms import Room, Rooms

__all__ = [
    "DEFAULT_CLASS",
    "Admission",
    "AdmissionQueue",
    "Applicant",
    "DepthTier",
    "PolicyClass",
    "PolicyDocument",
    "PolicyProfile",
    "PromptSize",
    "QueueUsage",
    "Room",
    "Rooms",
    "Waiting",
]
