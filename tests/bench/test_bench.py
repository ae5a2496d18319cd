"""`nonet bench`: found by file name, one line of JSON that says what it was measured on, and no headline from a busy
machine.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import nonet.bench as bench
from nonet.bench.machine import cpu_pressure, is_quiet, machine
from nonet.types import UserError

FIGURES = {"speedup": 2.5, "memory_ratio": 0.5, "seconds": {"ours": 1.0, "trl": 2.5}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench named "fake" that answers at once, on a machine as quiet as the test says."""
    module = SimpleNamespace(measure=lambda: {**FIGURES, "versions": {"trl": {"trl": "1.16.0"}}})
    monkeypatch.setitem(sys.modules, "nonet.bench.fake", module)
    monkeypatch.setattr(bench, "benches", lambda: {"fake": "answers at once"})
    monkeypatch.setattr(bench, "cpu_pressure", lambda: 1.0)


def test_the_list_names_every_bench_with_a_line_and_imports_none():
    code = (
        "import sys; from nonet.bench import run_bench; run_bench('list', False); "
        "assert not {'torch', 'nonet.bench.rl_step'} & set(sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    about = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert "TRL" in about["rl_step"]
    assert all(len(text) > 20 for text in about.values())
    assert not {"turns", "machine", "workload", "rl_step_worker"} & set(about)


def test_an_unknown_name_is_one_sentence_that_names_the_nearest():
    with pytest.raises(UserError) as caught:
        bench.run_bench("rl_stp", False)
    assert str(caught.value) == "bench 'rl_stp': no such bench; did you mean rl_step? `nonet bench list` names them"


@pytest.mark.usefixtures("fake")
def test_the_last_line_is_json_with_the_figures_and_what_they_were_taken_on(capsys):
    bench.run_bench("fake", True)
    line = capsys.readouterr().out.splitlines()[-1]
    record = json.loads(line)
    assert list(record)[:2] == ["speedup", "memory_ratio"]
    assert {key: record[key] for key in FIGURES} == FIGURES
    assert record["quiet"] is True
    assert record["cpu_pressure"] == {"before": 1.0, "after": 1.0}
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["python"].startswith("3.")
    assert set(record["versions"]) == {"python", "torch", "nonet", "trl"}
    assert socket.gethostname() not in line
    assert str(Path(bench.__file__).parents[2]) not in line


@pytest.mark.usefixtures("fake")
def test_the_table_shows_the_ratio_first(capsys):
    bench.run_bench("fake", False)
    verdict, first, *rest = capsys.readouterr().out.splitlines()
    assert verdict == "fake: quiet machine (cpu pressure before 1%, after 1%)"
    assert first.split() == ["speedup", "2.5"]
    assert any("ours 1, trl 2.5" in line for line in rest)


@pytest.mark.usefixtures("fake")
def test_a_busy_machine_gives_no_headline(capsys, monkeypatch):
    readings = iter([1.0, 5.0])
    monkeypatch.setattr(bench, "cpu_pressure", lambda: next(readings))
    bench.run_bench("fake", False)
    assert "NOT a headline: needs cpu pressure below 5%" in capsys.readouterr().out


def test_quiet_needs_every_reading_known_and_low():
    assert is_quiet(0.0, 4.99)
    assert not is_quiet(0.0, 5.0)
    assert not is_quiet(5.01, 0.0)
    assert not is_quiet(None, 0.0)


def test_the_machine_is_described_without_host_or_path():
    described = machine()
    assert set(described) == {"cpu", "cores"}
    assert socket.gethostname() not in str(described)
    assert cpu_pressure() is None or 0 <= (cpu_pressure() or 0) <= 100
