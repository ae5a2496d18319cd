"""The target's own answers: every turn replaced, ids kept, one record for each conversation whatever happens."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from answers_job import chats

from nonet.chat import Tokenizer
from nonet.draft.answers import AnswersConfig, loops, read_answers, summary, write_answers
from nonet.draft.data import conversation
from nonet.draft.speech import Speech
from nonet.engine import Engine
from nonet.model import hf
from nonet.types import Message, Text, ToolCall, ToolResult, UserError

# Shows reasoning in the last turn only.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = AnswersConfig(max_tokens=24, batch=4)


def with_template(tokenizer: Tokenizer, template: str, out: Path) -> Tokenizer:
    shutil.copytree(tokenizer.directory, out)
    file = out / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return Tokenizer(out)


def answered(tokenizer: Tokenizer, conversations, turns, file: Path, config: AnswersConfig = CONFIG):
    """turns(id, n): the text of a request's answer."""
    end = tokenizer.stop_ids[0]

    def ids(name: str, n: int) -> list[int]:
        return [*tokenizer.encode(turns(name, n)), end]

    return write_answers(tiny.Scripted(ids), tokenizer, conversations, file, config, "target")


def test_every_assistant_turn_is_replaced_in_order(nano, tmp_path):
    said = {}

    def turn(name: str, n: int) -> str:
        said[name] = f"{len(name)} hello {name[-1]}"
        return said[name]

    got = answered(nano, chats(3), turn, tmp_path / "a.jsonl", AnswersConfig(max_tokens=200))
    for talk, a in zip(chats(3), got, strict=True):
        assert (a.turns, a.asked, a.stop, len(a.rows)) == (2, 2, "done", 1)
        text = nano.decode(a.rows[0].tokens)
        assert "OLD ANSWER" not in text
        assert text.count("<|assistant|>") == 2
        begin, end = a.rows[0].policy[1]
        assert nano.decode(a.rows[0].tokens[begin:end]) == said[f"{talk.id}/1"] + "<|end|>"


def test_trained_ids_are_the_sampled_ids(nano, tmp_path):
    """Two tokens where the tokenizer would write one: encoding the text again would lose them."""
    ids = [*nano.encode("hel"), *nano.encode("lo"), nano.stop_ids[0]]
    assert ids[:-1] != nano.encode("hello")
    engine = tiny.Scripted(lambda name, n: ids)
    got = write_answers(engine, nano, chats(1), tmp_path / "a.jsonl", CONFIG, "target")[0]
    assert len(got.rows) == 1
    assert [list(got.rows[0].tokens[a:b]) for a, b in got.rows[0].policy] == [ids, ids]


def test_the_mask_needs_no_generation_tags_and_covers_the_end_token(nano, tmp_path):
    assert "{% generation %}" not in (nano.template or "")
    got = answered(nano, chats(1, 1), lambda name, n: "yes", tmp_path / "a.jsonl")[0]
    ((begin, end),) = got.rows[0].policy
    assert begin == len(nano.prompt([{"role": "user", "content": "add 0 0"}]))
    assert got.rows[0].tokens[end - 1] in nano.stop_ids


def test_a_conversation_that_ends_with_the_user_is_answered(nano, tmp_path):
    talk = conversation([Message.user("one"), Message.assistant("x"), Message.user("two")])
    got = answered(nano, [talk], lambda name, n: "fine", tmp_path / "a.jsonl")[0]
    assert (got.turns, got.asked, got.stop) == (2, 2, "done")


def test_reasoning_is_kept_for_the_template_and_in_the_ids(nano, tmp_path):
    """A template that shows reasoning in the last turn only: the second turn is a row of its own, without it."""
    tokenizer = with_template(nano, THINKS, tmp_path / "t")
    assert (Speech.of(tokenizer).open, Speech.of(tokenizer).close) == ("<think>", "</think>")
    talk = chats(1)[0]
    end = tokenizer.stop_ids[0]
    reply = [*tokenizer.encode("<think>\nwhy\n</think>\n\nso"), end]
    engine = tiny.Scripted(lambda name, n: reply)
    got = write_answers(engine, tokenizer, [talk], tmp_path / "a.jsonl", AnswersConfig(max_tokens=99), "target")[0]
    assert len(got.rows) == 2 and got.turns == 2
    texts = [tokenizer.decode(r.tokens) for r in got.rows]
    assert "why" in texts[0]
    assert texts[1].count("why") == 1 and "<|assistant|>so<|end|>" in texts[1]
    assert Speech.of(tokenizer).read("<think>\nwhy\n</think>\n\nso") == Message.assistant("so", "why")


def test_reasoning_that_the_prompt_opened_is_recognised():
    speech = Speech("<think>", "</think>", None)
    assert speech.read("why\n</think>\n\nso", "<|assistant|><think>\n") == Message.assistant("so", "why")
    assert speech.read("just so", "<|assistant|>") == Message.assistant("just so")


