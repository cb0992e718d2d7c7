// Words that one rank writes and another polls: epoch << 28 | count. Nothing is ever reset: a word of an older epoch
// counts as zero (DESIGN: epochs never mix). A writer of the same node stores; one of another node adds what is
// missing, in any order, since it is the word's only writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/mutants.hpp"

namespace expertwire::exchange {

constexpr std::uint32_t kCountBits = 28;
constexpr std::uint64_t kCountMax = (std::uint64_t{1} << kCountBits) - 1;  // rows or chunks of one operation
constexpr std::uint64_t kEpochMax = (std::uint64_t{1} << (64 - kCountBits)) - 1;

constexpr std::uint64_t word_value(std::uint64_t epoch, std::uint64_t count) {
    return (epoch << kCountBits) | count;
}

inline std::uint32_t word_count(std::uint64_t word, std::uint64_t epoch) {
    if (mutant(Mutant::no_epoch_in_counters)) return static_cast<std::uint32_t>(word & kCountMax);
    return (word >> kCountBits) == epoch ? static_cast<std::uint32_t>(word & kCountMax) : 0;
}

inline std::uint64_t load_word(std::byte* control, std::uint64_t offset) {
    return std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(control + offset))
        .load(std::memory_order_acquire);
}

inline void store_word(std::byte* control, std::uint64_t offset, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(control + offset))
        .store(value, std::memory_order_release);
}

}  // namespace expertwire::exchange
