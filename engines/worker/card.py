"""card_of: the card of a worker's model, from the worker's settings and its engine's config.

Source: dynamo lib/backend-common/src/worker.rs, build_local_model, and lib/llm/src/local_model.rs. Other than there,
nothing is ever fetched: a model name that is not a folder makes a card of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import evolve

from pipeline import InvalidArgument
from pipeline.llm import card_from_folder, checked_file
from pipeline.protocols.card import (
    STOPS_PREFILLS,
    DisaggregatedEndpoint,
    ModelDeploymentCard,
    ModelRuntimeConfig,
    PromptFormatterFile,
)

from ..llm import EngineConfig
from .config import WorkerConfig, served_name

DEFAULT_BLOCK_SIZE_TOKENS = 16
"""Block size in the card of an engine without KV blocks: the field must not be empty."""


def model_folder(worker: WorkerConfig) -> Path | None:
    """Return the folder of the worker's model; None if its name is not a path of this machine.

    Raises InvalidArgument if the path cannot be examined.
    """
    if not worker.model_name:
        return None
    path = Path(worker.model_name)
    try:
        return path if path.exists() else None
    except OSError as error:
        raise InvalidArgument(f"cannot be examined: {error}", field="model_name") from error


def card_of(
    worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str] | None = None
) -> ModelDeploymentCard:
    """Return the card of the worker's model, with the files of its folder if there is one, which are read whole.

    Raises InvalidArgument if the model has no name, or its folder or template cannot be used.
    """
    name = served_name(worker, engine)
    if not name:
        raise InvalidArgument("the engine gives no name of its model", field="model")
    mode = worker.disaggregation_mode
    try:
        card = _base(worker, engine, name)
        template = card.chat_template_file
        if worker.custom_jinja_template is not None:
            custom = checked_file(worker.custom_jinja_template)
            template = PromptFormatterFile("hf_chat_template", custom, is_custom=True)
    except OSError as error:
        raise InvalidArgument(f"the files of {name} cannot be read: {error}", field="model_name") from error
    return evolve(
        card,
        chat_template_file=template,
        model_type=worker.model_type,
        model_input=worker.model_input,
        worker_type=mode.worker_type,
        needs=mode.needs(route_to_encoder=worker.route_to_encoder, may_prefill=worker.may_prefill),
        aliases=list(engine.model_aliases),
        runtime_config=runtime_config_of(worker, engine, environment or {}),
    ).with_projected_context()


def _base(worker: WorkerConfig, engine: EngineConfig, name: str) -> ModelDeploymentCard:
    block_size = engine.kv_cache_block_size or DEFAULT_BLOCK_SIZE_TOKENS
    if (folder := model_folder(worker)) is not None:
        return card_from_folder(folder, kv_cache_block_size=block_size, display_name=name)
    return evolve(
        ModelDeploymentCard.named(name, kv_cache_block_size=block_size), source_path=worker.model_name or None
    )


def runtime_config_of(worker: WorkerConfig, engine: EngineConfig, environment: Mapping[str, str]) -> ModelRuntimeConfig:
    """Return the runtime part of the card; values that the engine does not advertise are left out."""
    endpoint = None
    if engine.bootstrap_host is not None and engine.bootstrap_port is not None:
        endpoint = DisaggregatedEndpoint(engine.bootstrap_host, engine.bootstrap_port)
    config = ModelRuntimeConfig(
        context_length=engine.context_length,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        tool_call_parser=worker.tool_call_parser,
        reasoning_parser=worker.reasoning_parser,
        exclude_tools_when_tool_choice_none=worker.exclude_tools_when_tool_choice_none,
        data_parallel_start_rank=engine.data_parallel_start_rank or 0,
        data_parallel_size=1 if engine.data_parallel_size is None else engine.data_parallel_size,
        enable_local_indexer=worker.enable_local_indexer and worker.disaggregation_mode.may_index,
        runtime_data=engine.runtime_data | ({STOPS_PREFILLS: True} if engine.stops_prefills else {}),
        disaggregated_endpoint=endpoint,
    )
    config.fill_from_environment(environment)
    return config
