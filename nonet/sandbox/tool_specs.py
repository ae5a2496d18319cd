"""The tools a local sandbox can offer, as data: name, one sentence, JSON schema of the arguments.

Invariant: every argument is a required string, so checking a call needs no more than the schema written here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from nonet.types import Tool, ToolCall, UserError


def _tool(name: str, description: str, **arguments: str) -> Tool:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return Tool(name, description, schema)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        _tool("list_files", "List the path of every file, one a line."),
        _tool("read_file", "Return the text of a file.", path="file to read"),
        _tool("write_file", "Create a file, or replace its text.", path="file to write", content="its whole new text"),
        _tool("append_file", "Add text at the end of a file.", path="file to extend", content="text to add"),
        _tool("move_file", "Rename a file; the target must not exist.", source="file to move", target="its new path"),
        _tool("delete_file", "Delete a file.", path="file to delete"),
        _tool("run_python", "Run a Python program and return what it prints.", code="the program"),
    )
}


def select(names: Iterable[str]) -> tuple[Tool, ...]:
    """The named tools in the order given; an unknown name is a UserError that names the nearest tool."""
    out: list[Tool] = []
    for name in names:
        if name not in TOOLS:
            near = difflib.get_close_matches(str(name), TOOLS, n=1, cutoff=0.0)[0]
            raise UserError(f"sandbox tool {name!r}: no such tool; did you mean {near!r}?")
        out.append(TOOLS[name])
    return tuple(out)


def complaint(tool: Tool, call: ToolCall) -> str | None:
    """One sentence on what is wrong with the arguments of `call`, or None if they fit the tool's schema."""
    arguments = call.arguments
    if not isinstance(arguments, dict):
        return f"{tool.name}: arguments must be an object"
    known = tool.parameters["properties"]
    for key in known:
        if key not in arguments:
            return f"{tool.name}: missing argument {key!r}"
        if not isinstance(arguments[key], str):
            return f"{tool.name}: {key} must be a string"
    for key in arguments:
        if key not in known:
            return f"{tool.name}: unknown argument {str(key)[:40]!r}"
    return None
