#include "exchange/low_latency_layout.hpp"

#include <algorithm>

#include "rows/fp8.hpp"

namespace expertwire::exchange {

namespace {

constexpr std::uint64_t kBlockAlignment = 16;  // small: a hint for one token must do

std::uint64_t align_block(std::uint64_t bytes) {
    return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}

// A shape that nothing could hold must not come out as one that fits: beyond this it is all the same.
std::uint64_t product(std::uint64_t a, std::uint64_t b) {
    constexpr std::uint64_t kFarTooMuch = std::uint64_t{1} << 60;  // sums of a few do not overflow
    const unsigned __int128 exact = static_cast<unsigned __int128>(a) * b;
    return exact < kFarTooMuch ? static_cast<std::uint64_t>(exact) : kFarTooMuch;
}

std::uint64_t most_rows(const LowLatencyCall& call) {
    std::uint64_t most = 0;
    for (std::uint32_t rank = 0; rank + 1 < call.expert_first.size(); ++rank)
        most = std::max(most, call.rows_max(rank));
    return most;
}

}  // namespace

std::uint64_t LowLatencyCall::scale_words() const {
    if (format == RowFormat::bf16) return 0;
    const std::uint64_t blocks = rows::scale_blocks(hidden);
    return format == RowFormat::fp8_ue8m0 ? (blocks + 3) / 4 : blocks;
}

std::uint64_t LowLatencyCall::row_bytes() const {
    return format == RowFormat::bf16 ? 2 * hidden : hidden;
}

LowLatencyBlocks blocks_of(const LowLatencyCall& call) {
    std::uint64_t row = 2 * call.hidden;
    for (const RowFormat format : {RowFormat::bf16, RowFormat::fp8}) {
        LowLatencyCall other;
        other.hidden = call.hidden;
        other.format = format;
        row = std::max(row, other.dispatched_bytes());
    }
    LowLatencyBlocks blocks;
    blocks.block = align_block(product(most_rows(call), row));
    blocks.bytes = product(call.expert_first.size() - 1, blocks.block);
    return blocks;
}

// Rows for another node wait behind the blocks, in rounds where they are many: a dispatch's block of one rank at a time
// at the least, a combine's row.
std::uint64_t low_latency_bytes(const LowLatencyCall& call, const NodeTable& nodes) {
    std::uint64_t outgoing = 0;
    if (nodes.nodes() > 1)
        outgoing = std::max(align_block(product(most_rows(call), call.dispatched_bytes())), 2 * call.hidden);
    return 2 * align_block(blocks_of(call).bytes + outgoing);
}

std::uint64_t combine_buffer_bytes(const LowLatencyCall& call, std::uint32_t rank) {
    const auto ranks = static_cast<std::uint64_t>(call.expert_first.size() - 1);
    return product(product(call.owned(rank) * ranks, call.tokens_max), 2 * call.hidden);
}

LowLatencyLayout::LowLatencyLayout(std::uint32_t ranks, std::uint32_t local_experts_max)
    : ranks_(ranks),
      notify_bytes_(align_up(sizeof(LowLatencyNotify) + std::uint64_t{local_experts_max} * sizeof(std::uint32_t))),
      notify_in_(word(3 * std::uint64_t{ranks})) {}

}  // namespace expertwire::exchange
