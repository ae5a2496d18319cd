"""Errands on files, done through tools over several turns: find, move, edit, count, repair.

Efforts: low makes the fewest calls that an honest agent can (what is used has been read); high makes the same calls
and once stops to write down what the rest follows from (the order of moves, where the word stands, the sums); max also
looks before it acts, notes every step, and reads back what it did.

Invariant: the files a task starts from never satisfy its verifier. Refuses: nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from random import Random
from typing import Any

from nonet.tasks.source import Generated, Problem
from nonet.types import Message, Task, ToolCall

THREE_LETTERS = """
ant ape ash bat bay bee bog bud cap cat cob cod cow cub dew dog dot eel egg elk elm emu fig fin fir fly fog fox gem gnu
gum hay hen hog ice ink ivy jam jar jay keg kit lid log mud nut oak oat owl pea pig pod ram rat ray rye sap sea sky sun
tar tea tin toy urn wax yak yam yew
"""
WORDS = THREE_LETTERS.split()
NAMES = tuple(c + v for c in "bdfghklmnprstvz" for v in "aeiou")

Act = tuple[str, ToolCall]  # what the agent notes, what it then does


def look() -> ToolCall:
    return ToolCall("list_files", {})


def read(path: str) -> ToolCall:
    return ToolCall("read_file", {"path": path})


def write(path: str, content: str) -> ToolCall:
    return ToolCall("write_file", {"path": path, "content": content})


def move(source: str, target: str) -> ToolCall:
    return ToolCall("move_file", {"source": source, "target": target})


class Errand(Generated):
    """A task whose verifier, `files`, compares the final files with `data["files"]` and `data["absent"]`."""

    domain = "agents"
    rewards = ("files",)

    @abstractmethod
    def plan(self, data: Mapping[str, Any]) -> list[Act]:
        """What to do, in order, with max effort's notes. Acts whose note starts with "?" are looks one can spare."""

    @abstractmethod
    def insight(self, data: Mapping[str, Any]) -> tuple[int, str]:
        """High effort's one thought, and before which of the acts that cannot be spared it comes."""

    @abstractmethod
    def checks(self, data: Mapping[str, Any]) -> list[ToolCall]:
        """Calls that show the result."""

    def demonstrate(self, task: Task) -> list[Message]:
        acts = self.plan(task.data)
        if task.effort == "max":
            acts = [(note.removeprefix("?"), call) for note, call in acts]
            acts += [("check", call) for call in self.checks(task.data)]
        else:
            acts = [("", call) for note, call in acts if not note.startswith("?")]
        if task.effort == "high":
            at, thought = self.insight(task.data)
            acts[at] = thought, acts[at][1]
        return [*(Message.assistant(reasoning=note, calls=(call,)) for note, call in acts), Message.assistant("done")]

    def _problem(self, prompt: str, files: dict[str, str], end: dict[str, str], **data: Any) -> Problem:
        """Untouched files must survive: the expected state is the start, changed by `end`, less what is absent."""
        absent = data.get("absent", [])
        expected = {path: text for path, text in {**files, **end}.items() if path not in absent}
        return Problem(prompt, {**data, "start": files, "files": expected, "absent": absent}, files)


class Find(Errand):
    name = "agents.find"
    about = "find the file that holds a word and rename it"
    tools = ("list_files", "read_file", "move_file")

    def draw(self, rng: Random) -> Problem:
        count = 1 + self.difficulty
        *names, target = rng.sample(NAMES, count + 1)
        words = rng.sample(WORDS, 2 * count)
        files = {name: f"{words[2 * i]} {words[2 * i + 1]}" for i, name in enumerate(sorted(names))}
        where, word = rng.choice(names), rng.randint(0, 1)
        word = files[where].split()[word]
        prompt = f"rename the file with {word} to {target}"
        return self._problem(prompt, files, {target: files[where]}, absent=[where], word=word, target=target)

    def plan(self, data: Mapping[str, Any]) -> list[Act]:
        word, names = data["word"], sorted(data["start"])
        holder = next(name for name in names if word in data["start"][name])
        searched = names[: names.index(holder) + 1]
        acts: list[Act] = [("list", look()), *((f"{word}?", read(name)) for name in searched)]
        if holder == names[-1]:  # the only one left must be it: reading it can be spared
            acts[-1] = (f"?{word}?", read(holder))
        return [*acts, (f"{word} in {holder}", move(holder, data["target"]))]

    def insight(self, data: Mapping[str, Any]) -> tuple[int, str]:
        holder = next(name for name, text in sorted(data["start"].items()) if data["word"] in text)
        return -1, f"in {holder}"

    def checks(self, data: Mapping[str, Any]) -> list[ToolCall]:
        return [read(data["target"])]


