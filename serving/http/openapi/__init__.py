"""The description of an app in OpenAPI 3.1, and the page that shows it."""

from .description import describe
from .docs_page import page

__all__ = ["describe", "page"]
