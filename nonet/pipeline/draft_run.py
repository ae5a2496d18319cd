"""`nonet draft`, whole: what it will take, the draft, what it is worth."""

from __future__ import annotations

from nonet.pipeline.draft_estimate import Estimate
from nonet.pipeline.draft_eval import print_measured, warning
from nonet.pipeline.drafting import Job, say


def run(job: Job) -> None:
    """Every stage of the job, each where it stopped, and what they took."""
    job.settle()
    say(Estimate.of(job).text())
    job.train()
    measured = job.measure()
    print_measured(measured)
    took = [(e["part"], e["seconds"]) for e in job.lab.events("took")]
    parts = ", ".join(f"{part} {seconds / 60:.1f}" for part, seconds in took)
    say(f"took: {sum(seconds for _, seconds in took) / 60:.1f} minutes ({parts})")
    if said := warning(measured):
        say(said)
    say(f"draft: {job.out / 'draft'}")
