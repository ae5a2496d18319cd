"""A sandbox on a real temporary directory: file tools, a Python runner, checkpoint and restore.

Invariant: `call` returns a ToolResult for every call a policy can write, never an exception; no tool reads or writes
outside the directory; `restore(checkpoint())` is a sandbox that no later call can tell from the original.
Refuses: trees beyond the limits of `tree`; a program that overfills the sandbox has its changes undone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from nonet.protocols import RunResult
from nonet.sandbox import tool_specs, tree, workspace
from nonet.sandbox.python_runner import run_python
from nonet.types import SandboxRecipe, ToolCall, ToolResult, UserError

RESULT_LIMIT = 4000  # characters of a tool result before it is cut
PROGRAM_TIMEOUT_S = 2.0


class LocalSandbox:
    """Files in a temporary directory and the tools a recipe names.

    >>> with LocalSandbox(SandboxRecipe({"a": "fig"}, ("read_file",))) as box:
    ...     box.call(ToolCall("read_file", {"path": "a"})).text
    'fig'
    """

    def __init__(self, recipe: SandboxRecipe):
        self.tools = tool_specs.select(recipe.tools)
        self._by_name = {tool.name: tool for tool in self.tools}
        files = _encoded(recipe.files)
        self._root = workspace.new_directory()
        self._fill(files)

    def _fill(self, files: Mapping[str, bytes]) -> None:
        try:
            if not tree.fits(files):
                raise tree.TreeError(f"more than {tree.MAX_FILES} files or {tree.MAX_BYTES} bytes")
            for path, content in files.items():
                tree.write_file(self._root, tree.clean(path), content)
        except (tree.TreeError, OSError) as e:
            self.close()
            raise UserError(f"sandbox files: {_sentence(e)}") from e

    # ------------------------------------------------------------- tools

    def call(self, call: ToolCall) -> ToolResult:
        """Carry out one tool call. A mistake in it is a result with `error` set and one sentence of text."""
        tool = self._by_name.get(call.name) if isinstance(call.name, str) else None
        if tool is None:
            return ToolResult(f"no tool {str(call.name)[:40]!r}; tools: {', '.join(self._by_name)}", error=True)
        wrong = tool_specs.complaint(tool, call)
        if wrong:
            return ToolResult(wrong, error=True)
        try:
            result = self._actions[tool.name](self, *(call.arguments[key] for key in tool.parameters["properties"]))
        except FileNotFoundError:
            return ToolResult(f"{tool.name}: no such file", error=True)
        except UnicodeEncodeError:
            return ToolResult(f"{tool.name}: the text holds half a surrogate pair", error=True)
        except (tree.TreeError, OSError, ValueError) as e:
            return ToolResult(f"{tool.name}: {_sentence(e)}", error=True)
        return result if isinstance(result, ToolResult) else ToolResult(_cut(result))

    def _list_files(self) -> str:
        return "\n".join(sorted(path for path, _ in tree.walk(self._root))) or "no files"

    def _read_file(self, path: str) -> str:
        return tree.read_file(self._existing(path)).decode("utf-8", "replace")

    def _write_file(self, path: str, content: str) -> str:
        self._put(path, content, os.O_TRUNC)
        return "ok"

    def _append_file(self, path: str, content: str) -> str:
        self._existing(path)
        self._put(path, content, os.O_APPEND)
        return "ok"

    def _move_file(self, source: str, target: str) -> str:
        name, path = self._existing(source), tree.clean(target)
        if os.path.exists(tree.locate(self._root, path)):  # noqa: PTH110
            raise tree.TreeError(f"{path} already exists")
        if path.startswith(f"{tree.clean(source)}/"):
            raise tree.TreeError("the target lies below the source")
        tree.write_file(self._root, path, b"")  # creates the directories above it
        os.replace(name, f"{self._root}/{path}")  # noqa: PTH105
        tree.prune(self._root, tree.clean(source))
        return "ok"

    def _delete_file(self, path: str) -> str:
        os.unlink(self._existing(path))  # noqa: PTH108
        tree.prune(self._root, tree.clean(path))
        return "ok"

    def _run_tool(self, code: str) -> ToolResult:
        result = self.run_python(code, PROGRAM_TIMEOUT_S)
        if result.timed_out:
            return ToolResult(f"timed out after {PROGRAM_TIMEOUT_S:g} s", error=True)
        if result.status == 0:
            return ToolResult(_cut(result.stdout.rstrip("\n") or "ok"))
        last = (result.stderr.strip() or "no message").rsplit("\n", 1)[-1]
        return ToolResult(_cut(f"{result.stdout}exit {result.status}: {last}"), error=True)

    _actions: Mapping[str, Callable[..., str | ToolResult]] = {
        "list_files": _list_files,
        "read_file": _read_file,
        "write_file": _write_file,
        "append_file": _append_file,
        "move_file": _move_file,
        "delete_file": _delete_file,
        "run_python": _run_tool,
    }

    def _existing(self, path: str) -> str:
        name = tree.locate(self._root, tree.clean(path))
        if os.path.isdir(name):  # noqa: PTH112
            raise tree.TreeError(f"{tree.clean(path)} is a directory")
        if not os.path.exists(name):  # noqa: PTH110
            raise tree.TreeError(f"no file {tree.clean(path)}")
        return name

    def _put(self, path: str, content: str, flags: int) -> None:
        """Write, unless the sandbox would then hold more than it may."""
        data, path = content.encode(), tree.clean(path)
        sizes = {p: entry.stat(follow_symlinks=False).st_size for p, entry in tree.walk(self._root)}
        grown = len(data) + (sizes.get(path, 0) if flags & os.O_APPEND else 0)
        if sum(sizes.values()) - sizes.get(path, 0) + grown > tree.MAX_BYTES:
            raise tree.TreeError(f"the sandbox is full ({tree.MAX_BYTES} bytes)")
        if path not in sizes and len(sizes) >= tree.MAX_FILES:
            raise tree.TreeError(f"the sandbox is full ({tree.MAX_FILES} files)")
        tree.write_file(self._root, path, data, flags)

    # ----------------------------------------------------------- programs

    def run_python(self, source: str, timeout_s: float = 2.0) -> RunResult:
        """Run a program in the sandbox's directory; files it leaves there stay, links and devices do not."""
        before = tree.read(self._root)
        result = run_python(source, self._root, timeout_s)
        tree.sweep(self._root)
        sizes = [entry.stat(follow_symlinks=False).st_size for _, entry in tree.walk(self._root)]
        if len(sizes) <= tree.MAX_FILES and sum(sizes) <= tree.MAX_BYTES:
            return result
        tree.remove(self._root)
        os.mkdir(self._root, 0o700)  # noqa: PTH102
        self._fill(before)
        note = f"the sandbox holds {tree.MAX_FILES} files and {tree.MAX_BYTES} bytes at most; changes undone"
        return RunResult(1, result.stdout, f"{result.stderr}\n{note}", result.timed_out)

    # ------------------------------------------------------ pause, resume

    def files(self) -> dict[str, str]:
        """Every file's text by path; bytes that are not UTF-8 come out as U+FFFD."""
        return {path: content.decode("utf-8", "replace") for path, content in tree.read(self._root).items()}

    def checkpoint(self) -> dict[str, Any]:
        """All that a sandbox is, as JSON: its tools and its files (text, or base64 where they are not UTF-8)."""
        return {"tools": list(self._by_name), **tree.encode(tree.read(self._root))}

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> LocalSandbox:
        """A sandbox equal to the one that was checkpointed."""
        box = cls(SandboxRecipe(tools=tuple(snapshot["tools"])))
        box._fill(tree.decode(snapshot))
        return box

    def close(self) -> None:
        """Delete the directory; idempotent."""
        if os.path.isdir(self._root):  # noqa: PTH112
            tree.remove(self._root)

    def __enter__(self) -> LocalSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    try:
        return {path: text.encode() for path, text in files.items()}
    except (UnicodeEncodeError, AttributeError) as e:
        raise UserError(f"sandbox files: every value must be text ({e})") from e


def _sentence(e: Exception) -> str:
    return (e.strerror or "failed").lower() if isinstance(e, OSError) else str(e)


def _cut(text: str) -> str:
    if len(text) <= RESULT_LIMIT:
        return text
    return f"{text[:RESULT_LIMIT]}\n... cut at {RESULT_LIMIT} of {len(text)} characters"
