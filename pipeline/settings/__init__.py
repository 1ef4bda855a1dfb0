"""Settings: attrs fields that carry range, meaning, environment variable and option of what a user may set."""

from __future__ import annotations

from .checks import ANY, PORT, Check, above, at_least, finite, is_finite, one_of, share
from .kinds import TRUE, expected, from_plain, from_text, kinds_of
from .records import (
    Setting,
    by_variable,
    from_environment,
    kind_problems,
    raise_problems,
    range_problems,
    required,
    setting,
    settings_of,
)
from .variables import Problem, Variable, choice, decimal, number, switch, url_path, whole

__all__ = [
    "ANY",
    "PORT",
    "TRUE",
    "Check",
    "Problem",
    "Setting",
    "Variable",
    "above",
    "at_least",
    "by_variable",
    "choice",
    "decimal",
    "expected",
    "finite",
    "from_environment",
    "from_plain",
    "from_text",
    "is_finite",
    "kind_problems",
    "kinds_of",
    "number",
    "one_of",
    "raise_problems",
    "range_problems",
    "required",
    "setting",
    "settings_of",
    "share",
    "switch",
    "url_path",
    "whole",
]
