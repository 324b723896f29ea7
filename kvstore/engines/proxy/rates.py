"""What computing, restoring and saving cost, as measured on this server."""

from __future__ import annotations


class _Speed:
    """Seconds per byte, of measurements of which the latest count most.

    A small transfer says little, since a busy machine delays it by more than it takes. So the first estimate has the weight
    of 64 MiB.
    """

    GUESS, WEIGHT = 0.5e-9, 64 << 20

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    def measured(self, n_bytes: int, seconds: float) -> None:
        self._bytes = 0.7 * self._bytes + n_bytes
        self._seconds = 0.7 * self._seconds + max(0.0, seconds)

    def lower(self) -> None:
        self._seconds *= 0.9

    @property
    def byte(self) -> float:
        return (self.GUESS * self.WEIGHT + self._seconds) / (self.WEIGHT + self._bytes)


class Rates:
    """Measured costs. Until there is a measurement, the estimates favour a restore."""

    FIXED = 0.002  # seconds that any restore or save takes, whatever its size

    def __init__(self) -> None:
        self.prefill: float | None = None  # seconds per token
        self._restores, self._saves = _Speed(), _Speed()
        self.token_bytes = 0.0

    @property
    def restore_byte(self) -> float:
        return self._restores.byte

    @property
    def save_byte(self) -> float:
        return self._saves.byte

    def computed(self, n: int, seconds: float) -> None:
        if n >= 32 and seconds > 0:
            self.prefill = seconds / n if self.prefill is None else 0.7 * self.prefill + 0.3 * seconds / n

    def restored(self, n_bytes: int, seconds: float) -> None:
        self._restores.measured(n_bytes, seconds - self.FIXED)

    def saved(self, n_tokens: int, n_bytes: int, seconds: float) -> None:
        self._saves.measured(n_bytes, seconds - self.FIXED)
        self.token_bytes = n_bytes / max(1, n_tokens)

    def skipped(self) -> None:
        """A restore was left out as too slow. One slow restore must not prevent all later ones: without a restore there is
        no new measurement, so each skip lowers the estimate."""
        self._restores.lower()

    def prefill_seconds(self, n: float) -> float:
        return n * (1e-3 if self.prefill is None else self.prefill)

    def restore_seconds(self, n_bytes: float) -> float:
        return self.FIXED + n_bytes * self.restore_byte

    def save_seconds(self, n_tokens: float) -> float:
        return self.FIXED + n_tokens * self.token_bytes * self.save_byte
