"""Staleness, effort, experts into one, and what the reader says of a token: by arithmetic, and from real writers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from nonet.report import levels, staleness
from nonet.report.read import read_run
from nonet.rl import RLConfig
from nonet.rl.budgets import Budgets, Measured
from nonet.rl.effort import EffortConfig, budgeted
from nonet.rl.retention import Played, retention, separation
from nonet.run import Run

sys.path.insert(0, str(Path(__file__).parent))
from fake_run import write_run
from test_report import check


def spoken(panel: Any) -> str:
    """What the chart says to those who cannot see it."""
    return panel.chart.split('aria-label="')[1].split('"')[0]


def log(tmp_path: Path, *events: dict[str, Any]) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return tmp_path


# ---------------------------------------------------------------- staleness


def age(n: int, tokens: int, **over: float) -> dict[str, float]:
    return {"age": n, "tokens": tokens, "ratio_p05": 0.9, "ratio_p50": 1.0, "ratio_p95": 1.1, "clipped": 0.0,
            "grad_share": 1.0, **over}  # fmt: skip


def test_ages_are_weighted_by_tokens_and_gradients_by_the_steps_size():
    steps: list[dict[str, Any]] = [
        {"step": 1, "ages": [age(0, 300, clipped=0.1, ratio_p95=1.4)]},
        {"step": 2, "ages": [age(0, 100, clipped=0.5, grad_share=0.75), age(1, 100, grad_share=0.25, ratio_p50=0.5)]},
    ]
    ratios, clipped, pulls = staleness.age_panels(steps)
    assert "age 0: 0.900, 1.000, 1.325" in spoken(ratios)  # (300 * 1.4 + 100 * 1.1) / 400
    assert "age 1: 0.900, 0.500, 1.100" in spoken(ratios)
    assert "age 0: 20%; age 1: 0%" in spoken(clipped)
    # 400 of 500 tokens; gradient (300 * 1 + 200 * 0.75) / 500
    assert "age 0: 80.0% of tokens, 90.0% of gradient; age 1: 20.0% of tokens, 10.0% of gradient" in spoken(pulls)


def test_old_ages_are_pooled_and_a_run_of_one_age_is_still_shown():
    many = [{"step": 1, "ages": [age(n, 10, grad_share=1 / 14) for n in range(14)]}]
    assert "age 10+: 28.6% of tokens" in spoken(staleness.age_panels(many)[2])
    assert "age 0: 0.900, 1.000, 1.100" in spoken(staleness.age_panels([{"step": 1, "ages": [age(0, 5)]}])[0])
    assert staleness.age_panels([{"step": 1}, {"step": 2, "ages": "none"}, {"step": 3, "ages": [7, {"age": -1}]}]) == []


def test_the_bias_monitor_sets_shares_of_the_sampled_beside_shares_of_the_trained():
    sampled = {"length": {"8": 10, "128": 10}, "domain": {"agents": 12, "coding": 8}}
    steps: list[dict[str, Any]] = [
        {"step": 1, "sampled": sampled, "trained": {"length": {"8": 8}, "domain": {"agents": 6, "coding": 4}}},
        {"step": 2, "sampled": sampled, "trained": {"length": {"128": 2}, "domain": {}}},
    ]
    length, domain = staleness.bias_panels(steps)
    assert (length.title, domain.title) == ("By length", "By domain")
    assert spoken(length).endswith("8: 50.0% of sampled, 80.0% of trained; 128: 50.0% of sampled, 20.0% of trained")
    assert length.note == "Largest difference at 8: 50.0% of 40 sampled, 80.0% of 10 trained."
    assert "agents: 60.0% of sampled, 60.0% of trained" in spoken(domain)


# ------------------------------------------------------------------- levels


def test_a_limit_is_drawn_for_levels_that_have_one_and_shares_only_for_them():
    row = {"domain": "general", "tokens": 9.0, "task_reward": 0.5, "over": 0.25, "trapped": 0.0}
    steps = [
        {"step": s, "effort": [{**row, "effort": "max", "limit": None}, {**row, "effort": "low", "limit": 20.0 / s}]}
        for s in (1, 2, 3)
    ]
    tokens, reward, over = levels.effort_panels(steps)
    assert [name for _, name in tokens.legend] == ["low", "max"]
    assert tokens.chart.count("dashed") == 1
    assert "dashed" not in reward.chart
    assert "general low" in spoken(over) and "general max" not in spoken(over)


def test_wholly_over_budget_is_drawn_where_it_happened():
    def trapped(share: float) -> list[str]:
        row = {"domain": "general", "effort": "low", "trapped": share}
        return [p.title for p in levels.effort_panels([{"step": s, "effort": [row]} for s in (1, 2)])]

    assert trapped(0.0) == []
    assert trapped(0.2) == ["Groups wholly over budget"]


def test_the_last_warning_of_each_cell_is_shown_with_how_often():
    steps = [{"step": s, "effort_warnings": [f"a:low: in {s} of 9 groups", 3]} for s in (1, 2)] + [{"step": 3}]
    assert levels.effort_warnings(steps) == ["a:low: in 2 of 9 groups (so in 2 of 3 steps)."]


def scores(*values: float) -> dict[str, float]:
    return {f"t{i}": v for i, v in enumerate(values)}


def test_the_retention_table_shows_what_was_measured(tmp_path: Path):
    cold, expert, merged = scores(0, 0, 0, 0), scores(1, 1, 1, 0), scores(1, 0, 1, 0)
    weak = scores(0, 1, 0, 0), scores(0, 0, 0, 0), scores(0, 0, 0, 0)
    found, mean = retention({("general", "low"): (cold, expert, merged), ("general", "max"): weak})
    assert mean is None
    played = {
        ("general", e): Played(merged, scores(*lengths))
        for e, lengths in (("low", (4, 5, 4, 5)), ("max", (40, 41, 42, 40)))
    }
    events: list[dict[str, Any]] = [
        {"kind": "retention", "domain": d, "effort": e, "mode": "sampled", **r.figures()} for (d, e), r in found.items()
    ]
    events += [
        {"kind": "cell", "model": "merged", "domain": d, "effort": e, "mode": "sampled", **p.figures()}
        for (d, e), p in played.items()
    ]
    events += [{"kind": "separation", "model": "merged", "mode": "sampled", **s} for s in separation(played)]
    (shown,) = levels.kept(read_run(log(tmp_path, *events)))
    assert shown.levels == ["low", "max"]
    ((domain, (low, most)),) = shown.table
    assert (domain, low.share, low.means, low.tokens[2]) == ("general", "67%", ("0.000", "0.750", "0.500"), "4.5")
    assert (most.share, most.interval, most.means, most.clear) == ("", "", ("0.250", "0.000", "0.500"), False)
    assert shown.separated == [
        "general, merged model: low 4.5, max 40.8 tokens; the intervals do not overlap; low writes 11% of max."
    ]
    assert "kept" in check(tmp_path).ids


def test_a_negative_retention_has_a_true_minus_sign(tmp_path: Path):
    row = {"kind": "retention", "domain": "a", "effort": "low", "mode": "m", "retention": -0.2, "low": -0.4}
    (shown,) = levels.kept(read_run(log(tmp_path, row)))
    assert (shown.table[0][1][0].share, shown.table[0][1][0].interval) == ("−20%", "[−40%, ?]")


# --------------------------------------------------------------------- page


def test_a_made_up_run_has_the_sections_and_one_without_the_events_has_none(tmp_path: Path):
    page = check(write_run(tmp_path / "with", cold=12, steps=70, per_step=4))
    assert {"staleness", "effort", "kept"} <= set(page.ids)
    for words in ("Gradient by age", "By length", "coding: tokens by level", "Over budget", "Mean retention over the"):
        assert words in page.text
    lines = (tmp_path / "with" / "events.jsonl").read_text().splitlines()
    old = [{k: v for k, v in json.loads(x).items() if k not in ("ages", "sampled", "effort")} for x in lines]
    log(tmp_path, *(e for e in old if e["kind"] not in ("cell", "retention", "separation")))
    assert not {"staleness", "effort", "kept"} & set(check(tmp_path).ids)


def test_a_run_of_experts_is_read_with_them(tmp_path: Path):
    """Its own steps are the student's; gains of the experts are not the student's."""
    row = {"domain": "general", "tokens": 9.0, "over": 0.0, "limit": 20.0}
    for level in ("low", "max"):
        folder = tmp_path / "experts" / f"general-{level}"
        folder.mkdir(parents=True)
        steps = [
            {"kind": "rl_step", "step": s, "ages": [age(0, 50)], "effort": [{**row, "effort": level}]} for s in (1, 2)
        ]
        log(folder, *steps)
    (tmp_path / "resolved.json").write_text(json.dumps({"experts": {"lanes": 2}}))
    gain = {"kind": "gain", "domain": "general-low", "mode": "sampled", "low": 0.1, "high": 0.3}
    log(
        tmp_path,
        {"kind": "stage", "name": "experts", "status": "done", "seconds": 9.0},
        {**gain, "stage": "eval-expert", "gain": 0.25},
        {"kind": "rl_step", "step": 1, "reward": 0.5, "opd_kl": 0.2, "ages": [age(0, 100), age(1, 100)]},
    )
    page = check(tmp_path)
    assert "Held-out reward, before and after distillation" in page.text
    assert "+0.250" not in page.text
    assert "eval-cold, eval-expert, distill, eval-distill, draft, serve, sample" in page.text
    assert "this run and its 2 experts" in page.text
    assert "KL to the teachers" in page.text
    assert "general: tokens by level" in page.text
    with (tmp_path / "events.jsonl").open("a") as f:
        f.write(json.dumps({**gain, "stage": "eval-distill", "gain": 0.2}) + "\n")
    assert "+0.200" in check(tmp_path).text


def test_an_expert_has_a_page_of_its_own(tmp_path: Path):
    log(tmp_path, {"kind": "stage", "name": "expert", "status": "start"}, {"kind": "rl_step", "step": 1, "reward": 0.5})
    page = check(tmp_path)
    assert "not started: eval-expert" in page.text
    assert "No trajectories: the stage “expert” has started and has not recorded any yet." in page.text


@pytest.fixture(scope="module")
def played(_policy: Any, nano: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run, held to budgets."""
    import copy

    run = Run(tmp_path_factory.mktemp("real"))
    config = EffortConfig.model_validate({"multipliers": {"low": (1.0, 0.3)}, "anneal": 3})
    budgets = Budgets([Measured("agents.move/train/0", 24, 1.0), Measured("general.reverse/train/0", 4, 1.0)])
    rl = RLConfig(groups=4, samples=3, max_tokens=36, lr=1e-3, warmup=0, steps=5, temperature=1.2, fraction=0.6)
    setting = tiny.setting(nano, rewards={"varied": tiny.varied})
    budgeted(copy.deepcopy(_policy), setting, config, budgets, rl, run, seed=2).fit()
    return run


