"""Items of a stream in the forms of the OpenAI API: whole answers, chunks, usage, log probabilities. Pure."""

from .answers import Answer, ChatAnswer, CompletionAnswer
from .chunks import ChatChunks, Chunks, CompletionChunks
from .form import AnswerForm, UsageCount, encode, event
from .prompts import OpenAIRequest, has_prompts, one_per_prompt

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
