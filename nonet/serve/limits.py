"""What a server allows, whatever a client asks."""

from __future__ import annotations

from dataclasses import dataclass

from nonet.types import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """body_bytes: of a request; request_s: until its answer is complete; queued: answers that wait for their first
    token; choices: answers one request may ask for; drain_s: what running answers get after SIGTERM.
    """

    body_bytes: int = 4 << 20
    request_s: float = 600.0
    queued: int = 256
    choices: int = 16
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("body_bytes", "request_s", "queued", "choices"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name)}: must be positive")
        if not self.drain_s >= 0:
            raise UserError(f"drain_s = {self.drain_s}: must be 0 (cut at once) or positive")
