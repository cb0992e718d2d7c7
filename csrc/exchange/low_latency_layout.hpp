// Where everything of the low-latency mode lies: pure functions of the shape and of what a call agrees on, the same on
// every rank. Two regions: `control` (words and notify records) and `data` (rows), whose two halves serve the calls in
// turn: call k has half k % 2, of every rank, from the moment that call k − 2 has been consumed there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exchange/layout.hpp"

namespace expertwire::exchange {

// How rows of a dispatch travel and arrive.
enum class RowFormat : std::uint32_t {
    bf16 = 0,
    fp8,        // e4m3fn with scales f32
    fp8_round,  // scales are powers of two
    fp8_ue8m0,  // the same, four exponents to an int32
};

// What all ranks must agree on, beside the operation itself.
struct LowLatencyCall {
    std::uint64_t tokens_max = 0;  // M: most tokens of a rank
    std::uint64_t hidden = 0;      // H: columns
    std::uint64_t num_experts = 0;
    std::uint32_t topk = 0;
    RowFormat format = RowFormat::bf16;
    std::vector<std::uint64_t> expert_first;  // [ranks + 1]: rank r owns [first[r], first[r + 1])

    std::uint64_t owned(std::uint32_t rank) const { return expert_first[rank + 1] - expert_first[rank]; }
    // Most rows between a rank and the experts of `rank`: a token's ids are distinct, or there is room for fewer
    // tokens.
    std::uint64_t rows_max(std::uint32_t rank) const { return tokens_max * (topk < owned(rank) ? topk : owned(rank)); }
    std::uint64_t scale_words() const;        // 32-bit words of scales a row: 0 for bf16
    std::uint64_t row_bytes() const;          // of a dispatch, without its scales
    std::uint64_t dispatched_bytes() const {  // most that travels for a row: its slot's number and place, scales, row
        return 8 + 4 * scale_words() + row_bytes();
    }
};

// Blocks of one half: block r at a receiver has what rank r sent it. The same for dispatch and combine, for every
// receiver and every format of rows: a rank that was stopped and left out may write rows of a call that is long over
// when it wakes, and they must land in no block but its own.
struct LowLatencyBlocks {
    std::uint64_t block = 0;  // bytes of one
    std::uint64_t bytes = 0;  // all blocks; what follows is free for this rank's own rows on their way out

    std::uint64_t of(std::uint32_t source) const { return source * block; }  // from the start of the half
};
LowLatencyBlocks blocks_of(const LowLatencyCall& call);

// Bytes of the data region with which no rank lacks room in a dispatch and its combine.
std::uint64_t low_latency_bytes(const LowLatencyCall& call, const NodeTable& nodes);
// Bytes of a half behind the blocks of a combine that the zero-copy buffer of `rank` takes.
std::uint64_t combine_buffer_bytes(const LowLatencyCall& call, std::uint32_t rank);

struct LowLatencyShape {
    std::uint32_t rank = 0;
    NodeTable nodes;
    std::uint32_t local_experts_max = 0;
};

// Words and records in rank d's control region; each has one writer, which names it.
class LowLatencyLayout {
  public:
    LowLatencyLayout(std::uint32_t ranks, std::uint32_t local_experts_max);

    // The last call of this parity whose rows from `source` are all here. A word for each parity: the signals of two
    // calls may arrive in any order, and each adds to its own word.
    std::uint64_t arrived(std::uint32_t parity, std::uint32_t source) const { return word(parity * ranks_ + source); }
    // The last call of which `peer` has consumed what everybody sent it, and all before.
    std::uint64_t consumed(std::uint32_t peer) const { return word(2 * std::uint64_t{ranks_} + peer); }

    std::uint64_t notify_in(std::uint32_t parity, std::uint32_t source) const {
        return notify_in_ + (std::uint64_t{parity} * ranks_ + source) * notify_bytes_;
    }
    std::uint64_t notify_out(std::uint32_t parity, std::uint32_t to) const { return notify_in(2 + parity, to); }
    std::uint64_t control_bytes() const { return notify_in(4, 0); }

  private:
    // A cache line each: writers on other cores do not push each other's words out.
    static std::uint64_t word(std::uint64_t index) { return index * kAlignment; }

    std::uint32_t ranks_;
    std::uint64_t notify_bytes_;
    std::uint64_t notify_in_;
};

// What a rank says to every other with its rows. A dispatch's counts follow: rows per local expert of the receiver.
struct LowLatencyNotify {
    std::uint32_t magic = 0;
    std::uint32_t operation = 0;  // Kind
    std::uint64_t epoch = 0;
    std::uint64_t handle_epoch = 0;  // combine: of its dispatch
    std::uint64_t tokens_max = 0;
    std::uint64_t hidden = 0;
    std::uint64_t num_experts = 0;
    std::uint32_t topk = 0;
    std::uint32_t format = 0;
    std::uint64_t rows = 0;  // that come with it, to this receiver
};

}  // namespace expertwire::exchange
