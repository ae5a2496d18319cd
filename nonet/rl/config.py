"""Every knob of the RL loop, each documented once."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nonet.config import Config
from nonet.rl.lora import LoraConfig
from nonet.rl.objective import CISPO, DPPO, GSPO, K25, PPO, TIS, IcePop, Mirror, Objective

ObjectiveName = Literal["k25", "ppo", "tis", "icepop", "cispo", "gspo", "dppo", "mirror"]


class RLConfig(Config):
    steps: int = Field(default=100, ge=1)  # iterations: one rollout phase and one update each
    groups: int = Field(default=48, ge=1)  # N: groups (prompts) in flight
    samples: int = Field(default=8, ge=2)  # K: attempts per group; the baseline is their mean
    fraction: float = Field(
        default=0.9, gt=0, le=1
    )  # generation pauses when this share of the active trajectories is done
    # what a paused trajectory continues from under new weights: "reprefill" computes its tokens again; "reuse" goes on
    # from what old weights remembered: cheaper, but lost when a run is killed, so that law 17 does not hold
    on_resume: Literal["reprefill", "reuse"] = "reprefill"
    # staleness: most updates between a trajectory's first token and the update it is trained in (default: any number).
    # Those too old: "wait" finishes their groups before the pause; "recycle" starts them over from the prompt with
    # other random numbers; "drop" gives up their whole group untrained, and so never trains what takes longer.
    max_age: int | None = Field(default=None, ge=0)
    stale: Literal["drop", "recycle", "wait"] = "wait"
    # a member whose sandbox or reward broke: "release" trains its group without it, "retry" starts it over, at most
    # `retries` times, then releases; "score" gives it the reward `failed_reward`
    failed_member: Literal["release", "retry", "score"] = "release"
    retries: int = Field(default=1, ge=1)
    failed_reward: float = 0.0
    score_timeout_s: float = Field(default=120.0, gt=0)  # a reward that takes longer fails its trajectory
    judges: int = Field(default=2, ge=1)  # rewards computed at the same time
    max_tokens: int = Field(default=64, ge=1)  # policy tokens one trajectory may write, over all its turns and pauses
    temperature: float = Field(default=1.0, gt=0)
    max_batch: int = Field(default=384, ge=1)  # rows decoded together
    # objective: a table each, documented where its formula is (objective.py)
    objective: ObjectiveName = "k25"
    k25: K25 = K25()
    ppo: PPO = PPO()
    tis: TIS = TIS()
    icepop: IcePop = IcePop()
    cispo: CISPO = CISPO()
    gspo: GSPO = GSPO()
    dppo: DPPO = DPPO()
    mirror: Mirror = Mirror()
    drop_dead_groups: bool = True  # groups whose rewards are all equal teach nothing; leave them out of the batch
    drop_truncated: bool = False  # what its budget ended counts in the group's mean, but is not trained
    # learner
    lora: LoraConfig | None = None  # [rl.lora] trains low-rank factors and leaves a PEFT directory; none: all weights
    optimizer: Literal["muon", "adamw"] = "adamw"
    lr: float = Field(default=2e-4, gt=0)
    warmup: int = Field(default=10, ge=0)
    decay_to: float = Field(default=1.0, ge=0, le=1)  # learning rate at the last step, as a share of lr (1: constant)
    minibatches: int = Field(default=2, ge=1)  # optimiser steps per iteration; with 1 and no stale data tau cannot act
    micro_tokens: int = Field(default=2048, ge=1)  # tokens per forward; a prompt that rows share counts once
    share_prompts: bool = True  # read the prompt of a group's attempts once (model/tree.py); False: each row by itself
    grad_clip: float = Field(default=1.0, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    # bookkeeping
    keep_groups: int = Field(default=2, ge=0)  # groups per step whose trajectories are written out for reading
    save_every_s: float = Field(default=20.0, ge=0)  # 0: every iteration
    deterministic: bool = False  # every token alone: bitwise independent of batching and pauses, and slow
    check_ratio: float = Field(default=0.02, gt=0)  # stop if a fresh token's log-ratio on equal weights exceeds this

    @property
    def chosen_objective(self) -> Objective:
        return getattr(self, self.objective)
