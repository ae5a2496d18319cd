"""One model definition for training, generation and (later) drafting, with explicit state.

Reading order: config.py (every dimension), model.py (the whole network), attention.py / kda.py / ffn.py (its parts),
state.py (what it remembers), hf.py (Hugging Face directories in and out).
"""

from nonet.model.config import ModelConfig, Rope
from nonet.model.model import Model
from nonet.model.state import SequenceState

__all__ = ["Model", "ModelConfig", "Rope", "SequenceState"]
