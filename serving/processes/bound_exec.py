"""Replaces itself by a program that ends with the process above it, also if that is killed while the program starts.

    python -I -S bound_exec.py PARENT_PID SOCKETS PROGRAM ARGUMENT...

`SOCKETS` are listening sockets for the program, as `name=descriptor` with commas between: see `serving.listeners`.

On Linux the kernel kills the program when its parent has ended (`PR_SET_PDEATHSIG`), which holds across `exec` for a
program of any language. Set here, not between fork and exec in the parent, it is safe beside the threads of the parent.
Other systems have nothing like it: the program is started all the same.
"""

import fcntl
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_FIRST_FD = 3
_ABOVE_FD = 200
"""Descriptors from here on are free."""


def main() -> None:
    """Bind this process to its parent and replace it by the program."""
    parent_pid, sockets, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent_pid):  # it ended before it could be bound to
            os._exit(1)
    if sockets:
        _hand_down(dict(each.split("=") for each in sockets.split(",")))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


def _hand_down(sockets: dict[str, str]) -> None:
    """Give the program the sockets as its first descriptors, with the variables that name them."""
    copies = [fcntl.fcntl(int(file), fcntl.F_DUPFD, _ABOVE_FD) for file in sockets.values()]
    for file in sockets.values():
        os.close(int(file))
    for number, copy in enumerate(copies):
        os.dup2(copy, _FIRST_FD + number, inheritable=True)
        os.close(copy)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": ":".join(sockets)}


if __name__ == "__main__":
    main()
