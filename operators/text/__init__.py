"""Text on one side, token ids on the other: preprocessing and detokenizing."""

from .chat_template import ChatTemplate
from .decoding import REPLACEMENT, StopMatcher
from .detokenize import ChoiceDecoder, Detokenize, StopRules
from .encoding import json_of_ids, json_of_text
from .model import LAST_USER_MESSAGE, WHOLE_CHAT, Model
from .options import extra_args, output_options, routing_hints, sampling_options, stop_conditions
from .preprocess import PROMPT_TOKENS, Preprocess, preprocess, prompt_of
from .prompt_size import prompt_characters
from .prompt_threads import PromptThreads, TooManyPrompts, offer_threads, offered_threads
from .request_size import check_counts
from .routing_report import filled
from .split_pattern import UnknownPattern, passes, separates
from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from .validation import RULES, keywords_of, validate

__all__ = [
    "LAST_USER_MESSAGE",
    "PROMPT_TOKENS",
    "REPLACEMENT",
    "RULES",
    "WHOLE_CHAT",
    "ByteTokenizer",
    "ChatTemplate",
    "ChoiceDecoder",
    "Detokenize",
    "HuggingFaceTokenizer",
    "Model",
    "Preprocess",
    "PromptThreads",
    "StopMatcher",
    "StopRules",
    "Tokenizer",
    "TooManyPrompts",
    "UnknownPattern",
    "check_counts",
    "extra_args",
    "filled",
    "json_of_ids",
    "json_of_text",
    "keywords_of",
    "offer_threads",
    "offered_threads",
    "output_options",
    "passes",
    "preprocess",
    "prompt_characters",
    "prompt_of",
    "routing_hints",
    "sampling_options",
    "separates",
    "stop_conditions",
    "validate",
]
