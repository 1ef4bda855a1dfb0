"""The forms of the OpenAI API: prompts of a request, whole answers, chunks, usage, log probabilities. No I/O."""

from .answers import Answer, ChatAnswer, ChatChunks, Chunks, CompletionAnswer, CompletionChunks
from .answers import token_output as token_output
from .form import AnswerForm, OpenAIRequest, UsageCount, encode, event, has_prompts, one_per_prompt

__all__ = [
    "Answer",
    "AnswerForm",
    "ChatAnswer",
    "ChatChunks",
    "Chunks",
    "CompletionAnswer",
    "CompletionChunks",
    "OpenAIRequest",
    "UsageCount",
    "encode",
    "event",
    "has_prompts",
    "one_per_prompt",
]
