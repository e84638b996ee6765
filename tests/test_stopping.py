"""engine/stopping.py: cut exactly before a stop string, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stopping import StopStrings


def run(stops, pieces) -> tuple[list[str], str | None]:
    """What comes out for each piece, and at the end; and the stop string that was met."""
    matcher = StopStrings(stops)
    out = [matcher.push(piece) for piece in pieces]
    if matcher.found is None:
        out.append(matcher.flush())
    return out, matcher.found


def twin(text: str, stops) -> tuple[str, str | None]:
    """Character by character: the text before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "wanted"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"], "ABC"),
        (["DEF"], ["DEF"], ""),
        (["stop"], ["non", "stop!"], "non"),
        (["ab", "b"], ["a", "b"], ""),
        (["abc", "b"], ["ab", "c"], "a"),
        (["aab"], ["aa", "ab"], "a"),
        (["é漢"], ["x\u00e9", "漢y"], "x"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb"),
    ],
)
def test_cut_before_the_stop(stops, pieces, wanted):
    """The beginning of a stop streamed before the rest came; text before it lost, or after kept."""
    out, found = run(stops, pieces)
    assert "".join(out) == wanted and found in stops


def test_only_what_can_become_a_stop_is_held_back():
    """Text that comes late, or a whole answer held until its end."""
    out, found = run(["</s>", "END"], ["a", "<", "b", "</", "x", "E", "N"])
    assert out == ["a", "", "<b", "", "</x", "", "", "EN"] and found is None


def test_without_stops_nothing_is_held():
    """A stream that stutters although nobody asked for a stop."""
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_after_a_stop_nothing_comes():
    """Text behind the stop that was still on its way."""
    matcher = StopStrings(["x"])
    assert matcher.push("axb") == "a" and matcher.push("c") == "" and matcher.flush() == ""


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab<é", max_size=5), max_size=8),
)
def test_pieces_do_not_matter(stops, pieces):
    """A stop missed, or cut elsewhere, because it lay across pieces."""
    out, found = run(stops, pieces)
    assert ("".join(out), found) == twin("".join(pieces), stops)
    for i in range(len(out)):  # and at no time more than the final text
        assert twin("".join(pieces), stops)[0].startswith("".join(out[: i + 1]))
