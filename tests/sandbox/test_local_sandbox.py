"""LocalSandbox: every tool, every mistake a policy can make, checkpoint and restore, and what cannot get out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nonet.protocols import Sandbox
from nonet.sandbox import TOOLS, LocalSandbox, tree
from nonet.sandbox.local import RESULT_LIMIT
from nonet.sandbox.workspace import base_directory
from nonet.types import SandboxRecipe, ToolCall, ToolResult, UserError

FILES = {"a": "fig", "b": "oak elm", "c/d": "1\n2"}
ALL = tuple(TOOLS)


@pytest.fixture
def box():
    with LocalSandbox(SandboxRecipe(FILES, ALL)) as sandbox:
        yield sandbox


def call(box: LocalSandbox, name: str, **arguments: object) -> ToolResult:
    return box.call(ToolCall(name, arguments))


def test_it_is_a_sandbox_and_offers_what_the_recipe_names_in_that_order():
    with LocalSandbox(SandboxRecipe({}, ("write_file", "read_file"))) as box:
        assert isinstance(box, Sandbox)
        assert [tool.name for tool in box.tools] == ["write_file", "read_file"]
        assert call(box, "list_files") == ToolResult("no tool 'list_files'; tools: write_file, read_file", error=True)


def test_each_tool_does_its_work(box: LocalSandbox):
    assert call(box, "list_files") == ToolResult("a\nb\nc/d")
    assert call(box, "read_file", path="c/d") == ToolResult("1\n2")
    assert call(box, "write_file", path="new/e", content="x") == ToolResult("ok")
    assert call(box, "append_file", path="new/e", content="y") == ToolResult("ok")
    assert call(box, "move_file", source="new/e", target="f") == ToolResult("ok")
    assert call(box, "delete_file", path="a") == ToolResult("ok")
    assert box.files() == {"b": "oak elm", "c/d": "1\n2", "f": "xy"}
    assert call(box, "run_python", code="print(open('f').read())") == ToolResult("xy")
    assert call(box, "run_python", code="open('g', 'w').write('z')") == ToolResult("ok")
    assert box.files()["g"] == "z"


def test_an_empty_sandbox_lists_no_files():
    with LocalSandbox(SandboxRecipe({}, ALL)) as box:
        assert call(box, "list_files").text == "no files"


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("fly", {}, "no tool 'fly'; tools: list_files, read_file"),
        ("read_file", {}, "read_file: missing argument 'path'"),
        ("read_file", {"path": 3}, "read_file: path must be a string"),
        ("read_file", {"path": "a", "mode": "r"}, "read_file: unknown argument 'mode'"),
        ("read_file", [], "read_file: arguments must be an object"),
        ("read_file", {"path": "zz"}, "read_file: no file zz"),
        ("read_file", {"path": "c"}, "read_file: c is a directory"),
        ("read_file", {"path": ""}, "read_file: the path is empty"),
        ("read_file", {"path": "/etc/passwd"}, "use a relative path"),
        ("read_file", {"path": "c/../../x"}, "'..' is not allowed"),
        ("read_file", {"path": "a\0b"}, "characters that are not allowed"),
        ("read_file", {"path": "x" * 300}, "longer than 200 bytes"),
        ("write_file", {"path": "a/b", "content": ""}, "a is a file, not a directory"),
        ("write_file", {"path": "c", "content": ""}, "write_file: is a directory"),
        ("write_file", {"path": "a", "content": "\ud800"}, "half a surrogate pair"),
        ("write_file", {"path": "\ud800", "content": ""}, "not allowed"),
        ("write_file", {"path": "a", "content": "x" * (tree.MAX_BYTES + 1)}, "the sandbox is full"),
        ("append_file", {"path": "zz", "content": ""}, "no file zz"),
        ("move_file", {"source": "a", "target": "b"}, "b already exists"),
        ("move_file", {"source": "a", "target": "a/b"}, "a is a file, not a directory"),
        ("move_file", {"source": "c", "target": "x"}, "c is a directory"),
        ("delete_file", {"path": "c"}, "c is a directory"),
        ("run_python", {"code": "1/0"}, "exit 1: ZeroDivisionError: division by zero"),
        ("run_python", {"code": "import sys; print('so far'); sys.exit(3)"}, "so far\nexit 3: no message"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(box: LocalSandbox, name: str, arguments, sentence: str):
    result = box.call(ToolCall(name, arguments))
    assert result.error
    assert sentence in result.text
    assert box.files() == FILES


def test_long_results_are_cut_and_say_so(box: LocalSandbox):
    call(box, "write_file", path="a", content="x" * 10_000)
    text = call(box, "read_file", path="a").text
    assert text.startswith("x" * RESULT_LIMIT + "\n")
    assert text.endswith(f"cut at {RESULT_LIMIT} of 10000 characters")
    assert "cut at" in call(box, "run_python", code="print('y' * 20000)").text


def test_the_sandbox_holds_a_limited_number_of_files():
    with LocalSandbox(SandboxRecipe({str(i): "" for i in range(tree.MAX_FILES)}, ALL)) as box:
        assert "full" in call(box, "write_file", path="more", content="").text
        assert call(box, "write_file", path="0", content="x").text == "ok"


@pytest.mark.parametrize(
    "files",
    [{"../x": ""}, {"/x": ""}, {"": ""}, {"a": "", "a/b": ""}, {"a": 3}, {"a": "\ud800"}, {"a": "x" * (2 << 20)}],
)
def test_a_recipe_that_cannot_be_laid_out_is_a_user_error(files):
    with pytest.raises(UserError, match="sandbox files"):
        LocalSandbox(SandboxRecipe(files))


def test_a_recipe_with_an_unknown_tool_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'read_file'"):
        LocalSandbox(SandboxRecipe({}, ("readfile",)))


def test_close_deletes_everything_and_may_be_repeated(box: LocalSandbox):
    root = Path(box._root)
    assert root.is_dir()
    box.close()
    box.close()
    assert not root.exists()


# -------------------------------------------------------------- programs


def test_a_program_leaves_files_but_no_links_pipes_or_odd_names(box: LocalSandbox):
    program = (
        "import os\nos.symlink('/etc/passwd', 'link'); os.symlink('/etc', 'dir')\n"
        "os.mkfifo('pipe'); os.mkdir('empty')\n"
        "open(b'\\xff', 'w').close(); open('new\\nline', 'w').close()\n"
        "open('ok', 'w').write('1'); os.chmod('ok', 0)\n"
        "os.makedirs('deep/er'); open('deep/er/x', 'w').write('2'); os.chmod('deep', 0)\n"
    )
    assert box.run_python(program).status == 0
    assert box.files() == {**FILES, "ok": "1", "deep/er/x": "2"}
    assert call(box, "write_file", path="empty", content="a file now").text == "ok"


@pytest.mark.parametrize("program", ["[open(str(i), 'w') for i in range(50)]", "open('a', 'w').write('x' * 10**6)"])
def test_a_program_that_overfills_the_sandbox_is_undone(box: LocalSandbox, program: str, monkeypatch):
    monkeypatch.setattr(tree, "MAX_FILES", 20)
    monkeypatch.setattr(tree, "MAX_BYTES", 1000)
    result = box.run_python(program)
    assert result.status == 1
    assert "changes undone" in result.stderr
    assert box.files() == FILES


def test_a_program_that_deletes_its_directory_leaves_a_working_sandbox(box: LocalSandbox):
    box.run_python("import shutil; shutil.rmtree('.', ignore_errors=True)")
    assert call(box, "write_file", path="a", content="x").text == "ok"
    assert box.files() == {"a": "x"}


def test_a_program_that_does_not_end_is_stopped(box: LocalSandbox, monkeypatch):
    monkeypatch.setattr("nonet.sandbox.local.PROGRAM_TIMEOUT_S", 0.2)
    result = call(box, "run_python", code="while True: pass")
    assert result == ToolResult("timed out after 0.2 s", error=True)


# ----------------------------------------------------- pause and resume

names = st.text("ab.-é ", min_size=1, max_size=4).filter(lambda n: n.strip(".") != "")
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
texts = st.text(max_size=20).filter(lambda t: t.isascii() or max(t) < "\ud800" or max(t) > "\udfff")


def writes() -> st.SearchStrategy[list[tuple[str, bytes]]]:
    return st.lists(st.tuples(paths, st.binary(max_size=20) | texts.map(lambda t: t.encode("utf-8", "replace"))))


@settings(max_examples=60, deadline=None)
@given(writes())
def test_restore_of_checkpoint_is_the_same_sandbox(steps):
    with LocalSandbox(SandboxRecipe({}, ALL)) as box:
        for path, content in steps:
            try:
                tree.write_file(box._root, tree.clean(path), content)
            except (tree.TreeError, OSError):
                continue
        snapshot = box.checkpoint()
        with LocalSandbox.restore(json.loads(json.dumps(snapshot))) as again:
            assert again.checkpoint() == snapshot
            assert again.files() == box.files()
            assert again.tools == box.tools
            assert tree.read(again._root) == tree.read(box._root)


calls = st.one_of(
    st.tuples(st.just("write_file"), st.fixed_dictionaries({"path": paths, "content": st.just("x")})),
    st.tuples(st.just("move_file"), st.fixed_dictionaries({"source": paths, "target": paths})),
    st.tuples(st.just("delete_file"), st.fixed_dictionaries({"path": paths})),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(calls, max_size=8), st.lists(calls, max_size=8))
def test_no_later_call_can_tell_a_restored_sandbox_from_the_original(before, after):
    with LocalSandbox(SandboxRecipe({"a": "1", "b/a": "2"}, ALL)) as box:
        for name, arguments in before:
            call(box, name, **arguments)
        with LocalSandbox.restore(box.checkpoint()) as again:
            for name, arguments in after:
                assert call(again, name, **arguments) == call(box, name, **arguments)
            assert again.checkpoint() == box.checkpoint()


# ------------------------------------------------------------- no way out

odd = st.sampled_from(["..", ".", "", "a", "link", "~", "\\", "\0", "%2e%2e", "etc"])
hostile = st.lists(odd, max_size=6).map("/".join)
anything = hostile | st.text(max_size=12) | hostile.map(lambda p: f"/{p}")


@settings(max_examples=200, deadline=None)
@given(anything, anything)
def test_no_path_reaches_outside(path, other):
    with tempfile.TemporaryDirectory(dir=base_directory()) as directory:
        outside = Path(directory)
        (outside / "secret").write_text("safe")
        with (
            mock.patch("nonet.sandbox.workspace.base_directory", lambda: directory),
            LocalSandbox(SandboxRecipe({"a": "in"}, ALL)) as box,
        ):
            Path(box._root, "link").symlink_to(outside)  # as if a program had left one
            for name, arguments in (
                ("read_file", {"path": path}),
                ("read_file", {"path": "link/secret"}),
                ("append_file", {"path": path, "content": "x"}),
                ("write_file", {"path": path, "content": "x"}),
                ("move_file", {"source": "a", "target": other}),
                ("delete_file", {"path": path}),
            ):
                assert "safe" not in call(box, name, **arguments).text
            assert {entry.name for entry in outside.iterdir()} == {"secret", Path(box._root).name}
            assert (outside / "secret").read_text() == "safe"
            assert all(tree.clean(found) == found for found in box.files())


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(ALL) | st.text(max_size=5),
    st.dictionaries(
        st.sampled_from(["path", "content", "source", "target", "code"]) | st.text(max_size=3),
        st.text(max_size=6) | st.none() | st.integers() | st.lists(st.integers(), max_size=2),
        max_size=3,
    ),
)
def test_no_call_raises(name, arguments):
    if "code" in arguments:
        return  # programs have tests of their own
    with LocalSandbox(SandboxRecipe({"a": "in"}, ALL)) as box:
        assert isinstance(box.call(ToolCall(name, arguments)), ToolResult)
