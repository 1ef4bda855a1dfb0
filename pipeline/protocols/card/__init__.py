"""Model cards: what a worker publishes about its model."""

from .files import (
    CheckedFile,
    GenerationConfigFile,
    ModelInfoFile,
    PromptFormatterFile,
    TaggedFile,
    TokenizerFile,
)
from .model import LoraInfo, ModelDeploymentCard, ModelInput, ModelType, WorkerType
from .runtime_config import (
    STOPS_PREFILLS,
    TOPOLOGY_TAINT_PREFIX,
    DisaggregatedEndpoint,
    ModelRuntimeConfig,
    topology_taint,
)

__all__ = [
    "STOPS_PREFILLS",
    "TOPOLOGY_TAINT_PREFIX",
    "CheckedFile",
    "DisaggregatedEndpoint",
    "GenerationConfigFile",
    "LoraInfo",
    "ModelDeploymentCard",
    "ModelInfoFile",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "PromptFormatterFile",
    "TaggedFile",
    "TokenizerFile",
    "WorkerType",
    "topology_taint",
]
