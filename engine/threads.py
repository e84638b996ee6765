"""How many threads to compute with: as many as there are cores for this process.

A second thread on a core adds nothing to kernels that keep its vector units busy, and a thread
that a quota puts to sleep makes every other wait for it at the next barrier.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

MAX_THREADS = 256
GROUP = re.compile(r"^\d+:([^:\n]*):/*(.*)$", re.MULTILINE)  # id:controllers:/group


def default_threads(root: Path = Path("/")) -> int:
    """The least of the CPUs this process may use, their physical cores, and its CPU quotas.

    What the system's files (under `root`) do not say, or say in an unknown form, is no limit.
    """
    if hasattr(os, "sched_getaffinity"):  # neither on macOS nor on Windows
        cpus = os.sched_getaffinity(0)
    else:
        cpus = set(range(os.cpu_count() or 1))
    cores = {core_of(root, cpu) for cpu in cpus}
    return max(1, min(MAX_THREADS, len(cores), *cpu_quotas(root)))


def check_threads(n: object) -> int:
    """`n`, or ValueError if it is no number of threads."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_THREADS:
        raise ValueError(f"threads is {n!r}; a whole number from 1 to {MAX_THREADS} is needed")
    return n


def core_of(root: Path, cpu: int) -> tuple[int, ...]:
    """What the CPUs of one physical core have in common; a CPU of unknown place is its own core."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    ids = numbers(topology / "physical_package_id", topology / "core_id")
    return tuple(ids) if len(ids) == 2 and min(ids) >= 0 else (cpu,)


def cpu_quotas(root: Path) -> Iterator[int]:
    """Whole CPUs that each control group over this process grants, where one sets a quota."""
    for folder in cpu_groups(root):
        v2 = numbers(folder / "cpu.max")  # "max" where there is no quota
        v1 = numbers(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")  # -1 likewise
        for quota in (v2, v1):  # microseconds of CPU time, in how many of the clock's
            if len(quota) == 2 and min(quota) > 0:
                yield quota[0] // quota[1]


def cpu_groups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups, versions 1 and 2, and of every group above them.

    The roots are always among them: what is mounted in a container may be the container's own
    group, which the process's list calls by a path that only exists outside.
    """
    groups = "0::/\n1:cpu:/\n1:cpu,cpuacct:/\n"
    with suppress(OSError, ValueError):
        groups += (root / "proc/self/cgroup").read_text()
    for controllers, group in GROUP.findall(groups):
        mounts = {controllers, "cpu"} if controllers else {""}  # version 2 has no controllers here
        if controllers and "cpu" not in controllers.split(","):
            continue
        path = PurePosixPath(group)
        for mount in mounts:
            for part in (path, *path.parents):
                if ".." not in part.parts:  # a group outside of what is mounted
                    yield root / "sys/fs/cgroup" / mount / part


def numbers(*files: Path) -> list[int]:
    """The whole numbers that `files` hold; none if any of them is missing or holds another word."""
    try:
        return [int(word) for file in files for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
