"""Message text <-> tokens. Chat template, special tokens and stop ids come from the model directory, never guessed."""

from nonet.chat.calls import CallReader, CallSyntax
from nonet.chat.conversation import Prompt, prompt
from nonet.chat.stream import StopTexts, TextStream
from nonet.chat.tokenizer import Tokenizer

__all__ = ["CallReader", "CallSyntax", "Prompt", "StopTexts", "TextStream", "Tokenizer", "prompt"]
