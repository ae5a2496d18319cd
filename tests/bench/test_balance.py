"""The balance bench: its router is as skewed as it says, and the quantile rule meets its target where others do not."""

from __future__ import annotations

from nonet.bench import balance


def test_the_first_batch_is_skewed_and_the_same_for_every_rule():
    found = {name: balance.curve(rule, 64, 4, 0) for name, rule in balance.RULES.items()}
    assert len({c[0] for c in found.values()}) == 1
    assert all(len(c) == balance.STEPS + 1 for c in found.values())
    assert found["none"][0] > 8 and found["none"][-1] > 8


def test_the_quantile_rule_meets_the_target_and_the_sign_rule_does_not():
    assert balance.curve(balance.RULES["quantile"], 64, 4, 1)[-1] <= balance.TARGET
    assert balance.curve(balance.RULES["sign_1e-3"], 64, 4, 1)[-1] > 10 * balance.TARGET
