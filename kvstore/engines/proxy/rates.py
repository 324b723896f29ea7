"""What computing, restoring and saving cost, as measured on this server."""

from __future__ import annotations


class Rates:
    """Measured costs. Until there is a measurement, the estimates favour a restore."""

    FIXED = 0.002  # seconds that any restore or save takes, whatever its size

    def __init__(self) -> None:
        self.prefill: float | None = None  # seconds per token
        self.restore_byte = self.save_byte = 0.5e-9
        self.token_bytes = 0.0

    def computed(self, n: int, seconds: float) -> None:
        if n >= 32 and seconds > 0:
            self.prefill = seconds / n if self.prefill is None else 0.7 * self.prefill + 0.3 * seconds / n

    def restored(self, n_bytes: int, seconds: float) -> None:
        self.restore_byte = 0.7 * self.restore_byte + 0.3 * max(0.0, seconds - self.FIXED) / max(1, n_bytes)

    def saved(self, n_tokens: int, n_bytes: int, seconds: float) -> None:
        self.save_byte = 0.7 * self.save_byte + 0.3 * max(0.0, seconds - self.FIXED) / max(1, n_bytes)
        self.token_bytes = n_bytes / max(1, n_tokens)

    def skipped(self) -> None:
        """A restore was left out as too slow. One slow restore must not prevent all later ones: without a restore there is
        no new measurement, so each skip lowers the estimate."""
        self.restore_byte *= 0.9

    def prefill_seconds(self, n: float) -> float:
        return n * (1e-3 if self.prefill is None else self.prefill)

    def restore_seconds(self, n_bytes: float) -> float:
        return self.FIXED + n_bytes * self.restore_byte

    def save_seconds(self, n_tokens: float) -> float:
        return self.FIXED + n_tokens * self.token_bytes * self.save_byte
