#include "exchange/layout.hpp"

#include <algorithm>

namespace expertwire::exchange {

namespace {

std::string ranks_and_nodes(std::size_t rank, std::uint32_t node) {
    return "node_of[" + std::to_string(rank) + "] is " + std::to_string(node);
}

}  // namespace

std::string node_table_error(const std::vector<std::uint32_t>& node_of) {
    if (node_of.empty()) return "node_of is empty, must name the node of at least one rank";
    std::vector<std::uint8_t> seen(node_of.size(), 0);
    std::uint32_t highest = 0;
    for (std::size_t rank = 0; rank < node_of.size(); ++rank) {
        if (node_of[rank] >= node_of.size()) {
            return ranks_and_nodes(rank, node_of[rank]) + ", must be below the number of ranks, " +
                   std::to_string(node_of.size());
        }
        seen[node_of[rank]] = 1;
        highest = std::max(highest, node_of[rank]);
    }
    for (std::uint32_t node = 0; node < highest; ++node) {
        if (!seen[node]) {
            return "node_of names node " + std::to_string(highest) + " but no rank is in node " + std::to_string(node) +
                   ": nodes are numbered from 0 without a gap";
        }
    }
    return {};
}

std::string shape_error(const Shape& shape) {
    if (shape.rank >= shape.nodes.ranks()) {
        return "rank is " + std::to_string(shape.rank) + ", must be below the number of ranks, " +
               std::to_string(shape.nodes.ranks());
    }
    if (shape.ring_slots == 0) return "ring_slots is 0, must be at least 1";
    if (shape.slot_bytes < kAlignment || shape.slot_bytes % kAlignment != 0) {
        return "slot_bytes is " + std::to_string(shape.slot_bytes) + ", must be a positive multiple of " +
               std::to_string(kAlignment);
    }
    return {};
}

std::string expert_first_error(const std::vector<std::uint64_t>& expert_first, std::uint64_t ranks,
                               std::uint64_t num_experts) {
    if (expert_first.size() != ranks + 1) {
        return "expert_first has " + std::to_string(expert_first.size()) +
               " entries, must have ranks + 1 = " + std::to_string(ranks + 1);
    }
    if (expert_first.front() != 0 || expert_first.back() != num_experts ||
        !std::is_sorted(expert_first.begin(), expert_first.end())) {
        return "expert_first must rise from 0 to num_experts, which is " + std::to_string(num_experts);
    }
    return {};
}

NodeTable::NodeTable(std::vector<std::uint32_t> node_of) : node_of_(std::move(node_of)), local_index_(node_of_.size()) {
    const std::uint32_t nodes = node_of_.empty() ? 0 : *std::max_element(node_of_.begin(), node_of_.end()) + 1;
    members_.resize(nodes);
    for (std::uint32_t rank = 0; rank < node_of_.size(); ++rank) {
        local_index_[rank] = size(node_of_[rank]);
        members_[node_of_[rank]].push_back(rank);
    }
}

Layout::Layout(const Shape& shape) : shape_(shape) {
    const NodeTable& nodes = shape_.nodes;
    const std::uint64_t ranks = nodes.ranks();
    notify_bytes_ =
        align_up(sizeof(NotifyHeader) + (ranks + nodes.nodes() + shape_.local_experts_max) * sizeof(std::uint32_t));
    notify_in_ =
        align_up(word((8 + shape_.ring_slots) * ranks + (1 + shape_.ring_slots) * std::uint64_t{nodes.nodes()}));
    notify_out_ = notify_in_ + 2 * ranks * notify_bytes_;
    control_bytes_ = notify_out_ + ranks * notify_bytes_;

    inner_index_.assign(ranks * nodes.nodes(), 0);
    inner_count_.assign(ranks, 0);
    for (std::uint32_t source = 0; source < ranks; ++source) {
        for (std::uint32_t node = 0; node < nodes.nodes(); ++node) {
            if (node == nodes.node_of(source)) continue;
            inner_index_[std::size_t{source} * nodes.nodes() + node] = inner_count_[nodes.entry(source, node)]++;
        }
    }
}

std::uint64_t Layout::staging_bytes(std::uint32_t rank) const {
    const std::uint64_t rings = shape_.nodes.nodes() - 1 + std::uint64_t{inner_count_[rank]};
    return rings * shape_.ring_slots * shape_.slot_bytes;
}

std::uint64_t Layout::notified(std::uint32_t parity, std::uint32_t source) const {
    return word(std::uint64_t{parity} * shape_.nodes.ranks() + source);
}
std::uint64_t Layout::credit_inner(std::uint32_t home) const {
    return word(2 * std::uint64_t{shape_.nodes.ranks()} + home);
}
std::uint64_t Layout::done(std::uint32_t source) const {
    return word(3 * std::uint64_t{shape_.nodes.ranks()} + source);
}
std::uint64_t Layout::ready(std::uint32_t peer) const {
    return word(4 * std::uint64_t{shape_.nodes.ranks()} + peer);
}
std::uint64_t Layout::read_done(std::uint32_t peer) const {
    return word(5 * std::uint64_t{shape_.nodes.ranks()} + peer);
}
std::uint64_t Layout::taken(std::uint32_t peer) const {
    return word(6 * std::uint64_t{shape_.nodes.ranks()} + peer);
}
std::uint64_t Layout::consumed(std::uint32_t home) const {
    return word(7 * std::uint64_t{shape_.nodes.ranks()} + home);
}
std::uint64_t Layout::arrived_inner(std::uint32_t source) const {
    return word(8 * std::uint64_t{shape_.nodes.ranks()} + std::uint64_t{source} * shape_.ring_slots);
}
std::uint64_t Layout::credit_outer(std::uint32_t node) const {
    return word((8 + std::uint64_t{shape_.ring_slots}) * shape_.nodes.ranks() + node);
}
std::uint64_t Layout::arrived_outer(std::uint32_t node) const {
    return credit_outer(shape_.nodes.nodes()) + word(std::uint64_t{node} * shape_.ring_slots);
}

std::uint64_t Layout::notify_in(std::uint32_t parity, std::uint32_t source) const {
    return notify_in_ + (std::uint64_t{parity} * shape_.nodes.ranks() + source) * notify_bytes_;
}
std::uint64_t Layout::notify_out(std::uint32_t to) const {
    return notify_out_ + to * notify_bytes_;
}

std::uint64_t Layout::outer_slot(std::uint32_t rank, std::uint32_t node, std::uint64_t chunk) const {
    const std::uint64_t ring = node < shape_.nodes.node_of(rank) ? node : node - 1;
    return (ring * shape_.ring_slots + chunk % shape_.ring_slots) * shape_.slot_bytes;
}

std::uint64_t Layout::inner_slot(std::uint32_t entry, std::uint32_t source, std::uint64_t chunk) const {
    const std::uint32_t node = shape_.nodes.node_of(entry);
    const std::uint64_t ring =
        shape_.nodes.nodes() - 1 + inner_index_[std::size_t{source} * shape_.nodes.nodes() + node];
    return (ring * shape_.ring_slots + chunk % shape_.ring_slots) * shape_.slot_bytes;
}

namespace {

// Offsets of a chunk's arrays for `capacity` rows. Arrays come in order of element size, so that each is aligned.
ChunkShape place(std::uint32_t capacity, const RowShape& row, std::uint32_t mask_words) {
    const std::uint64_t rows = capacity;
    ChunkShape chunk;
    chunk.capacity = capacity;
    chunk.masks = sizeof(ChunkHeader);
    chunk.indices = chunk.masks + rows * mask_words * sizeof(std::uint64_t);
    chunk.weights = chunk.indices + (rows * row.topk * row.index_bytes + 7) / 8 * 8;
    chunk.tokens = chunk.weights + (row.has_weights ? rows * row.topk * sizeof(float) : 0);
    chunk.scales = chunk.tokens + (mask_words > 0 ? rows * sizeof(std::uint32_t) : 0);
    chunk.rows = align_up(chunk.scales + rows * row.scale_bytes);
    return chunk;
}

ChunkShape largest(std::uint64_t slot_bytes, const RowShape& row, std::uint32_t mask_words) {
    const std::uint64_t per_row =
        row.bytes + row.scale_bytes + mask_words * sizeof(std::uint64_t) + std::uint64_t{row.topk} * row.index_bytes +
        (row.has_weights ? std::uint64_t{row.topk} * sizeof(float) : 0) + (mask_words > 0 ? sizeof(std::uint32_t) : 0);
    std::uint64_t capacity = slot_bytes > sizeof(ChunkHeader) ? (slot_bytes - sizeof(ChunkHeader)) / per_row : 0;
    capacity = std::min<std::uint64_t>(capacity, 1u << 20);
    while (capacity > 0) {  // padding takes a row or two at most
        const ChunkShape chunk = place(static_cast<std::uint32_t>(capacity), row, mask_words);
        if (chunk.bytes(chunk.capacity, row.bytes) <= slot_bytes) return chunk;
        --capacity;
    }
    return {};
}

// A combine's rows have no index and no scales.
RowShape homeward(const RowShape& row) {
    return {row.bytes, 0, row.topk, 0, row.has_weights};
}

}  // namespace

ChunkShape dispatch_chunk(std::uint64_t slot_bytes, const RowShape& row, std::uint32_t mask_words) {
    return largest(slot_bytes, row, mask_words);
}

ChunkShape combine_chunk(std::uint64_t slot_bytes, const RowShape& row) {
    return largest(slot_bytes, homeward(row), 0);
}

Extent dispatch_extent(std::uint64_t rows, const RowShape& row) {
    Extent extent;
    extent.src_idx = align_up(rows * row.bytes);
    extent.indices = align_up(extent.src_idx + rows * sizeof(std::int32_t));
    extent.weights = align_up(extent.indices + rows * row.topk * row.index_bytes);
    extent.scales = align_up(extent.weights + (row.has_weights ? rows * row.topk * sizeof(float) : 0));
    extent.bytes = align_up(extent.scales + rows * row.scale_bytes);
    return extent;
}

Extent combine_extent(std::uint64_t rows, const RowShape& row) {
    Extent extent;
    extent.src_idx = align_up(rows * row.bytes);
    extent.indices = extent.src_idx;
    extent.weights = extent.src_idx;
    extent.scales = align_up(extent.weights + (row.has_weights ? rows * row.topk * sizeof(float) : 0));
    extent.bytes = extent.scales;
    return extent;
}

namespace {

template <class ExtentOf>
std::uint64_t most_rows(std::uint64_t capacity, const RowShape& row, ExtentOf extent_of) {
    std::uint64_t fits = 0;
    std::uint64_t beyond = capacity / row.bytes + 1;
    while (beyond - fits > 1) {
        const std::uint64_t middle = fits + (beyond - fits) / 2;
        (extent_of(middle, row).bytes <= capacity ? fits : beyond) = middle;
    }
    return fits;
}

}  // namespace

std::uint64_t dispatch_window(std::uint64_t capacity, const RowShape& row) {
    return most_rows(capacity, row, dispatch_extent);
}

std::uint64_t combine_window(std::uint64_t capacity, const RowShape& row) {
    return most_rows(capacity, row, combine_extent);
}

}  // namespace expertwire::exchange