def test_a_real_run_fills_every_section_of_rl(played: Run):
    page = check(played.path)
    assert {"staleness", "effort"} <= set(page.ids)
    for words in ("Probability ratio by age", "By length", "By age", "By domain", "agents: tokens by level"):
        assert words in page.text


def test_the_reader_has_what_each_token_of_a_real_run_was_worth(played: Run):
    shown = json.loads(check(played.path).scripts[0])
    records = [
        json.loads(x) for f in sorted((played.path / "trajectories").iterdir()) for x in f.read_text().splitlines()
    ]
    assert {t["trained"] for t in shown} == {r["trained"] for r in records} >= {True}
    for record in records:
        for s in record["segments"]:
            assert ("advantage" in s) == (record["trained"] and s["author"] == "policy")
            assert len(s.get("advantage", s["logprobs"])) == len(s["logprobs"])
    by_name = {(r["step"], r["id"]): r for r in records}
    for t in shown:
        record = by_name[int(t["where"].split()[1]), t["id"]]
        assert dict(t["rewards"]) == pytest.approx(record["rewards"], abs=1e-4)
        for (author, _, _, *columns), s in zip(t["s"], record["segments"], strict=True):
            assert (len(columns) == 3) == (author == "m")
            if author == "m":
                assert columns[1] == (pytest.approx(s["advantage"][0], abs=1e-3) if t["trained"] else None)
