"""The figures of the page: which series become which chart, and the sentence that says how to read it.

Owns Panel and the panels of each section. Invariant: a panel is made only from data that is there; absent series make
absent panels, and the section says so when none is left. Refuses to tell a story: notes say what is drawn, not whether
it is good.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nonet.report import scale, svg
from nonet.report.read import Event, Points, ratio, series, text
from nonet.report.trajectories import Scan

COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6")
MOST_VERSIONS = 8
BINS = 24


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart with its title, its legend (colour class, name) and one or two sentences."""

    title: str
    chart: Markup
    note: str
    legend: tuple[tuple[str, str], ...] = ()


def _span(points: Points) -> str:
    (x0, y0), (x1, y1) = points[0], points[-1]
    return f"{scale.short(y0)} at step {x0:.0f}, {scale.short(y1)} at step {x1:.0f}"


def curves(title: str, note: str, named: Sequence[tuple[str, Points]], zero: bool = False) -> list[Panel]:
    """Raw lines (faint; not of more than three) under their moving means; no panel when there are no points."""
    named = [(name, points) for name, points in named if points][: len(COLOURS)]
    if not named:
        return []
    drawn: list[svg.Line] = []
    window = 0
    for (_, points), css in zip(named, COLOURS, strict=False):
        mean, window = scale.smooth(points)
        drawn += [svg.Line(points, css, faint=True)] * (len(named) <= 3) + [svg.Line(mean, css)]
    label = f"{title}. " + "; ".join(f"{name} {_span(points)}".strip() for name, points in named)
    if len(named[0][1]) > 1:
        note += (
            f" Bold: mean of {window} points; faint: every point." if len(named) <= 3 else f" Mean of {window} points."
        )
    legend = tuple((css, name) for (name, _), css in zip(named, COLOURS, strict=False)) if len(named) > 1 else ()
    return [Panel(title, svg.lines(drawn, label, zero=zero), note, legend)]


# ---------------------------------------------------------------- cold start


