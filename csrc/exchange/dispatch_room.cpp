// What a dispatch does where there is less room than rows: num_worst_tokens leaves rows out (SPEC E7); a buffer that is
// too small takes them in rounds (DESIGN "Buffers").
//
// Rounds. The extent that a rank offers is a window: row n lies in slot n mod the window's rows, and is placed there
// once row n - window has been taken out, which the rank says in one word (`taken`) to the ranks of its node, the only
// ones that place rows in its memory. Those say how far each source's rows have come in the word that says so at the
// end anyway
// (`done`). Nobody can wait in a circle: rows are numbered by (source, token), every source and every entry rank
// handles a source's rows in that order, so that whatever a row waits for is smaller than it.
#include <algorithm>
#include <bit>
#include <cstring>

#include "exchange/dispatch.hpp"
#include "exchange/words.hpp"

namespace expertwire::exchange {

// Rows lie in order of source rank and token, so that what lies beyond W is the last of it, from there on (SPEC E7).
// All ranks have the same counts and clamp them alike; how many of another rank's rows still come to my node depends on
// which of its tokens they are, which its ring says (ChunkHeader::ring_rows).
void Dispatch::keep_what_fits() {
    for (std::uint32_t to = 0; to < made_->ranks; ++to) {
        const std::uint64_t total = made_->received(to);
        if (total <= made_->rows_max) continue;
        overflows_.push_back({to, total});
        std::uint64_t room = made_->rows_max;
        for (std::uint32_t source = 0; source < made_->ranks; ++source) {
            std::uint32_t& rows = made_->matrix[std::size_t{source} * made_->ranks + to];
            rows = static_cast<std::uint32_t>(std::min<std::uint64_t>(rows, room));
            room -= rows;
        }
        clear_rows_from(to, made_->rows(exchange_.rank(), to));
    }
    if (overflows_.empty()) return;
    std::uint32_t* const per_node = made_->node_matrix.data() + std::size_t{exchange_.rank()} * made_->nodes;
    for (std::uint32_t node = 0; node < made_->nodes; ++node) {
        const std::vector<std::uint32_t>& members = exchange_.nodes().members(node);
        per_node[node] = 0;
        for (std::uint64_t token = 0; token < made_->tokens; ++token) {
            const std::uint8_t* const present = made_->in_rank.data() + token * made_->ranks;
            per_node[node] +=
                std::any_of(members.begin(), members.end(), [&](std::uint32_t rank) { return present[rank] != 0; });
        }
    }
}

void Dispatch::clear_rows_from(std::uint32_t rank, std::uint32_t kept) {
    std::uint32_t seen = 0;
    for (std::uint64_t token = 0; token < made_->tokens; ++token) {
        std::uint8_t& present = made_->in_rank[token * made_->ranks + rank];
        if (present != 0 && seen++ >= kept) present = 0;
    }
}

// Distinct rows from `source` to the node, as its notify said.
std::uint32_t Dispatch::announced(std::uint32_t source, std::uint32_t node) const {
    return notify_counts(source)[exchange_.nodes().ranks() + node];
}

// ---- rounds

// Rows that the rank takes at a time, kUnbounded where all of them fit. Every rank finds the same.
std::uint64_t Dispatch::window_of(std::uint32_t rank) const {
    const std::uint64_t capacity = notify(rank).offer_capacity;
    if (dispatch_extent(rows_of_extent(rank), row_).bytes <= capacity) return kUnbounded;
    return dispatch_window(capacity, row_);
}

void Dispatch::open_spill() {
    spill_ = request_.allocate(extent().bytes);
}

bool Dispatch::granted(Target& target, std::uint64_t row) {
    if (row < target.granted || mutant(Mutant::no_wait_for_window)) return true;
    target.granted = target.window + count_at(exchange_.layout().taken(target.rank));
    return row < target.granted;
}

bool Dispatch::near_granted(std::uint64_t token) {
    const std::uint8_t* const present = routing_->in_rank.data() + token * routing_->ranks;
    return std::all_of(targets_.begin(), targets_.end(),
                       [&](Target& target) { return !present[target.rank] || granted(target, target.next); });
}

bool Dispatch::row_granted(const Incoming& in, const std::byte* chunk) {
    const std::uint64_t words = exchange_.nodes().mask_words(exchange_.node());
    const std::byte* const masks = chunk + chunk_in_.masks + in.row * words * sizeof(std::uint64_t);
    for (std::uint64_t word = 0; word < words; ++word) {
        std::uint64_t mask;
        std::memcpy(&mask, masks + word * sizeof mask, sizeof mask);
        for (; mask != 0; mask &= mask - 1) {
            const std::size_t index = word * 64 + static_cast<std::size_t>(std::countr_zero(mask));
            // A number out of bounds is found by whoever places the row.
            if (index < targets_.size() && !granted(targets_[index], in.next[index])) return false;
        }
    }
    return true;
}

// Ranks with a window take rows while they come.
void Dispatch::tell_near() {
    rows::fence();
    for (Target& target : targets_) {
        const std::uint64_t count = target.next - target.first;
        if (target.window == kUnbounded || count == target.told) continue;
        publish(target.rank, exchange_.layout().done(exchange_.rank()), count);
        target.told = count;
    }
}

void Dispatch::tell_forwarded(Incoming& in) {
    rows::fence();
    for (std::size_t index = 0; index < targets_.size(); ++index) {
        const Target& target = targets_[index];
        const std::uint64_t count = in.next[index] + routing_->rows(in.source, target.rank) - in.limit[index];
        if (target.window == kUnbounded || count == in.told[index]) continue;
        publish(target.rank, exchange_.layout().done(in.source), count);
        in.told[index] = count;
    }
}

// Rows that are in my window, or were, with none missing before them.
std::uint64_t Dispatch::arrived_in_order() {
    for (; taking_source_ < routing_->ranks; ++taking_source_) {
        const std::uint64_t rows = routing_->rows(taking_source_, exchange_.rank());
        const std::uint64_t here = rows > 0 ? count_at(exchange_.layout().done(taking_source_)) : 0;
        if (here < rows) return taking_first_ + here;
        taking_first_ += rows;
    }
    return taking_first_;
}

std::uint64_t Dispatch::collect(std::uint64_t budget) {
    const std::uint64_t window = window_of(exchange_.rank());
    const std::uint64_t before = taken_;
    std::uint64_t moved = 0;
    for (std::uint64_t arrived = arrived_in_order(); taken_ < arrived && moved < budget;) {
        const std::uint64_t slot = slot_of(taken_, window);
        const std::uint64_t most = std::max<std::uint64_t>(1, (budget - moved) / row_.bytes);
        const std::uint64_t count = std::min({arrived - taken_, window - slot, most});
        take_rows(slot, count);
        taken_ += count;
        moved += count * row_.bytes;
    }
    if (taken_ == before) return 0;
    for (const Target& target : targets_) {
        publish(target.rank, exchange_.layout().taken(exchange_.rank()), taken_);
    }
    return moved;
}

// From `slot` of my window on, to where the next rows belong.
void Dispatch::take_rows(std::uint64_t slot, std::uint64_t count) {
    const Extent to = extent();
    const Extent from = dispatch_extent(window_of(exchange_.rank()), row_);
    const std::byte* const window = exchange_.mine().data + request_.offer_offset;
    const auto take = [&](std::uint64_t to_array, std::uint64_t from_array, std::uint64_t width) {
        rows::copy(spill_ + to_array + taken_ * width, window + from_array + slot * width, count * width,
                   width == row_.bytes ? store_ : rows::Store::cached);
    };
    take(to.rows, from.rows, row_.bytes);
    take(to.src_idx, from.src_idx, sizeof(std::int32_t));
    if (row_.topk > 0) take(to.indices, from.indices, std::uint64_t{row_.topk} * row_.index_bytes);
    if (has_weights_) take(to.weights, from.weights, row_.topk * sizeof(float));
    if (row_.scale_bytes > 0) take(to.scales, from.scales, row_.scale_bytes);
    rows::fence();
}

}  // namespace expertwire::exchange