def test_tool_results_answer_the_same_calls_and_end_the_talk_otherwise(nano, tmp_path):
    tokenizer = with_template(nano, TOOLS, tmp_path / "t")
    call = Message("assistant", (ToolCall("add", {"a": 1}, "c1"),))
    talk = conversation(
        [Message.user("1+1"), call, Message("tool", (ToolResult("2", call="c1"),)), Message.assistant("it is 2")]
    )
    calls = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
    config = AnswersConfig(max_tokens=200)
    same = answered(tokenizer, [talk], lambda n, _: calls if n[-1] == "0" else "two", tmp_path / "a.jsonl", config)[0]
    assert (same.turns, same.asked, same.stop) == (2, 2, "done")
    assert '"a": 7' in tokenizer.decode(same.rows[0].tokens)
    other = answered(tokenizer, [talk], lambda n, _: "no call", tmp_path / "b.jsonl", config)[0]
    assert (other.turns, other.asked, other.stop) == (1, 2, "calls")


def test_loops_are_marked_and_counted(nano, tmp_path):
    assert loops([*range(100), *([7] * 49)]) and not loops([*range(100), *([7] * 48)])
    assert loops(list(range(40)) * 4) and not loops(list(range(40)) * 3)
    loop = [5, 6, 7] * 40
    engine = tiny.Scripted(lambda name, n: loop)
    got = write_answers(engine, nano, chats(2), tmp_path / "a.jsonl", AnswersConfig(max_tokens=90), "target")
    assert [a.stop for a in got] == ["loop", "loop"] and got[0].looping
    assert summary(got)["stops"]["loop"] == 1.0
    assert summary(got)["turns"] == 2 and summary(got)["turns_asked"] == 4


def test_a_prompt_longer_than_the_context_is_recorded_and_said(nano, tmp_path):
    engine = tiny.Scripted(lambda name, n: [5] * 9)
    engine.context = 12
    got = write_answers(engine, nano, chats(1), tmp_path / "a.jsonl", AnswersConfig(max_tokens=4), "target")[0]
    assert got.stop == "context"
    assert all(len(r.tokens) <= 12 for r in got.rows)


def test_another_target_or_temperature_is_refused(nano, tmp_path):
    file = tmp_path / "a.jsonl"
    answered(nano, chats(1), lambda n, _: "a", file)
    with pytest.raises(UserError, match=r"temperature: 1.0 -> 0.5"):
        answered(nano, chats(1), lambda n, _: "a", file, AnswersConfig(max_tokens=24, temperature=0.5))
    answered(nano, chats(1), lambda n, _: "a", file, AnswersConfig(max_tokens=24, batch=9))  # only a speed


def test_a_torn_line_is_cut_and_nothing_is_answered_twice(nano, tmp_path):
    file = tmp_path / "a.jsonl"
    first = answered(nano, chats(4), lambda n, _: "a", file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    asked = []

    def turn(name: str, n: int) -> str:
        asked.append(name.rpartition("/")[0])
        return "a"

    again = answered(nano, chats(4), turn, file)
    assert again == first
    assert len(set(asked)) == 2
    ids = [json.loads(line)["id"] for line in file.read_bytes().splitlines()[1:]]
    assert sorted(ids) == sorted({c.id for c in chats(4)})


def test_what_was_answered_with_others_was_answered_alone(policy_directory, tmp_path):
    """Through the real engine: batch-mates, batch size and an interruption change nothing."""
    model, tokenizer = hf.load(policy_directory), Tokenizer(policy_directory)

    def run(name: str, conversations, batch: int):
        engine = Engine(model, max_batch=batch)
        return write_answers(
            engine, tokenizer, conversations, tmp_path / name, AnswersConfig(max_tokens=16, batch=batch), "t"
        )

    together = run("a.jsonl", chats(5), 8)
    assert together == [run(f"{i}.jsonl", [c], 1)[0] for i, c in enumerate(chats(5))]
    run("b.jsonl", chats(5)[:2], 2)
    assert run("b.jsonl", chats(5), 3) == together


JOB = Path(__file__).parent / "answers_job.py"


def test_kill_9_loses_and_repeats_nothing(policy_directory, tmp_path):
    def start(file: Path) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, str(JOB), str(policy_directory), str(file)], env=dict(os.environ))

    file, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    job = start(file)
    while job.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < 6):
        pass
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert 6 <= file.read_bytes().count(b"\n") < 41
    assert start(file).wait() == 0
    assert start(whole).wait() == 0
    killed, clean = (sorted(read_answers(f)[1], key=lambda a: a.id) for f in (file, whole))
    assert killed == clean
    assert len(killed) == 40


def test_a_file_in_use_is_refused(nano, tmp_path):
    file = tmp_path / "a.jsonl"
    job = [
        sys.executable,
        "-c",
        "import fcntl,sys,time; f=open(sys.argv[1],'ab'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)",
    ]
    with subprocess.Popen([*job, str(file)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(UserError, match="another process is writing it"):
            answered(nano, chats(1), lambda n, _: "a", file)
        holder.kill()


def test_text_parts_are_read_without_a_call_syntax():
    assert Speech("", "", None).read("plain") == Message("assistant", (Text("plain"),))
