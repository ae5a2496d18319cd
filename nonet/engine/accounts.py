"""What the engine says about itself: a report per request, counters over all, the price of reused memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nonet.engine.row import Drafts, Report, Row
from nonet.model import Model

_REPORTS = 4096  # kept for those who never read them
_MEASURED = 4  # rows after a weight change whose mismatch is measured: each costs a forward over all its tokens


class Accounts:
    def __init__(self, drafting: bool = False) -> None:
        self.totals: Counter[str] = Counter()
        self.drafts = Drafts() if drafting else None
        self._reports: OrderedDict[str, Report] = OrderedDict()
        self.renew()

    def renew(self) -> None:
        """The weights have changed: measure the next reused memory afresh."""
        self._measured, self._worst, self._sum = 0, 0.0, 0.0

    def ended(self, row: Row) -> None:
        """A request that never had a place is counted, and has no report."""
        self.totals["requests_total"] += 1
        report = row.report
        if report is None:
            return
        if self.drafts is not None:
            self.drafts.add(row.drafts)
            report = replace(report, drafts=row.drafts)
        self._reports[row.id] = report
        if len(self._reports) > _REPORTS:
            self._reports.popitem(last=False)
        self.totals["tokens_prompt_total"] += report.prompt
        self.totals["tokens_cached_total"] += report.cached
        self.totals["tokens_generated_total"] += len(row.logprobs)
        if report.reason:
            self.totals[f"miss_{report.reason}_total"] += 1

    def report(self, request_id: str) -> Report | None:
        return self._reports.pop(request_id, None)

    def compare(self, model: Model, tokens: Sequence[int], logits_W: Tensor) -> None:
        """How far log-probs from memory of older weights are from those of a fresh prefill with today's."""
        if self._measured == _MEASURED:
            return
        fresh_W = model.logits(model(torch.tensor([tokens], device=logits_W.device))[0, -1])
        apart_W = (fresh_W.float().log_softmax(-1) - logits_W.float().log_softmax(-1)).abs()
        self._measured += 1
        self._worst, self._sum = max(self._worst, float(apart_W.max())), self._sum + float(apart_W.mean())

    def figures(self) -> dict[str, float]:
        """mismatch_max, mismatch_mean: of |log-prob differences| over the vocabulary of the rows measured since the
        last weight change. draft_acceptance_length: tokens written a verifying step, the bonus token included.
        """
        return {
            **{name: float(count) for name, count in sorted(self.totals.items())},
            **self._drafted(),
            "mismatch_rows": float(self._measured),
            "mismatch_max": self._worst,
            "mismatch_mean": self._sum / max(1, self._measured),
        }

    def _drafted(self) -> dict[str, float]:
        """Of ended requests; accepted_1 counts the steps whose first drafted token stood, accepted_2 the first two."""
        d = self.drafts
        if d is None:
            return {}
        return {
            "draft_steps_total": float(d.steps),
            "draft_proposed_total": float(sum(d.proposed)),
            "draft_accepted_total": float(sum(d.accepted)),
            **{f"draft_proposed_{k}_total": float(n) for k, n in enumerate(d.proposed, 1)},
            **{f"draft_accepted_{k}_total": float(n) for k, n in enumerate(d.accepted, 1)},
            "draft_acceptance_length": d.acceptance_length,
        }
