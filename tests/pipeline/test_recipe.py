"""Recipes: overlays, overrides, and mistakes caught before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from nonet.pipeline import load_recipe
from nonet.pipeline.check import print_check
from nonet.pipeline.drafting import Job
from nonet.types import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(p for p in RECIPES.glob("*.toml") if not p.name.endswith((".quick.toml", "-draft.toml")))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda p: p.stem)
def test_every_recipe_we_ship_loads_with_and_without_quick(file, policy_directory):
    """A real model that a recipe begins with is another package's; a small one stands for it."""
    starts = "model =" in file.read_text().partition("[start]")[2].partition("\n[")[0]
    whole = load_recipe([file], [f"start.model={policy_directory}"] if starts else [])
    if file.with_suffix(".quick.toml").exists():
        quick = load_recipe([file], quick=True)
        assert quick.rl.steps < whole.rl.steps


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*-draft.toml")), ids=lambda p: p.stem)
def test_every_recipe_for_nonet_draft_loads(file):
    assert Job.of(file, (), (), None, ()).recipe.draft.target


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


BASE = "[model]\nd_model = 32\nlayers = 2\nheads = 4\nd_ff = 48\n[rl]\nsteps = 9\nlr = 1e-4\n"


def test_files_quick_and_set_apply_in_that_order(tmp_path):
    base = write(tmp_path / "a.toml", BASE)
    over = write(tmp_path / "b.toml", "[rl]\nsteps = 8\ngroups = 5")
    write(tmp_path / "b.quick.toml", "[rl]\nsteps = 2\nsamples = 3")
    assert load_recipe([base, over]).rl.steps == 8
    quick = load_recipe([base, over], ["rl.samples=4"], quick=True)
    assert (quick.rl.steps, quick.rl.groups, quick.rl.samples, quick.rl.lr) == (2, 5, 4, 1e-4)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rl.fractoin=0.5", "rl.fractoin: unknown key; did you mean rl.fraction?"),
        ("cold.stepz=3", "cold.stepz: unknown key; did you mean cold.steps?"),
        ("rk.steps=3", "rk: unknown key; did you mean rl?"),
        ("model.d_modle=3", "model.d_modle: unknown key; did you mean model.d_model?"),
        ("rl.fraction=1.5", "rl.fraction = 1.5: "),
        ("rl.samples=1", "rl.samples = 1: "),
        ("rl.k25.ratio_low=1.2", "rl.k25.ratio_low = 1.2: Input should be less than 1"),
        ('tasks.efforts=["middling"]', "'middling' is not an effort; use low, high, max"),
        ("model.vocab_size=300", "model.vocab_size: is the tokenizer's; set start.vocab_size"),
        ("model.heads=5", "not a multiple"),
        ('model.mixers=["kda"]', "names 1 mixers for 2 layers"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(tmp_path, override, sentence):
    overrides = ['model.mixers=["gqa", "gqa"]', override]
    with pytest.raises(UserError) as caught:
        load_recipe([write(tmp_path / "a.toml", BASE)], overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_quick_without_an_overlay_says_where_it_should_lie(tmp_path):
    with pytest.raises(UserError, match=r"--quick: .*a\.quick\.toml does not exist"):
        load_recipe([write(tmp_path / "a.toml", BASE)], quick=True)


def test_a_table_that_does_nothing_is_named_with_its_brackets(capsys):
    recipe = load_recipe([RECIPES / "nano.toml"], ['tasks.efforts=["max"]'])
    assert recipe.effort is not None and recipe.limits is None
    print_check(recipe)
    assert "no effect: [effort]: no level of tasks.efforts = max is limited" in capsys.readouterr().out
    assert load_recipe([RECIPES / "nano.toml"]).limits is not None