class Move(Errand):
    name = "agents.move"
    about = "rename several files, or swap two"
    tools = ("list_files", "move_file")

    def draw(self, rng: Random) -> Problem:
        count = 1 + self.difficulty
        *names, free = rng.sample(NAMES, 2 * count + 1)
        swap = rng.random() < 0.5
        sources = sorted(names[: 2 if swap else count])
        files = {name: rng.choice(WORDS) for name in sources}
        if swap:
            a, b = rng.sample(sources, 2)
            files[a], files[b] = rng.sample(WORDS, 2)
            moves = [(a, free), (b, a), (free, b)]
            end, absent, prompt = {a: files[b], b: files[a]}, [free], f"swap {a} and {b}, use {free} between"
        else:
            moves = list(zip(sources, names[count:], strict=True))
            end, absent = {target: files[source] for source, target in moves}, sources
            prompt = "move " + ", ".join(f"{source} to {target}" for source, target in moves)
        return self._problem(prompt, files, end, absent=absent, moves=moves)

    def plan(self, data: Mapping[str, Any]) -> list[Act]:
        return [("?list", look()), *((f"{a} to {b}", move(a, b)) for a, b in data["moves"])]

    def insight(self, data: Mapping[str, Any]) -> tuple[int, str]:
        return 0, ", ".join(f"{a} {b}" for a, b in data["moves"])

    def checks(self, data: Mapping[str, Any]) -> list[ToolCall]:
        return [look()]


class Edit(Errand):
    name = "agents.edit"
    about = "replace a word in a file"
    tools = ("read_file", "write_file")

    def draw(self, rng: Random) -> Problem:
        count = 2 + self.difficulty
        name, other = rng.sample(NAMES, 2)
        *words, new = rng.sample(WORDS, count + 2)
        old = rng.choice(words[:count])
        files = {name: " ".join(words[:count]), other: words[count]}
        after = files[name].replace(old, new)
        return self._problem(f"in {name} replace {old} with {new}", files, {name: after}, name=name, old=old, new=new)

    def plan(self, data: Mapping[str, Any]) -> list[Act]:
        name = data["name"]
        return [("read", read(name)), (f"{data['old']} is {data['new']}", write(name, data["files"][name]))]

    def insight(self, data: Mapping[str, Any]) -> tuple[int, str]:
        return -1, f"{data['start'][data['name']].split().index(data['old']) + 1} {data['new']}"

    def checks(self, data: Mapping[str, Any]) -> list[ToolCall]:
        return [read(data["name"])]


class Count(Errand):
    name = "agents.count"
    about = "count the words or lines of a file into another"
    tools = ("read_file", "write_file")

    def draw(self, rng: Random) -> Problem:
        name, target = rng.sample(NAMES, 2)
        most = {1: 5, 2: 9, 3: 14}[self.difficulty]
        words = rng.sample(WORDS, rng.randint(2, most))
        breaks = [rng.random() < 0.4 for _ in words[1:]]
        text = words[0] + "".join(("\n" if b else " ") + w for b, w in zip(breaks, words[1:], strict=True))
        kind = rng.choice(("words", "lines"))
        items = text.split() if kind == "words" else text.split("\n")
        prompt = f"write how many {kind} {name} has to {target}"
        end = {target: str(len(items))}
        return self._problem(prompt, {name: text}, end, name=name, target=target, kind=kind)

    def plan(self, data: Mapping[str, Any]) -> list[Act]:
        items = self._items(data)
        tally = " ".join(f"{i}{item[0]}" for i, item in enumerate(items, 1))
        return [("read", read(data["name"])), (tally, write(data["target"], str(len(items))))]

    def insight(self, data: Mapping[str, Any]) -> tuple[int, str]:
        return -1, " ".join(item[0] for item in self._items(data))

    def _items(self, data: Mapping[str, Any]) -> list[str]:
        text = data["start"][data["name"]]
        return text.split() if data["kind"] == "words" else text.split("\n")

    def checks(self, data: Mapping[str, Any]) -> list[ToolCall]:
        return [read(data["target"])]


class Repair(Errand):
    name = "agents.repair"
    about = "correct a total that disagrees with its numbers"
    tools = ("read_file", "write_file")

    def draw(self, rng: Random) -> Problem:
        *names, total = rng.sample(NAMES, 3)
        per_file = self.difficulty
        top = {1: 9, 2: 20, 3: 40}[self.difficulty]
        files = {name: " ".join(str(rng.randint(1, top)) for _ in range(rng.randint(1, per_file))) for name in names}
        right = sum(int(n) for text in files.values() for n in text.split())
        wrong = rng.choice([n for n in range(max(0, right - 9), right + 10) if n != right])
        files[total] = str(wrong)
        prompt = f"fix {total}: the sum of {names[0]} and {names[1]}"
        return self._problem(prompt, files, {total: str(right)}, names=names, total=total)

    def plan(self, data: Mapping[str, Any]) -> list[Act]:
        first, second = data["names"]
        numbers = [n for name in data["names"] for n in self._numbers(data, name)]
        sums = list(accumulate(numbers))
        working = " ".join(f"{a}+{n}={b}" for a, n, b in zip(sums, numbers[1:], sums[1:], strict=False))
        acts: list[Act] = [("?see", read(data["total"])), ("read", read(first)), ("read", read(second))]
        return [*acts, (working, write(data["total"], data["files"][data["total"]]))]

    def insight(self, data: Mapping[str, Any]) -> tuple[int, str]:
        return -1, " ".join(str(sum(self._numbers(data, name))) for name in data["names"])

    def _numbers(self, data: Mapping[str, Any], name: str) -> list[int]:
        return [int(n) for n in data["start"][name].split()]

    def checks(self, data: Mapping[str, Any]) -> list[ToolCall]:
        return [read(data["total"])]


SOURCES: tuple[type[Errand], ...] = (Find, Move, Edit, Count, Repair)
