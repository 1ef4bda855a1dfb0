"""The conformance kit: `run_conformance` proves an LLMEngine against its contract with one call."""

from .contexts import mock_context
from .failures import MEANINGS, ConformanceFailure
from .run import cancelling_context, run_conformance

__all__ = ["MEANINGS", "ConformanceFailure", "cancelling_context", "mock_context", "run_conformance"]
