"""An exclusive lock on an open file that ends with its process, however that ends.

`flock` belongs to the open file, so the operating system releases it also after kill -9. Windows has no
such lock: there nothing is locked.
"""

import sys
from typing import IO

if sys.platform != "win32":
    import fcntl


def lock(stream: IO[bytes]) -> None:
    """Lock the file until it is closed, as soon as nobody else does."""
    if sys.platform != "win32":
        fcntl.flock(stream, fcntl.LOCK_EX)


def try_lock(stream: IO[bytes]) -> bool:
    """Lock the file until it is closed; False if it is locked already, by any process or stream."""
    if sys.platform != "win32":
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
