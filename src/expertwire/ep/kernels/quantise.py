"""Rows as FP8: e4m3 with a scale for each 128 columns, in registers, on their way from bf16 to their receivers.

The rounding is done on integers, so that every device and Triton's interpreter give the bits that ep/low_latency_reference.py gives: to
nearest even, every NaN 0x7F. About a dozen instructions a value: 0.5 µs of a program that has a row of 7168.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(128)  # of a scale
_AMAX_MIN = tl.constexpr(1e-4)
_LARGEST = tl.constexpr(448.0)
_FRACTION = tl.constexpr(1.0 / 448.0)
_QUIET_NAN = tl.constexpr(0x7FC00000)
_LEAST_NORMAL = tl.constexpr(0x3C800000)  # 2^-6, the smallest that is not stored as a multiple of 2^-9


@triton.jit
def to_e4m3(value):
    """fp32 of at most 448 to the byte of an e4m3, as an int32."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has a last bit of 2^-9: the sum's rounding is the one that is wanted.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    found = tl.minimum(tl.where(size < _LEAST_NORMAL, small, normal), 0x7E) | ((bits >> 24) & 0x80)
    return tl.where(value == value, found, 0x7F)


@triton.jit
def quantise(value, ROUND: tl.constexpr):
    """fp32 [blocks, 128]. Returns e4m3 bytes [blocks, 128] and the bits of the scales [blocks], as int32. ROUND: scales are powers
    of two."""
    strange = value != value
    amax = tl.maximum(tl.max(tl.where(strange, 0.0, tl.abs(value)), axis=1), _AMAX_MIN)
    amax = tl.where(tl.max(strange.to(tl.int32), axis=1) > 0, float("nan"), amax)
    scale = amax * _FRACTION
    if ROUND:
        up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), up, scale)
        factor = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    else:
        factor = tl.div_rn(tl.zeros_like(amax) + _LARGEST, amax)
    bits = tl.where(scale == scale, scale.to(tl.int32, bitcast=True), _QUIET_NAN)
    return to_e4m3(value * factor[:, None]), bits


@triton.jit
def pack_exponents(bits, WORDS: tl.constexpr):
    """Bits of scales [4 · WORDS] as UE8M0: four exponents in an int32 [WORDS], the first in the lowest byte."""
    exponent = tl.reshape((bits >> 23) & 0xFF, [WORDS, 4])
    return tl.sum(exponent << (8 * tl.arange(0, 4))[None, :], axis=1)
