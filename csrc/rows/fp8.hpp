// What the low-latency mode does to rows: bf16 to FP8 (e4m3fn) with one scale for each block of 128 columns, and sums
// of rows with a weight each. Pure functions; the same bits with every instruction set, and those of torch on a CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows/rows.hpp"

namespace expertwire::rows {

constexpr std::size_t kScaleColumns = 128;

constexpr std::size_t scale_blocks(std::size_t columns) {
    return (columns + kScaleColumns - 1) / kScaleColumns;
}

// exact: amax · fp32(1/448). power_of_two: that, rounded up to a power of two.
enum class ScaleKind : std::uint8_t { exact, power_of_two };

// For each block of 128 columns (the last may be shorter): amax = max |x|, at least 1e-4; scale as above; each element
// is x · (448 / amax), or x / scale for a power of two, rounded to nearest even and saturated at 448. A NaN or an
// infinity among them: as torch on a CPU, a NaN makes the whole block NaN, an infinity makes itself NaN and the others
// 0; every NaN is 0x7F. `out`: e4m3fn[columns]; `scales`: f32[scale_blocks(columns)].
void quantise(std::byte* out, float* scales, const std::byte* row, std::size_t columns, ScaleKind kind);

// UE8M0: four exponents in each word, the first in the lowest byte; what a last word lacks is 0. `words`:
// u32[ceil(blocks / 4)]; `scales` are powers of two, and infinity and NaN become 255, its NaN.
void pack_ue8m0(std::uint32_t* words, const float* scales, std::size_t blocks);

// One output row of a low-latency combine: acc = 0; acc += fp32(weight · row) for each row in the order given; the
// result is bf16(acc). `out`: bf16[columns].
void reduce_weighted(std::byte* out, const std::byte* const* rows, const float* weights, std::uint32_t count,
                     std::size_t columns);

// The variants that this machine can run, for tests.
void quantise_with(Isa isa, std::byte* out, float* scales, const std::byte* row, std::size_t columns, ScaleKind kind);
void reduce_weighted_with(Isa isa, std::byte* out, const std::byte* const* rows, const float* weights,
                          std::uint32_t count, std::size_t columns);

}  // namespace expertwire::rows
