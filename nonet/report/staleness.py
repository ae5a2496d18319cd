"""What staleness did: tokens by how many versions older than the update they are, and who was sampled against trained.

Reads `ages`, `sampled` and `trained` of `rl_step` events. Invariant: shares are of counts over the whole run, means are
weighted by tokens. Refuses to judge: a difference between two shares is said, not called a bias.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from nonet.report import scale, svg
from nonet.report.figures import Panel
from nonet.report.read import Event, number, printable, rows, table

MOST_AGES = 10
MOST_BARS = 10
_MEASURES = ("ratio_p05", "ratio_p50", "ratio_p95", "clipped", "grad_share")


@dataclass(slots=True)
class _Age:
    """Sums over steps of one age; `sums` are weighted: by the age's tokens, the gradient's share by the step's."""

    tokens: float = 0.0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def mean(self, name: str) -> float:
        return self.sums[name] / self.tokens


def age_panels(steps: list[Event]) -> list[Panel]:
    """By age: quantiles of the ratio, share clipped or masked, share of gradient beside share of tokens."""
    ages = _by_age(steps)
    if not ages:
        return []
    total = sum(a.tokens for a in ages.values())
    named = {(f"{age}+" if age == MOST_AGES else str(age)): a for age, a in ages.items()}
    clipped = [(name, a.mean("clipped"), scale.percent(a.mean("clipped"))) for name, a in named.items()]
    pulls = [(name, a.tokens / total, a.sums["grad_share"] / total) for name, a in named.items()]
    spoken = "; ".join(f"age {name}: {share}" for name, _, share in clipped)
    counted = "; ".join(f"age {name}: {t:.1%} of tokens, {g:.1%} of gradient" for name, t, g in pulls)
    bars = svg.bars(clipped, f"Clipped share by age. {spoken}", _BEHIND)
    pairs = svg.pairs(pulls, f"Gradient by age. {counted}", _BEHIND)
    legend = (("muted", "tokens"), ("s1", "gradient"))
    return [
        _ratios(ages),
        Panel("Clipped share by age", bars, _CLIPPED),
        Panel("Gradient by age", pairs, _PULL, legend),
    ]


_BEHIND = "versions behind"
_RATIO = (
    "Ratio of new to behaviour probability: median, and the band from the 5th to the 95th percentile (log scale; "
    "means of the steps' quantiles)."
)
_CLIPPED = "Share of the age's tokens that the objective clipped or masked."
_PULL = "An age whose gradient share is below its token share pulls less on the weights than it is long."


def _by_age(steps: Iterable[Event]) -> dict[int, _Age]:
    out: dict[int, _Age] = {}
    for step in steps:
        found = [(number(r, "age"), number(r, "tokens"), r) for r in rows(step, "ages")]
        known = [(int(age), n, r) for age, n, r in found if age is not None and n is not None and age >= 0 and n > 0]
        whole = sum(n for _, n, _ in known)
        for age, n, row in known:
            mine = out.setdefault(min(age, MOST_AGES), _Age())
            mine.tokens += n
            for name in _MEASURES:
                mine.sums[name] += (number(row, name) or 0.0) * (whole if name == "grad_share" else n)
    return dict(sorted(out.items()))


def _ratios(ages: dict[int, _Age]) -> Panel:
    quantiles = [(float(age), *(max(a.mean(name), 1e-6) for name in _MEASURES[:3])) for age, a in ages.items()]
    if len(quantiles) == 1:  # one age: a level line
        quantiles.append((quantiles[0][0] + 1, *quantiles[0][1:]))
    band = svg.Band([(age, low, high) for age, low, _, high in quantiles], "s1")
    spoken = "; ".join(f"age {age:.0f}: {low:.3f}, {mid:.3f}, {high:.3f}" for age, low, mid, high in quantiles)
    median = svg.Line([(age, mid) for age, _, mid, _ in quantiles], "s1")
    label = f"Probability ratio by age: {spoken}"
    chart = svg.lines([median], label, band=band, log=True, rule=1.0, x_name=_BEHIND)
    return Panel("Probability ratio by age", chart, _RATIO)


# ------------------------------------------------------------- bias monitor

_BY = {
    "length": ("By length", "policy tokens, from"),
    "age": ("By age", "versions from first token to last"),
    "domain": ("By domain", "domain"),
}


def bias_panels(steps: list[Event]) -> list[Panel]:
    """Shares of what was sampled (closed attempts) beside shares of what was trained."""
    out: list[Panel] = []
    for by, (title, x_name) in _BY.items():
        sampled, trained = (_counts(steps, kind, by) for kind in ("sampled", "trained"))
        if not sampled or not trained:
            continue
        shares = _shares(sampled, trained)
        spoken = "; ".join(f"{name}: {a:.1%} of sampled, {b:.1%} of trained" for name, a, b in shares)
        name, a, b = max(shares, key=lambda row: abs(row[1] - row[2]))
        note = f"Largest difference at {name}: {a:.1%} of {sampled.total():,.0f} sampled, {b:.1%} of "
        note += f"{trained.total():,.0f} trained."
        legend = (("muted", "sampled"), ("s1", "trained"))
        out.append(Panel(title, svg.pairs(shares, f"{title}. {spoken}", x_name), note, legend))
    return out


def _counts(steps: Iterable[Event], kind: str, by: str) -> Counter[str]:
    out: Counter[str] = Counter()
    for step in steps:
        counts = table(table(step, kind), by)
        for key in list(counts)[:200]:
            if (n := number(counts, key)) is not None and n > 0:
                out[printable(key, 12)] += int(n)
    return +out


def _shares(sampled: Counter[str], trained: Counter[str]) -> list[tuple[str, float, float]]:
    """(name, share of sampled, share of trained); numbers in order, beyond MOST_BARS names the rest is pooled."""
    names = sorted(sampled | trained, key=lambda n: (not n.isdigit(), int(n) if n.isdecimal() else 0, n))
    kept = names if len(names) <= MOST_BARS else names[: MOST_BARS - 1]
    out = [(n, sampled[n] / sampled.total(), trained[n] / trained.total()) for n in kept]
    if rest := names[len(kept) :]:
        a, b = (sum(c[n] for n in rest) / c.total() for c in (sampled, trained))
        out.append((f"{rest[0]}+" if rest[0].isdigit() else "others", a, b))
    return out
