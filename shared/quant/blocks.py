"""Quantised rows as arrays, before they lie in chunks. Knows no file, no model and no chunk layout.

R rows (outputs), C cols (inputs), G = C / 32 groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.kernel.matrix import Float32


@dataclass(frozen=True, slots=True)
class Int4Blocks:
    """w = scale*q + min. `scale`, `min` float16 (R, G); `nibbles` uint8 (R, G, 16).

    Nibble byte j of a group holds q[j] in its low and q[16 + j] in its high half, as GGUF's Q4_0
    and Q4_1 do.
    """

    scale: npt.NDArray[np.float16]
    min: npt.NDArray[np.float16]
    nibbles: npt.NDArray[np.uint8]

    def dequantized(self) -> Float32:
        """The weights as the kernel sees them, float32 (R, C)."""
        rows, groups, half = self.nibbles.shape
        values = np.empty((rows, groups, 2 * half), np.float32)
        values[..., :half] = self.nibbles & np.uint8(15)
        values[..., half:] = self.nibbles >> np.uint8(4)
        values *= self.scale.astype(np.float32)[..., None]
        values += self.min.astype(np.float32)[..., None]
        return values.reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """w = scale*q. `scale` float16 (R, G); `q` int8 (R, G, 32)."""

    scale: npt.NDArray[np.float16]
    q: npt.NDArray[np.int8]

    def dequantized(self) -> Float32:
        """The weights as the kernel sees them, float32 (R, C)."""
        values: Float32 = self.q * self.scale.astype(np.float32)[..., None]
        return values.reshape(len(values), -1)


TensorNumbers = Int4Blocks | Int8Blocks | Float32


def float32_of(numbers: TensorNumbers) -> Float32:
    """The weights behind any kernel format, float32 (R, C)."""
    if isinstance(numbers, Int4Blocks | Int8Blocks):
        return numbers.dequantized()
    return numbers
