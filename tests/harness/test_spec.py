"""Harness specs as files, and the system message they make."""

from __future__ import annotations

import pytest

from nonet.harness import load_spec
from nonet.harness.spec import system_text
from nonet.types import HarnessSpec, Tool, UserError

TOOL = Tool("look", "See things.", {"type": "object", "properties": {"at": {"type": "string"}}})


def test_presets_load_and_a_file_loads_like_one(tmp_path):
    assert load_spec("terse").name == "terse"
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ncall_open = "<c>"\nmax_turns = 3')
    assert load_spec(str(file)) == HarnessSpec("mine", call_open="<c>", max_turns=3)


def test_an_unknown_preset_or_key_names_what_there_is(tmp_path):
    with pytest.raises(UserError, match=r"harness = 'tersee': no such preset or file; presets are .*terse"):
        load_spec("tersee")
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ncall_opne = "<c>"')
    with pytest.raises(UserError, match=r"mine\.toml: call_opne: unknown key; did you mean call_open\?"):
        load_spec(str(file))


def test_the_system_text_fills_in_effort_and_tools():
    spec = HarnessSpec("s", system="Effort {effort}.{tools}", call_open="<c>", call_close="</c>")
    assert system_text(spec, "low", ()) == "Effort low."
    text = system_text(spec, "high", (TOOL,))
    for part in ("Effort high.", '<c>{"name": "...", "arguments": {...}}</c>', "- look ", '"at"', "See things."):
        assert part in text


def test_a_task_without_a_level_gets_no_effort_message():
    spec = HarnessSpec("s", system="{effort}{tools}", effort="Effort {effort}.")
    assert system_text(spec, "low", ()) == "Effort low."
    assert system_text(spec, "", ()) == ""
    assert system_text(spec, "", (TOOL,)) == system_text(spec, "low", (TOOL,)).removeprefix("Effort low.").strip()
    assert system_text(load_spec("plain"), "", ()) == system_text(load_spec("terse"), "", ()) == ""


def test_a_template_that_comes_out_empty_sends_no_system_message():
    assert system_text(HarnessSpec("s", system="{tools}"), "max", ()) == ""
    assert system_text(HarnessSpec("s", system=" \n"), "max", (TOOL,)) == ""
