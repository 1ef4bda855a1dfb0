"""A shared folder in the place of a broker: discovery and objects for the processes that see it.

FileStore      a file for each key; its modification time is the lease
FileObjects    a file for each object, named by its content
"""

from .folder_objects import FileObjects
from .folder_store import FileStore

__all__ = ["FileObjects", "FileStore"]
