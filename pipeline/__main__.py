"""The entry of the command ``pipeline``: Ctrl-C is answered in a line from the first moment on."""

import os
import signal
from typing import NoReturn


def _end(number: int, _: object) -> NoReturn:
    """End the process: nothing has begun."""
    os.write(2, b"\nerror: interrupted\n")
    os._exit(128 + number)


def main() -> NoReturn:
    """Import the command line, which handles signals itself, and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background
        signal.signal(signal.SIGINT, _end)
    from pipeline import cli

    cli.main()


if __name__ == "__main__":
    main()
