"""engine/kernels/team.py and the Team of engine/model.py: ranks that meet, and ranks that fail."""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from engine.kernels.team import (
    ARRIVED,
    BROKEN,
    DRAWN,
    FIRST,
    HELD,
    LINE,
    OWN,
    PASSED,
    Rank,
    barrier,
    break_team,
    draw,
    new_flags,
    share,
)
from engine.model import Team

RANKS = (1, 2, 3, 5)
LIMIT = 20  # seconds that nothing here takes, unless someone waits for ever


@numba.njit(nogil=True, error_model="numpy")
def meet(me, rounds, counts):
    """Each round a rank counts, and after the barrier looks at all others' counts.

    Returns how often another rank had not come as far, or had come further than it can.
    """
    early = 0
    for i in range(rounds):
        counts[me.rank * LINE] += 1
        barrier(me)
        for rank in range(me.ranks):
            early += counts[rank * LINE] != i + 1
        barrier(me)
    return early


@numba.njit(nogil=True, error_model="numpy")
def draw_all(me, sizes, counts):
    """Count, in this rank's row, what it draws of operations of so many things."""
    at = 0
    for n in sizes:
        i = draw(n, me)
        while i < n:
            counts[me.rank, at + i] += 1
            i = draw(n, me)
        at += n


@pytest.fixture(scope="module", autouse=True)
def compiled():
    meet(Rank(0, 1, new_flags(1)), 1, np.zeros(LINE, np.int64))
    draw_all(Rank(0, 1, new_flags(1)), np.array([1]), np.zeros((1, 1), np.int64))


@pytest.fixture
def team(request):
    """A Team; if a test leaves ranks waiting, they are released, so that the run can end."""
    team = Team(getattr(request, "param", 3))
    first = team.flags
    yield team
    for flags in (first, team.flags):
        break_team(flags)


def run(team: Team, function, *args) -> None:
    """team.run, from a thread of its own, so that a team that waits for ever fails the test."""
    raised = []

    def call():
        try:
            team.run(function, *args)
            raised.append(None)
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert raised, f"still waiting after {LIMIT} s"
    if raised[0]:
        raise raised[0]


def works(team: Team) -> bool:
    """Whether the ranks of the team meet: the last to come is waited for."""
    came, missed = [], []

    def late(me):
        time.sleep(0.02 * me.rank)
        came.append(me.rank)
        barrier(me)
        missed.append(len(came) < me.ranks)

    run(team, late)
    return len(missed) == team.ranks and not any(missed)


# ---------------------------------------------------------------- the barrier


