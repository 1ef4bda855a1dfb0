"""Text on one side, token ids on the other: preprocessing and detokenizing."""

from .chat_template import ChatTemplate
from .detokenize import Detokenize
from .model import LAST_USER_MESSAGE, WHOLE_CHAT, Model
from .preprocess import PROMPT_TOKENS, Preprocess, begins_answer, raw_prompt, template_args
from .prompt_threads import PromptThreads, TooManyPrompts, offered_threads
from .request_size import check_counts
from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from .validation import keywords_of, validate

__all__ = [
    "LAST_USER_MESSAGE",
    "PROMPT_TOKENS",
    "WHOLE_CHAT",
    "ByteTokenizer",
    "ChatTemplate",
    "Detokenize",
    "HuggingFaceTokenizer",
    "Model",
    "Preprocess",
    "PromptThreads",
    "Tokenizer",
    "TooManyPrompts",
    "begins_answer",
    "check_counts",
    "keywords_of",
    "offered_threads",
    "raw_prompt",
    "template_args",
    "validate",
]
