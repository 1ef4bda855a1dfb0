"""What stands between a caller and an engine: each operator wraps the next stage."""

from .byte_tokenizer import ByteTokenizer
from .chat_template import ChatTemplate
from .detokenize import Detokenize
from .model import Model
from .preprocess import PROMPT_TOKENS, Preprocess
from .push_router import Picker, PushRouter, RoundRobin, random_pick
from .tokenizer import HuggingFaceTokenizer, Tokenizer
from .validation import validate

__all__ = [
    "PROMPT_TOKENS",
    "ByteTokenizer",
    "ChatTemplate",
    "Detokenize",
    "HuggingFaceTokenizer",
    "Model",
    "Picker",
    "Preprocess",
    "PushRouter",
    "RoundRobin",
    "Tokenizer",
    "random_pick",
    "validate",
]
