"""Threads: laid-out systems, and what each of them allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.threads import check_threads, default_threads


@pytest.fixture
def eight(monkeypatch):
    """A process that may run on CPUs 0 to 7."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def topology(*places: tuple[int, int]) -> dict[str, str]:
    """The files that place CPU 0, 1, ... in a package and a core."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{value}\n"
        for cpu, place in enumerate(places)
        for name, value in zip(("physical_package_id", "core_id"), place, strict=True)
    }


def test_nothing_known(tmp_path, eight):
    """No /proc and no /sys, as on macOS: a missing file taken for a limit, or a traceback."""
    assert default_threads(tmp_path) == 8


def test_no_affinity(tmp_path, monkeypatch):
    """AttributeError where the system has no affinity; a machine that cannot count its CPUs."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert default_threads(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads(tmp_path) == 1


def test_affinity(tmp_path, monkeypatch):
    """All of the machine's CPUs counted for a process that is pinned to two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert default_threads(lay(tmp_path, topology(*[(0, core) for core in range(8)]))) == 2


def test_more_cpus_than_threads(tmp_path, monkeypatch):
    """A default that check_threads refuses, on a machine with more CPUs than its limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(384)), raising=False)
    assert check_threads(default_threads(tmp_path)) == 256


@pytest.mark.parametrize(
    "places, cores",
    [
        ([(0, n % 4) for n in range(8)], 4),  # siblings n and n + 4
        ([(0, n // 2) for n in range(8)], 4),  # siblings side by side
        ([(n // 4, n % 4) for n in range(8)], 8),  # two packages that number their cores alike
        ([(n // 4, n % 2) for n in range(8)], 4),  # the same with siblings
        ([(0, 0)] * 8, 1),
        ([(0, -1)] * 8, 8),  # a kernel that does not know
        ([(0, 0)] * 4, 5),  # CPUs 4 to 7 unknown
    ],
)
def test_siblings_are_one_core(tmp_path, eight, places, cores):
    """Two threads a core, which slow each other down; or cores of two packages taken for one."""
    assert default_threads(lay(tmp_path, topology(*places))) == cores


def test_siblings_outside_the_affinity(tmp_path, monkeypatch):
    """A process that has one sibling of each core has as many cores as CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4}, raising=False)
    assert default_threads(lay(tmp_path, topology(*[(0, n // 2) for n in range(8)]))) == 3


OWN = {"proc/self/cgroup": "0::/user.slice/app.scope\n"}
GROUP = "sys/fs/cgroup/user.slice/app.scope/cpu.max"


@pytest.mark.parametrize(
    "text, threads",
    [
        ("300000 100000\n", 3),
        ("max 100000\n", 8),
        ("150000 100000\n", 1),  # rounded down: a second thread would be put to sleep
        ("50000 100000\n", 1),  # never 0
        ("1 100000\n", 1),
        ("25000 10000\n", 2),
        ("9900000 100000\n", 8),
        ("", 8),
        ("300000", 8),
        ("0 100000", 8),
        ("300000 0", 8),
        ("-1 100000", 8),
        ("three hundred", 8),
    ],
)
def test_quota(tmp_path, eight, text, threads):
    """A container's quota not seen: 8 threads on 3 CPUs wait for each other at every barrier."""
    assert default_threads(lay(tmp_path, OWN | {GROUP: text})) == threads


def test_nested_quotas(tmp_path, eight):
    """The quota of a group above the process's own is as binding."""
    files = OWN | {
        GROUP: "600000 100000",
        "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
        "sys/fs/cgroup/cpu.max": "max 100000",
    }
    assert default_threads(lay(tmp_path, files)) == 2


@pytest.mark.parametrize("group", ["/", "/docker/0123abcd", "/../outside", None])
def test_quota_at_the_mounted_root(tmp_path, eight, group):
    """In a container the root is its group, by whatever name the process's list calls it."""
    files = {"sys/fs/cgroup/cpu.max": "200000 100000"}
    if group:
        files["proc/self/cgroup"] = f"0::{group}\n"
    assert default_threads(lay(tmp_path, files)) == 2


def v1(folder: str, quota: object, period: object = 100_000) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    return {f"{at}/cpu.cfs_quota_us": f"{quota}\n", f"{at}/cpu.cfs_period_us": f"{period}\n"}


LIST = "9:memory:/mem\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/x:y\n0::/\n"


@pytest.mark.parametrize(
    "files, threads",
    [
        (v1("cpu/docker/abc", 350_000), 3),
        (v1("cpu,cpuacct/docker/abc", 350_000), 3),
        (v1("cpu,cpuacct/docker", 250_000), 2),  # the group above
        (v1("cpu,cpuacct", 150_000), 1),  # the root
        (v1("cpu", 50_000), 1),
        (v1("cpu/docker/abc", -1), 8),  # no quota
        (v1("cpu/docker/abc", 350_000, "?"), 8),
        (v1("cpu/docker/abc", 350_000) | v1("cpu", 200_000), 2),
        (v1("cpu/mem", 100_000), 8),  # the memory controller's group is not ours
        (v1("memory/mem", 100_000), 8),
    ],
)
def test_quota_of_version_1(tmp_path, eight, files, threads):
    """The older layout of control groups, which many clusters still run."""
    assert default_threads(lay(tmp_path, files | {"proc/self/cgroup": LIST})) == threads


def test_group_that_leaves_its_mount(tmp_path, eight):
    """A path of `..`, as a process sees that was moved out of its namespace, reads other files."""
    lay(tmp_path, {"sys/fs/outside/cpu.max": "100000 100000", "sys/fs/cgroup/a/x": ""})
    lay(tmp_path, {"proc/self/cgroup": "0::/a/../../outside\n"})
    assert default_threads(tmp_path) == 8


@pytest.mark.parametrize("text", [":::", "0::", "no list", "\n\n", "0:cpu", "x:cpu:/"])
def test_malformed_list(tmp_path, eight, text):
    """A list of groups in an unknown form is a traceback at the engine's start."""
    assert default_threads(lay(tmp_path, {"proc/self/cgroup": text})) == 8


def test_list_that_is_no_text(tmp_path, eight):
    """Group names are bytes: one that is not UTF-8 must not stop the engine."""
    lay(tmp_path, {"proc/self/cgroup": ""}).joinpath("proc/self/cgroup").write_bytes(b"0::/\xff\n")
    assert default_threads(tmp_path) == 8


def test_the_least_of_all(tmp_path, eight):
    """One limit that hides another."""
    files = OWN | topology(*[(0, n // 2) for n in range(8)])
    assert default_threads(lay(tmp_path, files | {GROUP: "300000 100000"})) == 3
    assert default_threads(lay(tmp_path, files | {GROUP: "600000 100000"})) == 4


def test_this_machine():
    """The real files of the system that runs the tests."""
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("n", [1, 2, 256])
def test_numbers_of_threads(n):
    """The limits themselves refused."""
    assert check_threads(n) == n


@pytest.mark.parametrize("n", [0, -1, 257, 10**30, True, False, 2.0, float("nan"), "2", None, [2]])
def test_no_numbers_of_threads(n):
    """A thread count that ends in a crash of the team, or `True` taken for one thread."""
    with pytest.raises(ValueError) as error:
        check_threads(n)
    assert repr(n) in str(error.value) and "1 to 256" in str(error.value)
