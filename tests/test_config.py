"""Recipes: merging, overrides, and mistakes that come back as one sentence with the nearest key."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nonet.config import Config, build, merge, read
from nonet.types import UserError


class Inner(Config):
    warmup: int = 3
    rate: float = 0.5


class Outer(Config):
    fraction: float = 0.5
    name: str = ""
    sizes: tuple[int, ...] = ()
    inner: Inner = Inner()
    maybe: Inner | None = None


def refusal(values: dict, where: str = "") -> str:
    with pytest.raises(UserError) as caught:
        build(Outer, values, where)
    return str(caught.value)


def test_an_unknown_key_names_the_nearest_one():
    assert refusal({"fractoin": 1}) == "fractoin: unknown key; did you mean fraction?"
    assert refusal({"fractoin": 1}, "rl") == "rl.fractoin: unknown key; did you mean rl.fraction?"
    assert refusal({"inner": {"wramup": 1}}) == "inner.wramup: unknown key; did you mean inner.warmup?"
    assert refusal({"inner": {"wramup": 1}}, "rl") == "rl.inner.wramup: unknown key; did you mean rl.inner.warmup?"


def test_a_table_that_may_be_absent_knows_its_keys_too():
    """[cold] and model.rope are optional tables."""
    assert refusal({"maybe": {"wramup": 1}}) == "maybe.wramup: unknown key; did you mean maybe.warmup?"


def test_a_wrong_value_is_a_sentence_with_field_and_value():
    assert refusal({"fraction": "most"}).startswith("fraction = 'most': ")
    assert refusal({"inner": {"warmup": 1.5}}, "rl").startswith("rl.inner.warmup = 1.5: ")
    assert "\n" not in refusal({"sizes": ["a"]})


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Outer().fraction = 0.1  # type: ignore[misc]


def files(tmp_path, *texts: str):
    out = []
    for i, text in enumerate(texts):
        out.append(tmp_path / f"{i}.toml")
        out[-1].write_text(text)
    return out


def test_files_merge_left_to_right_table_by_table(tmp_path):
    left = "a = 1\n[rl]\nfraction = 0.5\nsizes = [1, 2]\n[rl.deep]\nx = 1\ny = 2"
    right = "b = 2\n[rl]\nsizes = [3]\n[rl.deep]\ny = 3"
    assert read(files(tmp_path, left, right)) == {
        "a": 1, "b": 2, "rl": {"fraction": 0.5, "sizes": [3], "deep": {"x": 1, "y": 3}},
    }  # fmt: skip


def test_set_overrides_files_and_earlier_sets(tmp_path):
    merged = read(files(tmp_path, "[rl]\nfraction = 0.5\nlr = 1"), ["rl.fraction=0.6", "rl.fraction=0.7"])
    assert merged == {"rl": {"fraction": 0.7, "lr": 1}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.6", 0.6), ("3", 3), ("true", True), ("1e-4", 1e-4), ("terse", "terse"), ('"7"', "7"), ("", ""),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}), ("a=b", "a=b"), ("general,agents", "general,agents"), ('["low", "max"]', ["low", "max"]),
    ],
)  # fmt: skip
def test_set_values_are_toml_and_bare_words_are_strings(text, value):
    assert read([], [f"rl.key={text}"]) == {"rl": {"key": value}}


def test_set_reaches_any_depth():
    assert read([], ["a.b.c.d=1", "a.b.e=2"]) == {"a": {"b": {"c": {"d": 1}, "e": 2}}}


@pytest.mark.parametrize("text", ["rl.fraction", "=3", " =3", ""])
def test_a_set_without_key_or_value_is_refused(text):
    with pytest.raises(UserError, match=f"^--set {text}: write it as room.key=value$"):
        read([], [text])


def test_missing_and_broken_files_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"recipe .*none\.toml: no such file"):
        read([tmp_path / "none.toml"])
    (broken,) = files(tmp_path, "a = = 1")
    with pytest.raises(UserError, match=r"recipe .*0\.toml: "):
        read([broken])


tables = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.integers(0, 3) | inner, max_size=3),
    max_leaves=6,
)


@given(tables, tables, tables)
def test_merging_keeps_its_arguments_and_the_right_wins(a, b, c):
    before = copy.deepcopy((a, b))
    assert merge(merge(a, b), c) == merge(a, merge(b, c)) or any_clash(a, b, c)
    assert (a, b) == before
    assert merge(a, {}) == merge({}, a) == a
    for key, value in b.items():
        if not isinstance(value, dict):
            assert merge(a, b)[key] == value


def any_clash(*tables: dict) -> bool:
    """Merging is associative unless some key is a table in one place and a value in another."""
    for key in {k for t in tables for k in t}:
        found = [t[key] for t in tables if key in t]
        kinds = {isinstance(v, dict) for v in found}
        if len(kinds) > 1 or (kinds == {True} and any_clash(*found)):
            return True
    return False
