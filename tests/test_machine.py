"""The machine's limits, which a profile's speeds are compared to, and what the machine is."""

from pathlib import Path

import numpy as np
import pytest

from engine import machine
from engine.kernels.jit import cpu
from engine.machine import Arithmetic, ReadBandwidth, bounds, describe


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reading_reads_everything(threads, monkeypatch):
    """A rank's share left out or read twice, or bytes that were counted but not read: a bandwidth
    no memory has."""
    monkeypatch.setattr(machine, "SIZE", 16 << 20)
    memory = ReadBandwidth(threads)
    data = memory._data
    assert data.nbytes == machine.SIZE
    for at in (0, len(data) // 4, len(data) // 3, len(data) // 2, len(data) - 1):
        data[:], data[at] = 0, 1
        assert 1e8 < memory.measure() < 1e13
        assert memory._sums.sum() == 1, at


@pytest.mark.parametrize("kind", Arithmetic.KINDS)
def test_bounds(kind, monkeypatch):
    """The other kind's peak; the mean of three, which one interruption spoils, or the best, which
    nothing reaches; names that a profile does not look up."""
    monkeypatch.setattr(machine, "SIZE", 1 << 20)
    monkeypatch.setattr(machine, "PASSES", 10)
    rates = {"memory": [5.0, 1.0, 3.0], "f32": [50.0, 10.0, 20.0], "int8": [500.0, 100.0, 200.0]}
    one = dict.fromkeys(rates, 0)

    def next_of(name: str) -> float:
        one[name] += 1
        return rates[name][one[name] % 3]

    monkeypatch.setattr(ReadBandwidth, "measure", lambda self: next_of("memory"))
    monkeypatch.setattr(Arithmetic, "measure", lambda self, kind: next_of(kind))
    found = bounds(1, kind)
    assert found == {
        "bytes_per_second": 3.0,
        "operations_per_second": {"f32": 20.0, "int8": 200.0}[kind],
        "f32_operations_per_second": 20.0,
    }


@pytest.mark.parametrize("kind", Arithmetic.KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_operations_are_those_that_were_done(threads, kind, monkeypatch):
    """One rank's operations counted for all, or a product and its sum as one: a wrong peak."""
    monkeypatch.setattr(machine, "PASSES", 10)
    peak = Arithmetic(threads)
    out = peak._work[kind][1]
    out[:] = 0
    peak.measure(kind)
    n_results, products = np.count_nonzero(out), 10 * machine.COLUMNS
    assert peak._operations[kind] == 2 * n_results * products
    if kind == "f32":  # a sum of ones
        assert (out[out != 0] == products).all()


def test_what_the_machine_is():
    """A report that spans lines, or names no processor: figures that cannot be told apart."""
    found = describe()
    assert "\n" not in found and cpu()[0] in found
    assert not found.startswith(" (")


@pytest.mark.parametrize("info", [None, "processor\t: 0\nFeatures\t: fp asimd\n"])
def test_a_machine_without_a_model_name(info, monkeypatch):
    """Systems without /proc, and ARM's, whose /proc names no model: an error in place of a name."""
    monkeypatch.setattr(Path, "exists", lambda self: info is not None)
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: info)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert describe().startswith("aarch64 (")
