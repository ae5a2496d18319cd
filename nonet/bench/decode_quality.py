"""What weights in fewer bits cost SmolLM2: log-probs and perplexity of a text, beside float32.

Computed by torch with the numbers that the copies stand for; tests/model/test_native_decode.py holds the decode step to
that.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from nonet.chat import Tokenizer
from nonet.model import Model, hf
from nonet.model.native_weights import Weights, rounded

TEXT = Path(__file__).parents[2] / "README.md"
WINDOW, WINDOWS = 512, 4
FORMATS: tuple[Weights, ...] = ("bf16", "w16a16", "int8", "mxfp4")


@torch.inference_mode()
def quality(directory: Path) -> dict[str, dict[str, float]]:
    """Per format: largest and mean |change| of the log-probs of the text's tokens, and perplexity; float32's too."""
    model = hf.load(directory).float().eval()
    ids = Tokenizer(directory).encode(TEXT.read_text())[: WINDOW * WINDOWS]
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)
    want = text_log_probs(model, windows)
    out = {"float32": {"perplexity": float((-want).mean().exp())}}
    for weights in FORMATS:
        got = text_log_probs(with_weights(model, weights), windows)
        change = (got - want).abs()
        out[weights] = {"max_dlogp": float(change.max()), "mean_dlogp": float(change.mean())}
        out[weights]["perplexity"] = float((-got).mean().exp())
    return out


def text_log_probs(model: Model, windows_NT: Tensor) -> Tensor:
    """Of every token of a window after its first."""
    parts = []
    for ids_T in windows_NT:
        log_probs_TW = model.logits(model(ids_T[None])[0, :-1]).log_softmax(-1)
        parts.append(log_probs_TW.gather(1, ids_T[1:, None])[:, 0])
    return torch.cat(parts)


def with_weights(model: Model, weights: Weights) -> Model:
    """A copy of a dense decoder whose matrices are what the decode step reads; the embedding stays as it is."""
    out = copy.deepcopy(model)
    out.lm_head.weight = nn.Parameter(out.lm_head.weight.detach().clone())
    for module in out.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded(module.weight.detach(), weights), requires_grad=False)
            if weights == "w16a16":
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
    return out