@pytest.mark.parametrize("ranks", RANKS)
def test_no_rank_passes_early(ranks):
    """A barrier that a fast rank passes twice while a slow one is still in the round before; or
    over which the compiler moves a load or a store."""
    rounds = 300 if ranks > 2 else 20_000
    counts, flags = np.zeros(ranks * LINE, np.int64), new_flags(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        try:
            runs = [pool.submit(meet, Rank(i, ranks, flags), rounds, counts) for i in range(ranks)]
            assert [run.result(LIMIT) for run in runs] == [0] * ranks
        finally:
            break_team(flags)
    assert (counts[::LINE] == rounds).all()


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_broken_team_releases_all(ranks):
    """Ranks that spin for ever, and with them the server, after another one has failed."""
    flags = new_flags(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        waiting = [pool.submit(barrier, Rank(i, ranks, flags)) for i in range(ranks - 1)]
        try:
            time.sleep(0.05)
            assert not any(run.done() for run in waiting)
        finally:
            break_team(flags)
        for run in waiting:
            run.result(LIMIT)
        pool.submit(barrier, Rank(0, ranks, flags)).result(LIMIT)  # and from now on


def test_flags_keep_apart():
    """Two counters in one cache line, which makes every arrival a miss for who spins."""
    flags = new_flags(3)
    flags[BROKEN] = 1
    assert flags[0] == 0 and len(flags) == OWN + 3 * LINE
    owners = [[ARRIVED], [BROKEN], [DRAWN]]
    owners += [[OWN + rank * LINE + of for of in (PASSED, FIRST, HELD)] for rank in range(3)]
    for start in range(0, 64, 8):  # where in a line the array begins
        lines = [{(start + 8 * at) // 64 for at in places} for places in owners]
        assert sum(map(len, lines)) == len(set().union(*lines)), start


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("n", [0, 1, 2, 6, 7, 100])
def test_shares_cover_all_once(n, ranks):
    """Things that no rank takes, or two; shares that differ by more than one."""
    shares = [range(*share(n, Rank(rank, ranks, new_flags(ranks)))) for rank in range(ranks)]
    assert [i for own in shares for i in own] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


SIZES = np.array([3, 0, 1, 64, 1, 1, 0, 7, 1000, 2] * 40)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("at_once", [True, False])
def test_all_is_drawn_once(at_once, ranks):
    """A thing that no rank does, or two do; a ticket lost between two operations. Also where one
    rank comes when another is through with them all."""
    counts, flags = np.zeros((ranks, SIZES.sum()), np.int64), new_flags(ranks)
    with ThreadPoolExecutor(ranks if at_once else 1) as pool:
        runs = [pool.submit(draw_all, Rank(i, ranks, flags), SIZES, counts) for i in range(ranks)]
        for run in runs:
            run.result(LIMIT)
    assert (counts.sum(0) == 1).all()


# ---------------------------------------------------------------- a team


@pytest.mark.parametrize("team", RANKS, indirect=True)
def test_run(team):
    """A rank left out or run twice; arguments lost; a team that serves only once."""

    def note(me, seen, letter):
        seen.append((me.rank, letter))

    for _ in range(3):
        seen = []
        run(team, note, seen, "a")
        assert sorted(seen) == [(rank, "a") for rank in range(team.ranks)]
    assert works(team)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "team, bad", [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (5, 0), (5, 4)], indirect=["team"]
)
def test_a_rank_fails(team, bad, error):
    """A rank that fails before a barrier: others wait for ever, the error is lost, or the team
    stays broken, its barriers open, and every step after it computes garbage."""

    def fails(me):
        if me.rank == bad:
            raise error("on purpose")
        barrier(me)
        barrier(me)

    for _ in range(2):
        with pytest.raises(error, match="on purpose"):
            run(team, fails)
        assert works(team)


@pytest.mark.parametrize("bad", range(3))
def test_a_failed_run_has_ended(team, bad):
    """An error that reaches the caller while a slow rank still writes to the step's scratch."""
    ended = []

    def fails(me):
        if me.rank == bad:
            raise ValueError("on purpose")
        time.sleep(0.1 * (me.rank + 1))
        ended.append(me.rank)

    with pytest.raises(ValueError, match="on purpose"):
        run(team, fails)
    assert len(ended) == team.ranks - 1


def test_all_ranks_fail(team):
    """An error of a second rank that hides the first's, or is left for the next run."""

    def fails(me):
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        run(team, fails)
    assert works(team)


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to one thread there")
@pytest.mark.parametrize("busy", [0, 1])
def test_control_c(team, busy):
    """An interrupt, in rank 0's own work or while it waits for the others: it leaves a rank behind
    that works on in the scratch of the next step."""
    ended = []

    def slow(me):
        if me.rank == 0:
            time.sleep(0.3 * busy)
        else:
            time.sleep(0.6)
            ended.append(me.rank)

    here = threading.main_thread().ident
    interrupt = threading.Timer(0.15, signal.pthread_kill, [here, signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        team.run(slow)
        interrupt.join()
    assert sorted(ended) == [1, 2]
    assert works(team)


@pytest.mark.parametrize("team", [2, 3], indirect=True)
def test_control_c_while_ranks_start(team, monkeypatch):
    """A rank that was started, but is not known yet, goes on in arrays that its caller frees."""
    submit, ended = team._submit, []

    def interrupted(*args):
        submit(*args)
        raise KeyboardInterrupt

    def slow(me):
        time.sleep(0.2)
        ended.append(me.rank)

    with monkeypatch.context() as patch:
        patch.setattr(team, "_submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            team.run(slow)
    assert ended == [1]
    assert works(team)


def test_more_ranks_than_processors():
    """Ranks that spin for a time slice while the one they wait for has no processor: a barrier then
    takes 15 ms and more, where a twentieth is normal."""
    ranks, rounds, took = 5, 100, []

    def note_meeting(me, rounds, counts, early):
        early.append(meet(me, rounds, counts))

    for _ in range(3):
        team, counts, early = Team(ranks), np.zeros(ranks * LINE, np.int64), []
        start = time.perf_counter()
        run(team, note_meeting, rounds, counts, early)
        took.append(time.perf_counter() - start)
        assert early == [0] * ranks
    assert min(took) < 1


def test_a_thread_that_cannot_be_started(monkeypatch):
    """The task that waits for it joins a later step as one rank too many, which never ends."""
    team, real, starts = Team(5), threading.Thread.start, []

    def start(thread):
        starts.append(thread)
        if len(starts) == 3:
            raise RuntimeError("can't start new thread")
        real(thread)

    def meet(me):
        time.sleep(0.01)  # so that no thread is idle before the next is wanted
        barrier(me)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="refused one of 5 threads .*new thread"):
        team.run(meet)
    monkeypatch.undo()
    for _ in range(3):
        run(team, meet)
