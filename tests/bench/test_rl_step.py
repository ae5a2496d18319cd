"""`nonet bench rl_step`: what is compared, how turns are taken, and a step of either side at toy size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nonet.bench import rl_step
from nonet.bench.rl_step_worker import check, prepare
from nonet.bench.turns import Turn, Worker, WorkerFailed, interleave
from nonet.bench.workload import Workload, hash_reward, read_prompts
from nonet.types import UserError

TOY = Workload(prompts=2, samples=2, new_tokens=5, threads=1)


def test_without_the_peer_venv_one_sentence_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(rl_step, "ROOT", tmp_path)
    with pytest.raises(UserError) as caught:
        rl_step.measure(TOY)
    assert str(caught.value) == "bench rl_step: needs the TRL venv; run `make peers`"


# ------------------------------------------------------------------------------- figures


def turn(seconds: float, other_cpu_s: float = 0.0) -> Turn:
    return Turn(seconds, {"generation_s": seconds * 0.75, "update_s": seconds * 0.25}, other_cpu_s)


def test_speedup_is_the_median_of_ratios_within_pairs():
    taken = [(turn(1.0), turn(2.0)), (turn(10.0), turn(30.0)), (turn(1.0), turn(8.0))]
    out = rl_step.figures(taken, our_bytes=300e6, trl_bytes=600e6)
    assert list(out)[:2] == ["speedup", "memory_ratio"]
    assert (out["speedup"], out["memory_ratio"], out["pairs"]) == (3.0, 0.5, 3)
    assert out["speedup_range"] == [2.0, 8.0]
    assert out["seconds"] == {"ours": 1.0, "trl": 8.0}
    assert out["generation_s"] == {"ours": 0.75, "trl": 6.0}
    assert out["update_s"] == {"ours": 0.25, "trl": 2.0}
    assert out["peak_mb"] == {"ours": 300.0, "trl": 600.0}


def test_the_share_of_a_core_that_the_waiting_side_used_is_reported():
    taken = [(turn(2.0, other_cpu_s=1.0), turn(2.0, other_cpu_s=0.0))]
    assert rl_step.figures(taken, 1, 1)["blocked_cpu"] == 0.25


# ------------------------------------------------------------------------------- workload


def test_both_sides_load_the_same_small_llama_and_prompts_of_one_length(tmp_path):
    prepare(TOY, tmp_path)
    prompts = read_prompts(tmp_path)
    assert len({len(p.ids) for p in prompts}) == 1
    assert len({p.question for p in prompts}) == len(prompts) == 64
    assert prompts[0].text == prompts[0].question + "<|end|><|assistant|>"
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_rewards_are_seeded_and_differ_between_texts():
    values = [hash_reward(f"text {i}", seed=3) for i in range(100)]
    assert len(set(values)) == 100
    assert all(0 <= v < 1 for v in values)
    assert hash_reward("text 7", seed=3) == values[7] != hash_reward("text 7", seed=4)


def test_a_step_that_did_less_than_stated_voids_the_comparison():
    check(sampled=20, trained=20, work=TOY)
    with pytest.raises(AssertionError, match="20 tokens sampled, 15 trained; needs 20"):
        check(sampled=20, trained=15, work=TOY)


# ------------------------------------------------------------------------------- turns

ECHO = """
from nonet.bench.turns import Turns
turns = Turns()
print("chatter")
turns.ready(name="{name}")
while turns.wait():
    open("{log}", "a").write("{name}")
    {work}
    turns.step(generation_s=1.0, update_s=2.0)
turns.done()
"""


def echo(name: str, log: Path, work: str = "pass") -> Worker:
    return Worker(name, [sys.executable, "-c", ECHO.format(name=name, log=log, work=work)], {})


def test_steps_alternate_and_warm_up_is_not_reported(tmp_path):
    log = tmp_path / "log"
    with echo("A", log) as a, echo("B", log) as b:
        assert (a.facts["name"], b.facts["name"]) == ("A", "B")
        taken = list(interleave(a, b, warmup=2, pairs=3, at_least=1, limit_s=60))
        assert a.stop()["peak_bytes"] > 1e6
    assert log.read_text() == "ABBAABBAAB"
    assert len(taken) == 3
    assert taken[0][0].figures == {"generation_s": 1.0, "update_s": 2.0}


def test_past_the_time_limit_only_the_least_number_of_pairs_is_taken(tmp_path):
    log = tmp_path / "log"
    with echo("A", log) as a, echo("B", log) as b:
        assert len(list(interleave(a, b, warmup=1, pairs=50, at_least=2, limit_s=0))) == 2


def test_the_side_that_waits_uses_no_cpu(tmp_path):
    log = tmp_path / "log"
    with echo("A", log, "import time; time.sleep(0.3)") as a, echo("B", log) as b:
        (pair,) = interleave(a, b, warmup=0, pairs=1, at_least=1, limit_s=60)
    assert pair[0].seconds >= 0.3
    assert pair[0].other_cpu_s <= 0.02


@pytest.mark.parametrize(
    ("work", "status", "words"),
    [("raise SystemError('out of luck')", 1, "out of luck"), ("raise SystemExit(3)", 3, "")],
)
def test_a_worker_that_dies_says_why(work, status, words, tmp_path):
    log = tmp_path / "log"
    with echo("A", log, work) as a, echo("B", log) as b, pytest.raises(WorkerFailed) as caught:
        a.step(b)
    assert str(caught.value).startswith(f"the A worker ended with status {status}: ")
    assert words in str(caught.value)


def test_no_worker_outlives_the_bench(tmp_path):
    with echo("A", tmp_path / "log") as a:
        process = a._process
    assert process.poll() is not None


# ------------------------------------------------------------------------------- a real step of either side


def test_our_side_takes_a_step(tmp_path):
    TOY.write(tmp_path)
    with rl_step.ours(tmp_path, TOY) as us, echo("B", tmp_path / "log") as other:
        assert us.facts == {"threads": 1, "parameters": 919_424}
        one = us.step(other)
        assert 0 < one.figures["generation_s"] + one.figures["update_s"] <= one.seconds
        assert us.stop()["peak_bytes"] > 1e8
    assert len((tmp_path / "run" / "events.jsonl").read_text().splitlines()) == 2


def test_trl_takes_a_step_of_the_same_work(tmp_path):
    if not (rl_step.ROOT / ".peers" / "trl" / "bin" / "python").exists():
        pytest.skip("needs .peers/trl; run `make peers`")
    TOY.write(tmp_path)
    prepare(TOY, tmp_path)
    with rl_step.trl(rl_step.peer_python("trl"), tmp_path, TOY) as them, echo("B", tmp_path / "log") as other:
        assert (them.facts["threads"], them.facts["parameters"]) == (1, 919_424)
        assert them.facts["versions"]["trl"] == "1.16.0"
        one = them.step(other)
        assert 0 < one.figures["generation_s"] + one.figures["update_s"] <= one.seconds
        assert them.stop()["peak_bytes"] > 1e8


def test_the_controller_stays_small():
    """A worker's peak starts at its parent's size on Linux, so the parent may not load torch."""
    code = "import sys, nonet.bench.rl_step; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
