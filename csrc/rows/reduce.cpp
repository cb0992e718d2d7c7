// Ordered sums of bf16 rows. One kernel, written once over a vector type and compiled for each instruction set; every
// lane does the same IEEE operations in the same order, so all variants give the same bits (-ffp-contract=off).
#include <cstring>

#include "rows/rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace expertwire::rows {

float widen_bf16(std::uint16_t value) {
    const std::uint32_t bits = std::uint32_t{value} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

std::uint16_t round_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

namespace {

std::uint16_t load_u16(const std::byte* row, std::size_t column) {
    std::uint16_t value;
    std::memcpy(&value, row + 2 * column, sizeof value);
    return value;
}

float sum_column(const Sum& sum, std::size_t column) {
    float acc = 0.0f;
    if (sum.bias0 != nullptr) acc += widen_bf16(load_u16(sum.bias0, column));
    if (sum.bias1 != nullptr) acc += widen_bf16(load_u16(sum.bias1, column));
    std::uint32_t row = 0;
    for (std::uint32_t group = 0; group < sum.groups; ++group) {
        float p = 0.0f;
        for (; row < sum.ends[group]; ++row) p += widen_bf16(load_u16(sum.rows[row], column));
        acc += p;
    }
    return acc;
}

void reduce_columns(std::byte* out, const Sum& sum, std::size_t begin, std::size_t end) {
    for (std::size_t column = begin; column < end; ++column) {
        const std::uint16_t rounded = round_bf16(sum_column(sum, column));
        std::memcpy(out + 2 * column, &rounded, sizeof rounded);
    }
}

void round_columns(std::byte* out, const float* in, std::size_t begin, std::size_t end) {
    for (std::size_t column = begin; column < end; ++column) {
        const std::uint16_t rounded = round_bf16(in[column]);
        std::memcpy(out + 2 * column, &rounded, sizeof rounded);
    }
}

#if defined(__x86_64__)

// AVX2: 32 columns (one cache line of bf16) at a time. A vector holds eight pairs of columns: the even ones are widened
// by a shift, the odd ones by a mask, and put together again when they are rounded, so that nothing is ever shuffled
// (with widening loads and a pack, two rows from the cache took twice as long).
#define EXPERTWIRE_AVX2 __attribute__((target("avx2"), always_inline)) inline

struct Line {
    __m256 even[2];
    __m256 odd[2];
};

EXPERTWIRE_AVX2 Line zero_line_avx2() {
    const __m256 zero = _mm256_setzero_ps();
    return {{zero, zero}, {zero, zero}};
}

EXPERTWIRE_AVX2 void add_line_avx2(Line& to, const std::byte* at) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int part = 0; part < 2; ++part) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32 * part));
        to.even[part] = _mm256_add_ps(to.even[part], _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
        to.odd[part] = _mm256_add_ps(to.odd[part], _mm256_castsi256_ps(_mm256_and_si256(pairs, high)));
    }
}

EXPERTWIRE_AVX2 void add_avx2(Line& to, const Line& line) {
    for (int part = 0; part < 2; ++part) {
        to.even[part] = _mm256_add_ps(to.even[part], line.even[part]);
        to.odd[part] = _mm256_add_ps(to.odd[part], line.odd[part]);
    }
}

EXPERTWIRE_AVX2 __m256i round_avx2(__m256 value) {  // the bf16 is the upper half of each lane; the lower half is noise
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_set1_ps(__builtin_nanf("")), nan));
}

EXPERTWIRE_AVX2 __m256i join_avx2(__m256 even, __m256 odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(round_avx2(even), 16), round_avx2(odd), 0xAA);
}

// The columns of one line, summed. The first group of a sum without bias is the sum itself: a sum that began at +0 is
// never −0, so adding it to +0 would not change a bit.
EXPERTWIRE_AVX2 Line sum_line_avx2(const Sum& sum, std::size_t at) {
    Line acc = zero_line_avx2();
    if (sum.bias0 != nullptr) add_line_avx2(acc, sum.bias0 + at);
    if (sum.bias1 != nullptr) add_line_avx2(acc, sum.bias1 + at);
    const bool biased = sum.bias0 != nullptr || sum.bias1 != nullptr;
    std::uint32_t row = 0;
    for (std::uint32_t group = 0; group < sum.groups; ++group) {
        Line p = zero_line_avx2();
        for (; row < sum.ends[group]; ++row) add_line_avx2(p, sum.rows[row] + at);
        if (group == 0 && !biased) {
            acc = p;
        } else {
            add_avx2(acc, p);
        }
    }
    return acc;
}

__attribute__((target("avx2"))) void reduce_avx2(std::byte* out, const Sum& sum, std::size_t columns, bool streaming) {
    std::size_t column = 0;
    for (; column + 32 <= columns; column += 32) {
        const Line acc = sum_line_avx2(sum, 2 * column);
        __m256i* const to = reinterpret_cast<__m256i*>(out + 2 * column);
        const __m256i low = join_avx2(acc.even[0], acc.odd[0]);
        const __m256i high = join_avx2(acc.even[1], acc.odd[1]);
        if (streaming) {
            _mm256_stream_si256(to, low);
            _mm256_stream_si256(to + 1, high);
        } else {
            _mm256_storeu_si256(to, low);
            _mm256_storeu_si256(to + 1, high);
        }
    }
    reduce_columns(out, sum, column, columns);
}

