// Each kernel is written once without a branch in its inner loop and compiled for each instruction set: the compiler
// vectorises it, and every lane does the same IEEE operations in the same order (-ffp-contract=off).
#include "rows/fp8.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace expertwire::rows {

namespace {

#define EXPERTWIRE_INLINE __attribute__((always_inline)) inline

constexpr float kLargest = 448.0f;  // of e4m3fn
constexpr float kLeastAmax = 1e-4f;
constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;

// Without a branch: GCC 12 does not vectorise a loop that has one.
EXPERTWIRE_INLINE std::uint32_t choose(bool condition, std::uint32_t yes, std::uint32_t no) {
    const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

// e4m3fn of a value of at most 448 in magnitude, or NaN. Below 2^-6 the results are multiples of 2^-9: adding 2^14 lets
// the adder round there. Above, the exponent is moved to its new bias and the mantissa rounded by an addition.
EXPERTWIRE_INLINE std::uint8_t round_fp8(float value) {
    constexpr std::uint32_t denormal = 141u << 23;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t size = bits & kMagnitude;
    const std::uint32_t normal = (size + 0xC407FFFFu + ((size >> 20) & 1u)) >> 20;  // −120 << 23, plus half an ulp
    const float shifted = std::bit_cast<float>(size) + std::bit_cast<float>(denormal);
    const std::uint32_t small = std::bit_cast<std::uint32_t>(shifted) - denormal;
    const std::uint32_t fits = choose(size < (121u << 23), small, normal);
    const std::uint32_t most = choose(fits > 0x7Eu, 0x7Eu, fits) | ((bits >> 24) & 0x80u);
    return static_cast<std::uint8_t>(choose(size >= kInfinity, 0x7Fu, most));
}

EXPERTWIRE_INLINE void quantise_block(std::uint8_t* out, float* scale, const std::uint16_t* in, std::size_t columns,
                                      ScaleKind kind) {
    // As integers, magnitudes of bf16 are in the order of their values, and NaN is above infinity.
    std::int16_t most = 0;
    for (std::size_t i = 0; i < columns; ++i) most = std::max(most, static_cast<std::int16_t>(in[i] & 0x7FFF));
    float amax = widen_bf16(static_cast<std::uint16_t>(most));
    if (most > 0x7F80) amax = std::numeric_limits<float>::quiet_NaN();
    if (amax < kLeastAmax) amax = kLeastAmax;
    *scale = amax * (1.0f / kLargest);
    float factor = kLargest / amax;
    if (kind == ScaleKind::power_of_two) {
        const auto bits = std::bit_cast<std::uint32_t>(*scale);
        if (bits < kInfinity) *scale = std::bit_cast<float>((bits + 0x7FFFFFu) & ~0x7FFFFFu);
        factor = 1.0f / *scale;
    }
    for (std::size_t i = 0; i < columns; ++i) {
        out[i] = round_fp8(std::bit_cast<float>(std::uint32_t{in[i]} << 16) * factor);
    }
}

EXPERTWIRE_INLINE void quantise_row(std::byte* out, float* scales, const std::byte* row, std::size_t columns,
                                    ScaleKind kind) {
    for (std::size_t block = 0; block < scale_blocks(columns); ++block) {
        const std::size_t first = block * kScaleColumns;
        std::uint16_t in[kScaleColumns];  // the row may lie anywhere, at any alignment
        std::uint8_t made[kScaleColumns];
        if (first + kScaleColumns <= columns) {
            std::memcpy(in, row + 2 * first, sizeof in);
            quantise_block(made, scales + block, in, kScaleColumns, kind);
            std::memcpy(out + first, made, sizeof made);
        } else {
            const std::size_t rest = columns - first;
            std::memcpy(in, row + 2 * first, 2 * rest);
            quantise_block(made, scales + block, in, rest, kind);
            std::memcpy(out + first, made, rest);
        }
    }
}

constexpr std::size_t kSumColumns = 256;  // sums of so many columns stay in the nearest cache

EXPERTWIRE_INLINE void weigh(float* acc, const std::byte* row, float weight, std::size_t columns) {
    std::uint16_t in[kSumColumns];
    std::memcpy(in, row, 2 * columns);
    for (std::size_t i = 0; i < columns; ++i) {
        const float product = weight * std::bit_cast<float>(std::uint32_t{in[i]} << 16);
        acc[i] += product;
    }
}

EXPERTWIRE_INLINE void round_columns(std::byte* out, const float* acc, std::size_t columns) {
    std::uint16_t made[kSumColumns];
    for (std::size_t i = 0; i < columns; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(acc[i]);
        const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        made[i] = static_cast<std::uint16_t>(choose((bits & kMagnitude) > kInfinity, 0x7FC0u, rounded));
    }
    std::memcpy(out, made, 2 * columns);
}

EXPERTWIRE_INLINE void weighted_row(std::byte* out, const std::byte* const* rows, const float* weights,
                                    std::uint32_t count, std::size_t columns) {
    float acc[kSumColumns];
    for (std::size_t first = 0; first < columns; first += kSumColumns) {
        const std::size_t here = std::min(kSumColumns, columns - first);
        if (here == kSumColumns) {  // a constant length: the compiler unrolls these
            for (float& value : acc) value = 0.0f;
            for (std::uint32_t row = 0; row < count; ++row) {
                weigh(acc, rows[row] + 2 * first, weights[row], kSumColumns);
            }
            round_columns(out + 2 * first, acc, kSumColumns);
            continue;
        }
        std::fill_n(acc, here, 0.0f);
        for (std::uint32_t row = 0; row < count; ++row) weigh(acc, rows[row] + 2 * first, weights[row], here);
        round_columns(out + 2 * first, acc, here);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void quantise_avx2(std::byte* out, float* scales, const std::byte* row,
                                                   std::size_t columns, ScaleKind kind) {
    quantise_row(out, scales, row, columns, kind);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void quantise_avx512(std::byte* out, float* scales,
                                                                          const std::byte* row, std::size_t columns,
                                                                          ScaleKind kind) {
    quantise_row(out, scales, row, columns, kind);
}
__attribute__((target("avx2"))) void weighted_avx2(std::byte* out, const std::byte* const* rows, const float* weights,
                                                   std::uint32_t count, std::size_t columns) {
    weighted_row(out, rows, weights, count, columns);
}
__attribute__((target("avx512f,avx512bw,avx512vl"))) void weighted_avx512(std::byte* out, const std::byte* const* rows,
                                                                          const float* weights, std::uint32_t count,
                                                                          std::size_t columns) {
    weighted_row(out, rows, weights, count, columns);
}
#endif

}  // namespace

void quantise_with(Isa isa, std::byte* out, float* scales, const std::byte* row, std::size_t columns, ScaleKind kind) {
#if defined(__x86_64__)
    if (isa == Isa::avx512) return quantise_avx512(out, scales, row, columns, kind);
    if (isa == Isa::avx2) return quantise_avx2(out, scales, row, columns, kind);
#endif
    static_cast<void>(isa);
    quantise_row(out, scales, row, columns, kind);
}

void quantise(std::byte* out, float* scales, const std::byte* row, std::size_t columns, ScaleKind kind) {
    quantise_with(best_isa(), out, scales, row, columns, kind);
}

void pack_ue8m0(std::uint32_t* words, const float* scales, std::size_t blocks) {
    std::fill_n(words, (blocks + 3) / 4, 0u);
    for (std::size_t block = 0; block < blocks; ++block) {
        const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(scales[block]) >> 23) & 0xFFu;
        words[block / 4] |= exponent << (8 * (block % 4));
    }
}

void reduce_weighted_with(Isa isa, std::byte* out, const std::byte* const* rows, const float* weights,
                          std::uint32_t count, std::size_t columns) {
#if defined(__x86_64__)
    if (isa == Isa::avx512) return weighted_avx512(out, rows, weights, count, columns);
    if (isa == Isa::avx2) return weighted_avx2(out, rows, weights, count, columns);
#endif
    static_cast<void>(isa);
    weighted_row(out, rows, weights, count, columns);
}

void reduce_weighted(std::byte* out, const std::byte* const* rows, const float* weights, std::uint32_t count,
                     std::size_t columns) {
    reduce_weighted_with(best_isa(), out, rows, weights, count, columns);
}

}  // namespace expertwire::rows
