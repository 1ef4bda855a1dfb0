"""Operators: the stages between a caller and an engine, each of which wraps the next stage."""

from pipeline.protocols.limits import BusyThresholds

from .kv import KvPushRouter, KvRouter, KvRouterConfig, kv_router
from .lora import LoraAdapter
from .migration import Migration
from .pool import (
    AllBusy,
    AllCoolingDown,
    DeviceAware,
    Picker,
    PushRouter,
    Rejection,
    RoundRobin,
    least_loaded,
    power_of_two,
    random_pick,
)
from .prefill import KvPrefill, PrefillError, PrefillRouter, PrefillSettings, PushPrefill
from .switch import ModelNotFound, Switch
from .text import ByteTokenizer, ChatTemplate, Detokenize, HuggingFaceTokenizer, Model, Preprocess, Tokenizer

__all__ = [
    "AllBusy",
    "AllCoolingDown",
    "BusyThresholds",
    "ByteTokenizer",
    "ChatTemplate",
    "Detokenize",
    "DeviceAware",
    "HuggingFaceTokenizer",
    "KvPrefill",
    "KvPushRouter",
    "KvRouter",
    "KvRouterConfig",
    "LoraAdapter",
    "Migration",
    "Model",
    "ModelNotFound",
    "Picker",
    "PrefillError",
    "PrefillRouter",
    "PrefillSettings",
    "Preprocess",
    "PushPrefill",
    "PushRouter",
    "Rejection",
    "RoundRobin",
    "Switch",
    "Tokenizer",
    "kv_router",
    "least_loaded",
    "power_of_two",
    "random_pick",
]
