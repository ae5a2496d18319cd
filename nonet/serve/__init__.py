"""`nonet serve`: one generator behind HTTP. An asyncio front, one thread for text, one thread for the engine."""

from nonet.serve.app import make_app
from nonet.serve.limits import Limits
from nonet.serve.server import Address, serve

__all__ = ["Address", "Limits", "make_app", "serve"]
