"""The OpenAI types: the face of requests, responses and the content parts both share.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from __future__ import annotations

from ..usage import ContentPart, InputAudio, MediaUrl
from .nvext import BYPASS_REMOTE_PREFILL as BYPASS_REMOTE_PREFILL
from .nvext import HEADERS as HEADERS
from .nvext import HEADERS_OF as HEADERS_OF
from .nvext import QUERY_INSTANCE_ID as QUERY_INSTANCE_ID
from .nvext import AgentHints as AgentHints
from .nvext import NvExt, NvExtResponse
from .nvext import apply_headers as apply_headers
from .nvext import effective_cache_salt as effective_cache_salt
from .requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    FunctionCall,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from .requests import GenerationRequest as GenerationRequest
from .requests import NamedToolChoice as NamedToolChoice
from .requests import Prompt as Prompt
from .requests import StreamOptions as StreamOptions
from .responses import ChatChoice as ChatChoice
from .responses import ChatChunkChoice as ChatChunkChoice
from .responses import ChatCompletion, ChatCompletionChunk, Completion
from .responses import ChatDelta as ChatDelta
from .responses import ChatLogprobs as ChatLogprobs
from .responses import ChosenLogprob as ChosenLogprob
from .responses import CompletionChoice as CompletionChoice
from .responses import CompletionLogprobs as CompletionLogprobs
from .responses import ModelInfo as ModelInfo
from .responses import ModelList as ModelList
from .responses import ResponseMessage as ResponseMessage
from .responses import TokenLogprob as TokenLogprob

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatMessage",
    "Completion",
    "CompletionRequest",
    "ContentPart",
    "FunctionCall",
    "InputAudio",
    "MediaUrl",
    "NvExt",
    "NvExtResponse",
    "ResponseFormat",
    "Tool",
    "ToolCall",
    "ToolChoice",
]
