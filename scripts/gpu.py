"""Parity and timing of the GPU paths against CPU oracles; see gpu.sh.

dump    float64 recurrences, loops and models on the CPU, with their inputs, into FOLDER/dump.pt
replay  the same inputs through the GPU: largest relative differences beside their bounds, then timings;
        FOLDER/report.json. Exit status 1 if a bound is exceeded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nonet.model import Model, ModelConfig
from nonet.model.init import initialise
from nonet.ops import fused
from nonet.ops.experts import experts, experts_loop
from nonet.ops.kda import kda, kda_chunk, kda_recurrent, kda_step_
from nonet.quant import encode

GATES = ("k3", "all -5", "mixed", "zero")
MODEL = dict(
    vocab_size=512, d_model=256, layers=8, heads=4, d_ff=512, attn_res_block=2, kda_head_dim=64, decay_rank=32,
    q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    moe={"experts": 16, "top_k": 4, "d_ff": 128, "shared": 1, "latent": 128},
)  # fmt: skip


# ------------------------------------------------------------------------ dump


def dump(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Any] = {}
    for gate in GATES:
        for keys in ("random", "collinear"):
            inputs = kda_case(gate, keys, T=130, H=2, K=128)
            wide = [x.double() for x in inputs]
            cases[f"kda, gates {gate}, keys {keys}"] = {"inputs": inputs, "want": kda_recurrent(*wide)}
    cases["experts"] = {
        "inputs": (given := experts_case()),
        "want": experts_loop(*(_wide(x) for x in given), silu_gate),
    }
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)) * torch.logspace(-8, 8, 64)[:, None]
    cases["mx"] = {"x": x, "want": {f: (encode(x, f).codes, encode(x, f).scales) for f in ("mxfp4", "mxfp8")}}
    model = initialise(Model(ModelConfig(**MODEL)), 0).eval()
    tokens = torch.randint(0, 512, (2, 300), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wide_model = initialise(Model(ModelConfig(**MODEL)), 0).double().eval()
        want = wide_model.logits(wide_model(tokens)).log_softmax(-1)
    cases["model"] = {"weights": model.state_dict(), "tokens": tokens, "want": want}
    torch.save(cases, folder / "dump.pt")
    print(f"{folder / 'dump.pt'}: {len(cases)} cases")


def kda_case(gate: str, keys: str, T: int, H: int, K: int, B: int = 2) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(hash_of(gate + keys))
    q, k, v = (torch.randn(B, T, H, K, generator=gen) for _ in range(3))
    if keys == "collinear":
        k = k[:, :1] + 1e-3 * k
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = {
        "k3": -5 * torch.sigmoid(torch.randn(B, T, H, K, generator=gen) - 3),
        "all -5": torch.full((B, T, H, K), -5.0),
        "mixed": torch.where(torch.rand(B, T, H, K, generator=gen) < 0.5, -5.0, -1e-6),
        "zero": torch.zeros(B, T, H, K),
    }[gate]
    beta = torch.full((B, T, H), 0.999) if keys == "collinear" else torch.rand(B, T, H, generator=gen)
    return q * K**-0.5, k, v, g, beta, torch.randn(B, H, K, K, generator=gen)


def experts_case(N: int = 200, E: int = 16, K: int = 4, D: int = 64, width: int = 96) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(5)
    chosen = torch.rand(N, E, generator=gen).topk(K, -1).indices
    w1, w3 = (torch.randn(E, width, D, generator=gen) / 8 for _ in range(2))
    w2 = torch.randn(E, D, width, generator=gen) / 10
    return torch.randn(N, D, generator=gen), chosen, torch.rand(N, K, generator=gen), w1, w3, w2


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return fused.gated_torch(gate, up, None)


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def hash_of(text: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 2**31


# ---------------------------------------------------------------------- replay


def replay(folder: Path) -> int:
    if not torch.cuda.is_available():
        print("gpu.py: no CUDA device here; carry FOLDER/dump.pt to a machine that has one and run `replay` there")
        return 0
    cases = torch.load(folder / "dump.pt", weights_only=True)
    rows = list(parity(cases))
    for name, error, bound in rows:
        print(f"{'ok  ' if error <= bound else 'FAIL'} {name:60} {error:.2e}  (bound {bound:.0e})")
    timed = dict(timings())
    for name, value in timed.items():
        print(f"     {name:60} {value:.4g}")
    report = {"parity": {n: [e, b] for n, e, b in rows}, "timings": timed, "device": torch.cuda.get_device_name()}
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    return int(any(error > bound for _, error, bound in rows))


def parity(cases: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    for name, case in ((n, c) for n, c in cases.items() if n.startswith("kda")):
        inputs = [x.cuda() for x in case["inputs"]]
        for path, run in (("chunks in torch", kda_chunk), ("dispatch", kda)):
            o, state = run(*inputs, -5.0)
            yield f"{name}: {path}", max(_error(o, case["want"][0]), _error(state, case["want"][1])), 2e-5
        state, outputs = inputs[5].clone(), []
        for t in range(inputs[0].shape[1]):
            outputs.append(kda_step_(*(x[:, t] for x in inputs[:5]), state))
        yield f"{name}: decode steps", _error(torch.stack(outputs, 1), case["want"][0]), 2e-5
    given = [x.cuda() for x in cases["experts"]["inputs"]]
    yield "experts, float32", _error(experts(*given, silu_gate), cases["experts"]["want"]), 2e-5
    half = [x.bfloat16() if x.is_floating_point() else x for x in given]
    yield "experts, bfloat16", _error(experts(*half, silu_gate), cases["experts"]["want"]), 3e-2
    for fmt, (codes, scales) in cases["mx"]["want"].items():
        mx = encode(cases["mx"]["x"].cuda(), fmt)
        different = int((mx.codes.cpu() != codes).sum()) + int((mx.scales.cpu() != scales).sum())
        yield f"{fmt}: codes and scales that differ", float(different), 0.0
    model = Model(ModelConfig(**MODEL)).eval()
    model.load_state_dict(cases["model"]["weights"])
    with torch.no_grad():
        for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.3)):
            m = model.to("cuda", dtype)
            got = m.logits(m(cases["model"]["tokens"].cuda())).float().log_softmax(-1)
            yield f"K3-shaped model, {dtype}: log-probs", float((got.cpu() - cases["model"]["want"]).abs().max()), bound


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((got.double().cpu() - want).abs().max() / want.abs().max())


def timings() -> Iterator[tuple[str, float]]:
    for T in (1024, 8192):
        inputs = [x.cuda().bfloat16() for x in kda_case("k3", "random", T, H=16, K=128, B=1)]
        inputs[3:] = [x.float() for x in inputs[3:]]
        yield f"kda dispatch, H16 d128 T{T}, ms", _ms(lambda x=inputs: kda(*x, -5.0))
        wide = [x.float() for x in inputs]
        yield f"kda chunks in torch, H16 d128 T{T}, ms", _ms(lambda x=wide: kda_chunk(*x, -5.0))
    config = ModelConfig(**{**MODEL, "d_model": 1024, "heads": 16, "d_ff": 2048})
    model = initialise(Model(config), 0).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 512, (8, 2048), device="cuda")

    def step() -> None:
        logits = model.logits(model(tokens)).float()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)

    yield (
        f"K3-shaped model of {model.cost.total / 1e6:.0f}M, forward + backward, tokens/s",
        tokens.numel() / _ms(step) * 1e3,
    )


def _ms(run: Callable[[], Any], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times) * 1e3


if __name__ == "__main__":
    verbs = {"dump": lambda f: dump(f) or 0, "replay": replay}
    if len(sys.argv) != 3 or sys.argv[1] not in verbs:
        sys.exit("usage: python scripts/gpu.py dump|replay FOLDER")
    torch.manual_seed(0)
    sys.exit(verbs[sys.argv[1]](Path(sys.argv[2])))
