"""Model cards: what a worker publishes about its model."""

from .model import (
    CheckedFile,
    GenerationConfigFile,
    LoraInfo,
    ModelDeploymentCard,
    ModelInfoFile,
    ModelInput,
    ModelType,
    PromptFormatterFile,
    TaggedFile,
    TokenizerFile,
    WorkerType,
)
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
