"""Two threads at once, for tests of what they share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def in_two_threads(work: Callable[[int], None]) -> None:
    """work(0) and work(1) at once, with as many switches between them as there can be.

    AssertionError if one of them raises.
    """
    failed, interval = [], sys.getswitchinterval()

    def run(me: int) -> None:
        try:
            work(me)
        except BaseException as e:
            failed.append(e)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
