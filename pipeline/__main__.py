"""The entry of the command ``pipeline``: Ctrl-C is answered in a line from the first moment on."""

import os
import signal
import sys
from typing import NoReturn


def _end(number: int, _: object) -> NoReturn:
    """End the process: nothing has begun."""
    os.write(2, b"\nerror: interrupted\n")
    os._exit(128 + number)


def main() -> NoReturn:
    """Import the command line, which handles signals itself, and run it; end also if user code has left threads."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background
        signal.signal(signal.SIGINT, _end)
    if os.name != "posix":
        sys.exit("error: pipeline needs a POSIX system. On Windows, install it in WSL 2.")
    from pipeline import cli, system

    try:
        cli.main()
    except SystemExit as end:
        system.exit_in_time(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