def cold_panels(steps: list[Event]) -> list[Panel]:
    """Loss (next token and MTP), the same loss over the second half, and the learning rate."""
    losses = [("next token", series(steps, "loss")), ("MTP", series(steps, "mtp_loss"))]
    late = [(name, points[len(points) // 2 :]) for name, points in losses]
    out = curves("Loss, nats per token", "Lower is better; the start dominates the scale.", losses)
    if len(losses[0][1]) >= 8:
        out += curves("Loss, second half", "The same curves on their own scale, to see whether they are flat.", late)
    if rate := series(steps, "lr"):
        chart = svg.lines([svg.Line(rate, "s1")], f"Learning rate: {_span(rate)}", zero=True)
        out.append(Panel("Learning rate", chart, "The schedule that was followed."))
    return out


# ------------------------------------------------------------------------ RL


def rl_panels(steps: list[Event]) -> list[Panel]:
    return [
        *_reward(steps),
        *_one(steps, "length", "Length, policy tokens", "Mean number of tokens the policy wrote per trajectory."),
        *_one(steps, "entropy", "Entropy, nats per token", _ENTROPY),
        *_ratio(steps),
        *_one(steps, "masked", "Masked share of tokens", _MASKED),
        *_one(steps, "kl", "KL to the behaviour policy", _KL, zero=False),
        *_one(steps, "opd_kl", "KL to the teachers", _TAUGHT, zero=False),
        *_one(
            steps, "opd_clipped", "Teacher rewards clipped", "Share of tokens whose log-ratio to the teacher was cut."
        ),
        *curves("Dead-group share", _DEAD, [("", ratio(steps, "dead_groups", "groups"))], zero=True),
        *curves("Parked and stale share", _PARKED, _waiting(steps), zero=True),
        *_time(steps),
        *_one(steps, "grad_norm", "Gradient norm", "Before clipping; isolated spikes are common."),
    ]


_ENTROPY = "How undecided the policy is; near zero it has stopped exploring."
_MASKED = "Tokens whose probability ratio left the allowed window and gave no gradient."
_KL = (
    "The k1 estimate, nats per token: how far the update is from the policy that wrote the tokens. It can be negative."
)
_TAUGHT = "Mean log-ratio of student to teacher over the student's own tokens, nats: an estimate of the reverse KL."
_DEAD = "Groups whose samples all had the same reward, over all groups of the step; they carry no gradient."
_PARKED = (
    "Parked: active trajectories set aside unfinished at the end of the step. "
    "Stale: trained tokens that an older version wrote."
)


def _one(steps: list[Event], key: str, title: str, note: str, zero: bool = True) -> list[Panel]:
    return curves(title, note, [("", series(steps, key))], zero)


def _waiting(steps: list[Event]) -> list[tuple[str, Points]]:
    return [("parked", ratio(steps, "parked", "active")), ("stale", series(steps, "stale"))]


def _reward(steps: list[Event]) -> list[Panel]:
    note = "Mean training reward of the step, sampled. Training tasks, so not evidence about new ones."
    prefix = "reward_"
    names = sorted({key for e in steps for key in e if key.startswith(prefix)})
    by_domain = [(text({"d": key.removeprefix(prefix)}, "d"), series(steps, key)) for key in names]
    return [
        *curves("Reward, all domains", note, [("", series(steps, "reward"))]),
        *curves("Reward by domain", "The same, each domain by itself.", by_domain),
    ]


def _ratio(steps: list[Event]) -> list[Panel]:
    low, high = dict(series(steps, "ratio_min")), dict(series(steps, "ratio_max"))
    both = [(x, max(low[x], 1e-6), max(high[x], 1e-6)) for x in sorted(low.keys() & high.keys())]
    if not both:
        return []
    both = scale.envelope(both)
    lower, upper = [(x, a) for x, a, _ in both], [(x, b) for x, _, b in both]
    label = f"Probability ratio, lowest {_span(lower)}; highest {_span(upper)}"
    drawn = [svg.Line(lower, "s1", faint=True), svg.Line(upper, "s1", faint=True)]
    band = svg.Band(both, "s1")
    note = (
        "Smallest and largest ratio of new to behaviour probability over the tokens of the step (log scale). "
        "1 means unchanged."
    )
    return [Panel("Probability ratio, range", svg.lines(drawn, label, band=band, log=True, rule=1.0), note)]


def _time(steps: list[Event]) -> list[Panel]:
    rollout, update = dict(series(steps, "rollout_s")), dict(series(steps, "update_s"))
    xs = sorted(rollout.keys() & update.keys())
    if not xs:
        return []
    layers = [(scale.averaged([(x, d[x]) for x in xs]), css) for d, css in ((rollout, "s1"), (update, "s2"))]
    if len(xs) == 1:
        layers = [([*points, (points[0][0] + 1, points[0][1])], css) for points, css in layers]
    spent = sum(rollout[x] for x in xs), sum(update[x] for x in xs)
    share = spent[0] / (sum(spent) or 1.0)
    note = f"Stacked. Rollout took {share:.0%} of the {sum(spent):,.0f} s that were measured."
    legend = (("s1", "rollout"), ("s2", "update"))
    return [Panel("Seconds per step", svg.stacked(layers, f"Seconds per step. {note}"), note, legend)]


# ------------------------------------------------------------- trajectories


def length_panels(found: Scan) -> list[Panel]:
    """Histograms of policy tokens per trajectory, first against last steps: all domains, then each."""
    first, last = map(set, found.ends())
    domains = [d for d, _ in Counter(s.domain for s in found.training).most_common(5)]
    out: list[Panel] = []
    for title in ("All domains", *(sorted(domains) if len(domains) > 1 else ())):
        mine = [s for s in found.training if title in ("All domains", s.domain)]
        early = [s.policy_tokens for s in mine if s.step in first]
        late = [s.policy_tokens for s in mine if s.step in last]
        if early or late:
            out.append(_lengths(title, early, late))
    return out


def _lengths(title: str, early: list[int], late: list[int]) -> Panel:
    both = sorted(early + late)
    top = max(both[min(len(both) - 1, int(len(both) * 0.995))], 4)
    width = max(1, math.ceil((top + 1) / BINS))
    edges = [float(i * width) for i in range(math.ceil((top + 1) / width) + 1)]
    shares = [(_histogram(early, edges), "muted"), (_histogram(late, edges), "s1")]
    words = [f"{name}: {_middle(v)}" for name, v in (("first steps", early), ("last steps", late)) if v]
    note = "; ".join(words).capitalize() + "."
    if both[-1] >= edges[-1]:
        note += f" The last bin also holds longer ones, up to {both[-1]:,} tokens."
    legend = (("muted", "first steps"), ("s1", "last steps"))
    return Panel(title, svg.outlines(edges, shares, f"{title}. {note}", "policy tokens"), note, legend)


def _histogram(values: list[int], edges: list[float]) -> list[float]:
    bins = [0] * (len(edges) - 1)
    for v in values:
        bins[min(bisect.bisect_right(edges, v) - 1, len(bins) - 1)] += 1
    return [b / max(1, len(values)) for b in bins]


def _middle(values: list[int]) -> str:
    return f"{len(values):,} trajectories, median {sorted(values)[len(values) // 2]:,} tokens"


def version_panels(found: Scan) -> list[Panel]:
    """How many versions wrote one trajectory, how old the trained tokens were, and the relay share by step."""
    out: list[Panel] = []
    counts = Counter(s.versions for s in found.training if s.versions)
    if counts:
        note = "Trajectories by the number of policy versions that wrote them; the number above a bar is a count."
        out.append(Panel("Versions per trajectory", _shares(counts, 1, "Versions per trajectory", "versions"), note))
    if found.age:
        note = "Policy tokens by how many versions older they are than the newest token recorded in the same step."
        out.append(Panel("Tokens by age", _shares(found.age, 0, "Tokens by age", "versions behind"), note))
    by_step: dict[int, list[bool]] = {}
    for s in found.training:
        by_step.setdefault(s.step or 0, []).append(s.versions > 1)
    relay = [(float(step), sum(v) / len(v)) for step, v in sorted(by_step.items())]
    note = "Share of the step's trajectories that more than one version wrote."
    return out + curves("Relayed trajectories", note, [("", relay)], zero=True)


def _shares(counts: Counter[int], start: int, label: str, x_name: str) -> Markup:
    total = sum(counts.values())
    top = start + MOST_VERSIONS - 1
    last = min(max(counts), top)
    rows: list[tuple[str, float, str]] = []
    for n in range(start, last + 1):
        pooled = n == top and max(counts) > top
        count = sum(c for k, c in counts.items() if k >= n) if pooled else counts[n]
        rows.append((f"{n}+" if pooled else str(n), count / total, scale.short(count)))
    spoken = "; ".join(f"{name}: {share:.1%}" for name, share, _ in rows)
    return svg.bars(rows, f"{label}. {spoken}", x_name)


def interval_panel(rows: Iterable[svg.Interval]) -> Panel | None:
    rows = list(rows)
    if not rows:
        return None
    spoken = "; ".join(f"{r.name} {scale.signed(r.value)}" for r in rows)
    note = "Dots: gain in mean reward. Bars: 95% interval. A bar across the zero line is compatible with no change."
    legend = (("dot", "sampled"), ("dot hollow", "greedy"))
    return Panel("Gain on held-out tasks", svg.intervals(rows, f"Gains. {spoken}", "gain in reward"), note, legend)
