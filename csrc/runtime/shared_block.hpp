// The layout of region "runtime": what ranks tell each other about themselves. Pure arithmetic from the number of
// ranks, the same everywhere. User counters live in region "counters"; no signal of a user can reach these words (SPEC
// T9).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "runtime/doorbell.hpp"

namespace expertwire::runtime {

// One rank's words about itself, in two places. Its own block holds them as it stores them: who maps that reads them
// there, so that nobody stores to memory of another's, and a process that was removed, and wakes, tells nobody. The
// others have a copy of their own, by fabric adds of the differences (SPEC T22: a word has one kind of writer).
struct alignas(64) PulseBlock {
    std::atomic<std::uint64_t> heartbeat;
    std::atomic<std::uint64_t> call_sequence;
    std::atomic<std::uint64_t> phase;
    std::atomic<std::uint64_t> verdict;  // a Verdict's word, 0: none
    std::atomic<std::uint64_t> leaving;  // the instance that leaves, 0: none does
    std::atomic<std::uint64_t> fenced;   // bit rank % 64: I have removed it, and what it says of me counts for nothing
    std::atomic<std::uint64_t> barrier;  // the last epoch; absolute
    std::atomic<std::uint64_t> low_latency_call;  // of that mode: the last call begun << 8 | its stage
    std::atomic<std::uint64_t> low_latency_told;  // an exchange::LowLatencyWord for this reader alone: 0 in own()
};
static_assert(sizeof(PulseBlock) == 128);

// In one rank's block, about another one.
struct PeerWords {
    std::atomic<std::uint64_t> has;     // by the block's owner: the instance that has that name here, 0: none
    std::atomic<std::uint64_t> reader;  // by the other, its instance: it maps this block, and reads own() there
    std::atomic<std::uint64_t> low_latency_told;  // by the block's owner, for the other alone: a LowLatencyWord
};

// A word may outlive the process that said it, and the one that it is about: not everybody removes a rank, and adds who
// comes next under its name, at the same time. So a verdict carries tags of both instances, and counts only for these.
struct Verdict {
    std::uint32_t accused = 0;  // rank
    std::uint32_t accused_tag = 0;
    std::uint32_t speaker_tag = 0;

    // 24 bits, never 0: two processes that have the same rank one after the other share it once in 16 million times.
    static std::uint32_t tag(std::uint64_t instance) {
        const auto low = static_cast<std::uint32_t>(instance & 0xff'ffff);
        return low == 0 ? 1 : low;
    }
    std::uint64_t word() const { return accused | std::uint64_t{accused_tag} << 16 | std::uint64_t{speaker_tag} << 40; }
    static Verdict of(std::uint64_t word) {
        return {static_cast<std::uint32_t>(word & 0xffff), static_cast<std::uint32_t>(word >> 16 & 0xff'ffff),
                static_cast<std::uint32_t>(word >> 40)};
    }
};

struct SharedLayout {
    std::uint32_t ranks = 0;

    static constexpr std::uint64_t doorbell_offset = 0;
    static constexpr std::uint64_t own_offset = sizeof(DoorbellWord);
    static constexpr std::uint64_t pulses_offset = own_offset + sizeof(PulseBlock);
    constexpr std::uint64_t pulse_offset(std::uint32_t source) const {
        return pulses_offset + sizeof(PulseBlock) * source;
    }
    constexpr std::uint64_t barrier_offset(std::uint32_t source) const {
        return pulse_offset(source) + offsetof(PulseBlock, barrier);
    }
    constexpr std::uint64_t about_offset(std::uint32_t rank) const {
        return pulse_offset(ranks) + sizeof(PeerWords) * rank;
    }
    constexpr std::uint64_t bytes() const { return about_offset(ranks); }
};

// A view of one rank's region, mine or mapped.
struct SharedBlock {
    std::byte* base = nullptr;
    SharedLayout layout;

    bool present() const { return base != nullptr; }
    DoorbellWord* doorbell() const { return reinterpret_cast<DoorbellWord*>(base + SharedLayout::doorbell_offset); }
    PulseBlock& own() const { return *reinterpret_cast<PulseBlock*>(base + SharedLayout::own_offset); }
    PulseBlock& pulse(std::uint32_t source) const {
        return *reinterpret_cast<PulseBlock*>(base + layout.pulse_offset(source));
    }
    PeerWords& about(std::uint32_t rank) const {
        return *reinterpret_cast<PeerWords*>(base + layout.about_offset(rank));
    }
};

}  // namespace expertwire::runtime
