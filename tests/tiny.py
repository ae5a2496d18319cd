"""Models, settings and generators small enough for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nonet import tasks
from nonet.chat import Tokenizer
from nonet.harness import load_spec, render_assistant
from nonet.harness.episode import demonstration
from nonet.lm.trainer import Row, losses
from nonet.model import Model, ModelConfig, Rope
from nonet.model.init import initialise
from nonet.protocols import Sandbox, TaskSource
from nonet.rl.setting import Setting, open_sandbox
from nonet.types import Completion, Message, Request, Task

SHAPE = dict(d_model=32, d_ff=48, heads=4, init_std=0.25)
HYBRID = dict(
    **SHAPE, layers=4, kda_head_dim=8, decay_rank=4, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=8,
)  # fmt: skip
# Scaled so that a few dozen positions already reach the stretched frequencies.
LLAMA3 = Rope(theta=100.0, scaling="llama3", factor=4.0, original_max_position=16)
GQA = dict(
    **SHAPE, layers=2, mixers=("gqa",) * 2, kv_heads=2, head_dim=8, activation="silu", rope=LLAMA3, qk_norm=True,
    qkv_bias=True, o_bias=True,
)  # fmt: skip
MOE = dict(experts=6, top_k=2, d_ff=12, shared=2, latent=20)
K3 = {**HYBRID, "layers": 6, "attn_res_block": 2, "moe": MOE}
KIMI_LINEAR = {
    **HYBRID, "decay": "softplus", "gate_rank": 8, "decay_rank": 8, "q_lora_rank": 0, "mla_gate": False,
    "activation": "silu", "moe": dict(experts=6, top_k=2, d_ff=12, shared=1, scale=2.4),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"hybrid": HYBRID, "gqa": GQA, "k3": K3, "kimi_linear": KIMI_LINEAR}
# Two errands and two words, learnt by heart; other indices make the policy err in interesting ways.
DRILL = 4


def model(
    kind: str = "hybrid", vocab: int = 61, seed: int = 0, dtype: torch.dtype = torch.float32, **over: Any
) -> Model:
    """A model in which no parameter is zero or one, so that none can be forgotten without a trace."""
    made = initialise(Model(ModelConfig(vocab_size=vocab, **{**KINDS[kind], **over})), seed)
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in made.parameters():  # routers' selection bias too: it is a parameter without gradient
            p.add_(torch.randn(p.shape, generator=noise) * 0.1)
    return made.to(dtype).eval()


def tokens(*shape: int, vocab: int = 61, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def source() -> TaskSource:
    return tasks.load("agents.move,general.reverse", difficulty=1)


def texts() -> list[str]:
    spec, out = load_spec("terse"), []
    for i in range(60):
        task = source().task("train", 1000 + i, "low")
        out += [m.text for m in task.prompt]
        out += [render_assistant(m, spec) for m in source().demonstrate(task) or ()]
    return [*out, *["hello hello"] * 200]


def setting(tokenizer: Tokenizer, **over: Any) -> Setting:
    return Setting(
        **{"source": source(), "spec": load_spec("terse"), "tokenizer": tokenizer, "efforts": ("low",), **over}
    )


def demonstration_row(tokenizer: Tokenizer, index: int) -> Row:
    """Task `index` of the train split, solved, as the policy would have lived it."""
    s = setting(tokenizer)
    task = s.task("train", index)
    sandbox = open_sandbox(task, None)
    try:
        ids, mask, _ = demonstration(task, s.source.demonstrate(task) or [], s.spec, tokenizer, sandbox)
    finally:
        if sandbox is not None:
            sandbox.close()
    return Row(ids, mask)


def drilled(tokenizer: Tokenizer, steps: int = 30) -> Model:
    """A hybrid policy with an MTP layer that has seen a few demonstrations many times."""
    made = initialise(
        Model(ModelConfig(vocab_size=tokenizer.vocab_size, mtp_layers=1, **{**HYBRID, "init_std": 0.1})), 0
    )
    rows = [demonstration_row(tokenizer, i) for i in range(DRILL)]
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(steps):
        loss, _ = losses(made, rows, False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


def varied(task: Task, transcript: Sequence[Message], sandbox: Sandbox | None) -> float:
    """A reward on which siblings differ: it counts letters of what was said and left behind."""
    said = "".join(m.text for m in transcript if m.role == "assistant")
    left = "".join(f"{k}{v}" for k, v in sorted(sandbox.files().items())) if sandbox is not None else ""
    return len(set(said + left)) % 7 / 7


class Scripted:
    """A Generator that writes what it is told: turns(id, n) gives the ids of a request's n-th turn, one a step.

    Log-probs are made up but tell positions apart: -(position + 1) / 1000, half of that raw. After `patience` steps it
    claims to have nothing left, so that a rollout pauses there.
    """

    def __init__(self, turns: Callable[[str, int], Sequence[int]], version: int = 0):
        self.turns, self.version, self.context = turns, version, 1 << 20
        self.requests: list[Request] = []
        self.patience, self._steps = 1 << 60, 0
        self._spoken: dict[str, int] = {}
        self._rows: dict[str, tuple[Request, list[int], list[int]]] = {}
        self._owed: dict[str, list[int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._rows) and self._steps < self.patience

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        if request.id in self._owed:
            script = self._owed.pop(request.id)
        else:
            turn = self._spoken.get(request.id, 0)
            self._spoken[request.id] = turn + 1
            script = list(self.turns(request.id, turn))
        self._rows[request.id] = request, script, []

    def step(self) -> list[Completion]:
        ended = []
        self._steps += 1
        for name, (request, script, written) in list(self._rows.items()):
            written.append(script.pop(0))
            if written[-1] in request.stop_ids:
                ended.append(self._completion(name, "stop"))
            elif len(written) == request.max_tokens:
                ended.append(self._completion(name, "length"))
        return ended

    def pause(self) -> list[Completion]:
        self._steps = 0
        self._owed |= {name: script for name, (_, script, _) in self._rows.items()}
        return [self._completion(name, "paused") for name in list(self._rows)]

    def _completion(self, name: str, reason: Any) -> Completion:
        request, _, written = self._rows.pop(name)
        at = range(len(request.tokens), len(request.tokens) + len(written))
        logprobs = tuple(-(i + 1) / 1000 for i in at)
        return Completion(name, tuple(written), logprobs, tuple(x / 2 for x in logprobs), reason, self.version)
