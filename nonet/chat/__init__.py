"""Message text <-> tokens. Chat template, special tokens and stop ids come from the model directory, never guessed."""

from nonet.chat.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
