"""Programs as child processes: started, restarted after a failure, and ended in order with the process above them."""

from .child_process import LaunchedProcesses
from .log_lines import LogLines
from .notify import notify_ready
from .process_group import Child, ProcessGroup, Program, ProgramState, StartProgram

__all__ = [
    "Child",
    "LaunchedProcesses",
    "LogLines",
    "ProcessGroup",
    "Program",
    "ProgramState",
    "StartProgram",
    "notify_ready",
]
