"""Items of a stream in the forms of the OpenAI API: whole answers, chunks, usage, log probabilities. Pure."""

from .answers import Answer, ChatAnswer, CompletionAnswer
from .chunks import ChatChunks, Chunks, CompletionChunks
from .form import AnswerForm, UsageCount, encode, event

__all__ = [
    "Answer",
    "AnswerForm",
    "ChatAnswer",
    "ChatChunks",
    "Chunks",
    "CompletionAnswer",
    "CompletionChunks",
    "UsageCount",
    "encode",
    "event",
]