EXPERTWIRE_AVX2 __m256i pack_avx2(__m256 low, __m256 high) {
    const __m256i packed =
        _mm256_packus_epi32(_mm256_srli_epi32(round_avx2(low), 16), _mm256_srli_epi32(round_avx2(high), 16));
    return _mm256_permute4x64_epi64(packed, 0xD8);  // packus works within 128-bit halves
}

__attribute__((target("avx2"))) void round_row_avx2(std::byte* out, const float* in, std::size_t columns) {
    std::size_t column = 0;
    for (; column + 16 <= columns; column += 16) {
        const __m256i packed = pack_avx2(_mm256_loadu_ps(in + column), _mm256_loadu_ps(in + column + 8));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * column), packed);
    }
    round_columns(out, in, column, columns);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC 12's own AVX-512 header
#endif

// AVX-512: the same line in two halves. Not the bf16 instruction: it flushes denormals.
#define EXPERTWIRE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline

EXPERTWIRE_AVX512 __m512 widen_avx512(const std::byte* at) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

EXPERTWIRE_AVX512 __m256i round_avx512(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7FC0)));
}

EXPERTWIRE_AVX512 void add_line_avx512(__m512 (&to)[2], const std::byte* at) {
    to[0] = _mm512_add_ps(to[0], widen_avx512(at));
    to[1] = _mm512_add_ps(to[1], widen_avx512(at + 32));
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) void reduce_avx512(std::byte* out, const Sum& sum,
                                                                        std::size_t columns, bool streaming) {
    std::size_t column = 0;
    for (; column + 32 <= columns; column += 32) {
        const std::size_t at = 2 * column;
        __m512 acc[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (sum.bias0 != nullptr) add_line_avx512(acc, sum.bias0 + at);
        if (sum.bias1 != nullptr) add_line_avx512(acc, sum.bias1 + at);
        std::uint32_t row = 0;
        for (std::uint32_t group = 0; group < sum.groups; ++group) {
            __m512 p[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (; row < sum.ends[group]; ++row) add_line_avx512(p, sum.rows[row] + at);
            acc[0] = _mm512_add_ps(acc[0], p[0]);
            acc[1] = _mm512_add_ps(acc[1], p[1]);
        }
        __m256i* const to = reinterpret_cast<__m256i*>(out + at);
        if (streaming) {
            _mm256_stream_si256(to, round_avx512(acc[0]));
            _mm256_stream_si256(to + 1, round_avx512(acc[1]));
        } else {
            _mm256_storeu_si256(to, round_avx512(acc[0]));
            _mm256_storeu_si256(to + 1, round_avx512(acc[1]));
        }
    }
    reduce_columns(out, sum, column, columns);
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) void round_row_avx512(std::byte* out, const float* in,
                                                                           std::size_t columns) {
    std::size_t column = 0;
    for (; column + 16 <= columns; column += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * column), round_avx512(_mm512_loadu_ps(in + column)));
    }
    round_columns(out, in, column, columns);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif  // __x86_64__

void reduce_dispatch(Isa isa, std::byte* out, const Sum& sum, std::size_t columns, bool streaming) {
#if defined(__x86_64__)
    const bool aligned = reinterpret_cast<std::uintptr_t>(out) % 32 == 0;
    if (isa == Isa::avx512) return reduce_avx512(out, sum, columns, streaming && aligned);
    if (isa == Isa::avx2) return reduce_avx2(out, sum, columns, streaming && aligned);
#endif
    static_cast<void>(isa);
    static_cast<void>(streaming);
    reduce_columns(out, sum, 0, columns);
}

}  // namespace

bool has(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
    }
    if (isa == Isa::avx2) return __builtin_cpu_supports("avx2");
#endif
    return isa == Isa::baseline;
}

Isa best_isa() {
    static const Isa best = has(Isa::avx512) ? Isa::avx512 : has(Isa::avx2) ? Isa::avx2 : Isa::baseline;
    return best;
}

void reduce(std::byte* out, const Sum& sum, std::size_t columns, Store store) {
    reduce_dispatch(best_isa(), out, sum, columns, store == Store::streaming);
}

void reduce_with(Isa isa, std::byte* out, const Sum& sum, std::size_t columns) {
    reduce_dispatch(isa, out, sum, columns, false);
}

void round_row_with(Isa isa, std::byte* out, const float* in, std::size_t columns) {
#if defined(__x86_64__)
    if (isa == Isa::avx512) return round_row_avx512(out, in, columns);
    if (isa == Isa::avx2) return round_row_avx2(out, in, columns);
#endif
    static_cast<void>(isa);
    round_columns(out, in, 0, columns);
}

void reduce_f32(float* out, const Sum& sum, std::size_t columns) {
    for (std::size_t column = 0; column < columns; ++column) {
        float acc = 0.0f;
        std::uint32_t row = 0;
        for (std::uint32_t group = 0; group < sum.groups; ++group) {
            float p = 0.0f;
            for (; row < sum.ends[group]; ++row) {
                float value;
                std::memcpy(&value, sum.rows[row] + column * sizeof value, sizeof value);
                p += value;
            }
            acc += p;
        }
        out[column] = acc;
    }
}

}  // namespace expertwire::rows
