#include "exchange/low_latency_layout.hpp"

#include <algorithm>

#include "rows/fp8.hpp"

namespace expertwire::exchange {

namespace {

constexpr std::uint64_t kBlockAlignment = 16;  // small: a hint for one token must do

std::uint64_t align_block(std::uint64_t bytes) {
    return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
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

LowLatencyBlocks dispatch_blocks(const LowLatencyCall& call, std::uint32_t receiver) {
    const auto ranks = static_cast<std::uint32_t>(call.expert_first.size() - 1);
    const std::uint64_t block = align_block(call.rows_max(receiver) * call.dispatched_bytes());
    LowLatencyBlocks blocks;
    for (std::uint32_t source = 0; source < ranks; ++source) blocks.offset.push_back(source * block);
    blocks.bytes = ranks * block;
    return blocks;
}

LowLatencyBlocks combine_blocks(const LowLatencyCall& call) {
    const auto ranks = static_cast<std::uint32_t>(call.expert_first.size() - 1);
    LowLatencyBlocks blocks;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        blocks.offset.push_back(blocks.bytes);
        blocks.bytes += align_block(call.rows_max(rank) * 2 * call.hidden);
    }
    return blocks;
}

// Rows for another node wait behind the blocks, in rounds where they are many: a dispatch's block of one rank at a time
// at the least, a combine's row.
std::uint64_t low_latency_bytes(const LowLatencyCall& call, const NodeTable& nodes) {
    std::uint64_t largest_block = 0;
    std::uint64_t most = 0;
    const bool far = nodes.nodes() > 1;
    for (std::uint32_t rank = 0; rank < nodes.ranks(); ++rank) {
        const LowLatencyBlocks blocks = dispatch_blocks(call, rank);
        largest_block = std::max(largest_block, blocks.bytes / nodes.ranks());
        most = std::max(most, blocks.bytes);
    }
    const std::uint64_t dispatched = most + (far ? largest_block : 0);
    const std::uint64_t combined = combine_blocks(call).bytes + (far ? 2 * call.hidden : 0);
    return 2 * align_block(std::max(dispatched, combined));
}

std::uint64_t combine_buffer_bytes(const LowLatencyCall& call, std::uint32_t rank) {
    const auto ranks = static_cast<std::uint64_t>(call.expert_first.size() - 1);
    return call.owned(rank) * ranks * call.tokens_max * 2 * call.hidden;
}

LowLatencyLayout::LowLatencyLayout(std::uint32_t ranks, std::uint32_t local_experts_max)
    : ranks_(ranks),
      notify_bytes_(align_up(sizeof(LowLatencyNotify) + std::uint64_t{local_experts_max} * sizeof(std::uint32_t))),
      notify_in_(word(3 * std::uint64_t{ranks})) {}

}  // namespace expertwire::exchange
