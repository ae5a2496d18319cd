"""What the engine says about itself: a report per request, counters over all, the price of reused memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from nonet.engine.row import Report, Row
from nonet.model import Model

_REPORTS = 4096  # kept for those who never read them
_MEASURED = 4  # rows after a weight change whose mismatch is measured: each costs a forward over all its tokens


class Accounts:
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
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
        last weight change.
        """
        return {
            **{name: float(count) for name, count in sorted(self.totals.items())},
            "mismatch_rows": float(self._measured),
            "mismatch_max": self._worst,
            "mismatch_mean": self._sum / max(1, self._measured),
        }
