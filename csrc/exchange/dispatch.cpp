#include "exchange/dispatch.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace expertwire::exchange {

namespace {

constexpr std::uint64_t kBlockBytes = 64 << 10;  // of x that go to every destination while they are in the L2 cache
constexpr std::uint64_t kStreamBytes =
    1 << 10;  // rows from here on bypass the caches on their way to their final place

}  // namespace

Dispatch::Dispatch(Exchange& exchange, const DispatchRequest& request, std::shared_ptr<Handle> made,
                   const std::vector<std::int32_t>& per_expert)
    : Operation(exchange, Kind::dispatch, request.handle),
      request_(request),
      made_(std::move(made)),
      routing_(made_ ? made_.get() : handle_.get()),
      row_(request.row()),
      store_(request.row_bytes >= kStreamBytes ? rows::Store::streaming : rows::Store::cached),
      has_weights_(request.topk_weights != nullptr) {
    if (made_) made_->epoch = epoch_;
    NotifyHeader header;
    header.row_bytes = request_.row_bytes;
    header.topk = request_.topk;
    header.index_bytes = request_.topk > 0 ? request_.index_bytes : 0;
    header.element = request_.element;
    header.scale_element = request_.scale_element;
    header.scale_bytes = request_.scale_bytes;
    header.num_experts = request_.num_experts;
    header.rows_max = routing_->rows_max;
    header.tokens = request_.tokens;
    header.has_weights = has_weights_;
    header.offer_offset = request_.offer_offset;
    header.offer_capacity = request_.offer_capacity;
    const std::size_t me = exchange.rank();
    send_notify(header, routing_->matrix.data() + me * routing_->ranks,
                routing_->node_matrix.data() + me * routing_->nodes, made_ ? per_expert.data() : nullptr,
                request_.expert_first);
}

Operation::Need Dispatch::needed(std::uint32_t rank) const {
    std::uint64_t rows = rows_max();
    for (std::uint32_t source = 0; source < exchange_.nodes().ranks() && rows_max() == 0; ++source) {
        rows += notify_counts(source)[rank];
    }
    const std::uint64_t bytes = dispatch_extent(rows, row_).bytes;
    if (rows_max() > 0 || bytes <= notify(rank).offer_capacity) return {rows, bytes};
    return {rows, dispatch_extent(1, row_).bytes};  // in rounds
}

std::uint64_t Dispatch::rows_of_extent(std::uint32_t rank) const {
    return rows_max() > 0 ? rows_max() : routing_->received(rank);
}

Extent Dispatch::extent() const {
    return dispatch_extent(rows_of_extent(exchange_.rank()), row_);
}

std::vector<std::uint64_t> Dispatch::expert_counts() const {
    if (!made_) return {};
    const std::uint32_t me = exchange_.rank();
    const std::uint64_t first = request_.expert_first[me];
    std::vector<std::uint64_t> counts(request_.expert_first[me + 1] - first, 0);
    const bool overflowed = std::any_of(overflows_.begin(), overflows_.end(),
                                        [&](const Overflow& overflow) { return overflow.rank == me; });
    if (overflowed) {  // the notifies count rows that were not kept
        const std::byte* const indices = results() + extent().indices;
        for (std::uint64_t at = 0; at < received() * row_.topk; ++at) {
            const std::int64_t id = load_index(indices, row_.index_bytes, at);
            if (id >= 0) ++counts[static_cast<std::size_t>(id)];
        }
        return counts;
    }
    for (std::uint32_t source = 0; source < routing_->ranks; ++source) {
        const std::uint32_t* const from = notify_counts(source) + routing_->ranks + routing_->nodes;
        for (std::size_t expert = 0; expert < counts.size(); ++expert) counts[expert] += from[expert];
    }
    return counts;
}

// ---- begin: every rank's counts are here

void Dispatch::begin() {
    if (made_) complete_handle();
    open_targets();
    if (window_of(exchange_.rank()) != kUnbounded) open_spill();
    open_rings();
    if (rows_max() == 0 || row_.topk == 0) return;
    // The tail belongs to nobody: no expert.
    std::byte* const indices = exchange_.mine().data + request_.offer_offset + extent().indices;
    const std::uint64_t index_bytes = std::uint64_t{row_.topk} * row_.index_bytes;
    std::memset(indices + received() * index_bytes, 0xFF, (rows_max() - received()) * index_bytes);
}

void Dispatch::complete_handle() {
    const std::uint32_t ranks = made_->ranks;
    for (std::uint32_t source = 0; source < ranks; ++source) {
        const std::uint32_t* const counts = notify_counts(source);
        std::copy_n(counts, ranks, made_->matrix.begin() + std::ptrdiff_t{source} * ranks);
        std::copy_n(counts + ranks, made_->nodes, made_->node_matrix.begin() + std::ptrdiff_t{source} * made_->nodes);
    }
    made_->masks.resize(ranks);
    if (made_->rows_max > 0) keep_what_fits();
}

void Dispatch::open_targets() {
    for (const std::uint32_t rank : exchange_.nodes().members(exchange_.node())) {
        const std::uint64_t window = window_of(rank);
        const Extent extent = dispatch_extent(std::min(window, rows_of_extent(rank)), row_);
        std::byte* const base = exchange_.port().memory()[rank].data + notify(rank).offer_offset;
        Target target;
        target.rank = rank;
        target.rows = base + extent.rows;
        target.src_idx = base + extent.src_idx;
        target.indices = base + extent.indices;
        target.weights = base + extent.weights;
        target.scales = base + extent.scales;
        if (request_.topk > 0) {
            target.expert_first = static_cast<std::int64_t>(request_.expert_first[rank]);
            target.expert_end = static_cast<std::int64_t>(request_.expert_first[rank + 1]);
        }
        target.next = routing_->offset(exchange_.rank(), rank);
        target.first = target.next;
        target.window = target.granted = window;
        windowed_ = windowed_ || window != kUnbounded;
        targets_.push_back(target);
    }
}

void Dispatch::open_rings() {
    const NodeTable& nodes = exchange_.nodes();
    const std::uint32_t me = exchange_.rank();
    const auto chunk_for = [&](std::uint32_t node) {
        return dispatch_chunk(exchange_.shape().slot_bytes, row_, nodes.mask_words(node));
    };
    for (std::uint32_t node = 0; node < nodes.nodes(); ++node) {
        if (node == exchange_.node() || announced(me, node) == 0) continue;
        const std::uint32_t count = routing_->node_rows(me, node);
        const ChunkShape chunk = chunk_for(node);
        const std::uint64_t chunks = std::max<std::uint64_t>(1, chunks_for(count, chunk.capacity));
        Outgoing out{SendRing(exchange_, outer_sender(exchange_, node), epoch_, chunks), node, chunk, 0, count};
        out.rows = count;
        out.direct = nodes.size(node) == 1 && window_of(out.ring.peer()) == kUnbounded;
        out.none_left = count == 0;
        outgoing_.push_back(std::move(out));
    }
    chunk_in_ = chunk_for(exchange_.node());
    direct_ = nodes.size(exchange_.node()) == 1 && !windowed_;
    for (std::uint32_t source = 0; source < nodes.ranks(); ++source) {
        const std::uint32_t count = announced(source, exchange_.node());
        if (nodes.node_of(source) == exchange_.node() || count == 0) continue;
        if (nodes.entry(source, exchange_.node()) != me) continue;
        Incoming in{
            ReceiveRing(exchange_, inner_receiver(exchange_, source), epoch_), source, count, 0, 0, 0, {}, {}, {}};
        for (const Target& target : targets_) {
            in.next.push_back(routing_->offset(source, target.rank));
            in.limit.push_back(in.next.back() + routing_->rows(source, target.rank));
            in.told.push_back(0);
        }
        incoming_.push_back(std::move(in));
    }
    std::uint32_t words = 1;
    for (std::uint32_t node = 0; node < nodes.nodes(); ++node) words = std::max(words, nodes.mask_words(node));
    mask_.assign(words, 0);
}

// ---- moving

std::uint64_t Dispatch::move(std::uint64_t budget) {
    std::uint64_t moved = spilled() ? collect(budget) : 0;
    // Forwarding first: it returns credit, and other ranks wait for it.
    for (std::size_t i = 0; i < incoming_.size() && moved < budget; ++i) {
        moved += forward(incoming_[(turn_ + i) % incoming_.size()], budget - moved);
    }
    if (!incoming_.empty()) turn_ = (turn_ + 1) % incoming_.size();
    if (moved < budget) moved += send(budget - moved);
    for (Outgoing& out : outgoing_) {
        out.ring.reap();
        if (out.ring.failure() == Status::ok) continue;
        fail(FailureReason::put, out.ring.peer(), "rows could not be delivered", out.ring.failure());
    }
    return moved;
}

// Token-major: a block of x goes everywhere while it is near. A ring without a free slot falls behind and catches up.
std::uint64_t Dispatch::send(std::uint64_t budget) {
    const std::uint64_t block = std::max<std::uint64_t>(1, kBlockBytes / request_.row_bytes);
    std::uint64_t moved = 0;
    while (moved < budget) {
        std::uint64_t round = 0;
        for (Outgoing& out : outgoing_) round += pack(out, block);
        round += send_near(block);
        if (round == 0) break;
        moved += round;
    }
    return moved;
}

std::uint64_t Dispatch::send_near(std::uint64_t tokens) {
    if (near_done_) return 0;
    std::uint64_t moved = 1;
    const std::uint64_t begin = near_token_;
    const std::uint64_t end = std::min(request_.tokens, near_token_ + tokens);
    for (; near_token_ < end; ++near_token_) {
        if (windowed_ && !near_granted(near_token_)) {
            if (near_token_ == begin) return 0;
            break;
        }
        const std::uint8_t* const present = routing_->in_rank.data() + near_token_ * routing_->ranks;
        const std::byte* const row = request_.x + near_token_ * request_.row_bytes;
        const std::uint64_t slot = near_token_ * request_.topk;
        RowMeta meta;
        meta.token = static_cast<std::uint32_t>(near_token_);
        if (request_.topk > 0) meta.indices = request_.topk_idx + slot * request_.index_bytes;
        if (has_weights_) meta.weights = reinterpret_cast<const std::byte*>(request_.topk_weights + slot);
        if (row_.scale_bytes > 0) meta.scales = request_.scales + near_token_ * row_.scale_bytes;
        for (Target& target : targets_) {
            if (!present[target.rank]) continue;
            place(target, target.next++, row, meta);
            moved += request_.row_bytes;
        }
    }
    if (windowed_) tell_near();
    if (near_token_ == request_.tokens) {
        near_done_ = true;
        finish_source(exchange_.rank());
    }
    return moved;
}

// All rows of `source` for my node are in place: tell each rank how many it got.
void Dispatch::finish_source(std::uint32_t source) {
    rows::fence();
    for (const Target& target : targets_) {
        const std::uint32_t count = routing_->rows(source, target.rank);
        if (count > 0) publish(target.rank, exchange_.layout().done(source), count);
    }
}

void Dispatch::place(const Target& target, std::uint64_t row, const std::byte* from, const RowMeta& meta) const {
    const std::uint64_t slot = slot_of(row, target.window);
    rows::copy(target.rows + slot * request_.row_bytes, from, request_.row_bytes, store_);
    write_meta(target, slot, meta);
}

namespace {

template <class Index>
void localise(std::byte* to, std::byte* to_weights, const std::byte* from, const std::byte* from_weights,
              std::uint32_t topk, std::int64_t first, std::int64_t end, bool has_weights) {
    for (std::uint32_t slot = 0; slot < topk; ++slot) {
        Index id;
        std::memcpy(&id, from + slot * sizeof id, sizeof id);
        const bool mine = id >= first && id < end;
        const Index local = mine ? static_cast<Index>(id - first) : Index{-1};
        std::memcpy(to + slot * sizeof local, &local, sizeof local);
        if (!has_weights) continue;
        float weight = 0.0f;
        if (mine) std::memcpy(&weight, from_weights + slot * sizeof weight, sizeof weight);
        std::memcpy(to_weights + slot * sizeof weight, &weight, sizeof weight);
    }
}

}  // namespace

void Dispatch::write_meta(const Target& target, std::uint64_t row, const RowMeta& meta) const {
    std::memcpy(target.src_idx + row * sizeof meta.token, &meta.token, sizeof meta.token);
    if (row_.scale_bytes > 0) std::memcpy(target.scales + row * row_.scale_bytes, meta.scales, row_.scale_bytes);
    if (request_.topk == 0) return;
    const std::uint64_t slot = row * request_.topk;
    std::byte* const indices = target.indices + slot * request_.index_bytes;
    std::byte* const weights = target.weights + slot * sizeof(float);
    const auto write = request_.index_bytes == 4 ? localise<std::int32_t> : localise<std::int64_t>;
    write(indices, weights, meta.indices, meta.weights, request_.topk, target.expert_first, target.expert_end,
          has_weights_);
}

bool Dispatch::in_node(std::uint64_t token, std::uint32_t node, std::uint64_t* mask) const {
    const std::uint8_t* const present = routing_->in_rank.data() + token * routing_->ranks;
    const std::vector<std::uint32_t>& members = exchange_.nodes().members(node);
    std::fill_n(mask, exchange_.nodes().mask_words(node), 0);
    bool any = false;
    for (std::size_t index = 0; index < members.size(); ++index) {
        if (!present[members[index]]) continue;
        mask[index / 64] |= std::uint64_t{1} << (index % 64);
        any = true;
    }
    return any;
}

std::uint64_t Dispatch::pack(Outgoing& out, std::uint64_t tokens) {
    std::uint64_t moved = out.ring.flush() ? 1 : 0;
    if (out.none_left) {
        out.slot = out.ring.open();
        if (out.slot == nullptr) return moved;
        close_chunk(out);
        out.none_left = false;
        return moved + 1;
    }
    if (out.rows_left == 0) return moved;
    const std::uint64_t end = std::min(request_.tokens, out.token + tokens);
    for (; out.token < end && out.rows_left > 0; ++out.token) {
        ++moved;
        if (!in_node(out.token, out.node, mask_.data())) continue;
        if (out.slot == nullptr) out.slot = out.ring.open();
        if (out.slot == nullptr) return moved - 1;
        pack_row(out, mask_.data());
        moved += request_.row_bytes;
        if (out.filled == out.chunk.capacity || out.rows_left == 0) close_chunk(out);
    }
    return moved;
}

void Dispatch::pack_row(Outgoing& out, const std::uint64_t* mask) {
    const std::uint64_t row = out.filled;
    const std::uint64_t from = out.token * request_.topk;
    const std::uint64_t words = exchange_.nodes().mask_words(out.node);
    const auto token = static_cast<std::uint32_t>(out.token);
    std::memcpy(out.slot + out.chunk.tokens + row * sizeof token, &token, sizeof token);
    std::memcpy(out.slot + out.chunk.masks + row * words * sizeof *mask, mask, words * sizeof *mask);
    if (request_.topk > 0) {
        const std::uint64_t bytes = std::uint64_t{request_.topk} * request_.index_bytes;
        std::memcpy(out.slot + out.chunk.indices + row * bytes, request_.topk_idx + from * request_.index_bytes, bytes);
    }
    if (has_weights_) {
        const std::uint64_t bytes = request_.topk * sizeof(float);
        std::memcpy(out.slot + out.chunk.weights + row * bytes, request_.topk_weights + from, bytes);
    }
    if (row_.scale_bytes > 0) {
        std::memcpy(out.slot + out.chunk.scales + row * row_.scale_bytes,
                    request_.scales + out.token * row_.scale_bytes, row_.scale_bytes);
    }
    rows::copy(out.slot + out.chunk.rows + row * request_.row_bytes, request_.x + out.token * request_.row_bytes,
               request_.row_bytes, rows::Store::cached);  // it is read again at once, by the provider
    ++out.filled;
    --out.rows_left;
}

void Dispatch::close_chunk(Outgoing& out) {
    const ChunkHeader header{epoch_, out.packed, out.filled, out.rows};
    std::memcpy(out.slot, &header, sizeof header);
    if (out.direct) {
        const std::uint32_t target = out.ring.peer();  // nobody to forward to: its rows need no stop in the ring there
        const std::uint64_t first = routing_->offset(exchange_.rank(), target) + out.packed;
        const auto slot = static_cast<std::uint64_t>(out.slot - exchange_.mine().staging);
        out.ring.close(out.chunk.rows,
                       {Region::staging, slot + out.chunk.rows, Region::data,
                        notify(target).offer_offset + first * request_.row_bytes, out.filled * request_.row_bytes});
    } else {
        out.ring.close(out.chunk.bytes(out.filled, request_.row_bytes));
    }
    out.packed += out.filled;
    out.filled = 0;
    out.slot = nullptr;
}

bool Dispatch::check_chunk(const Incoming& in, const ChunkHeader& header) {
    if (header.epoch == epoch_ && header.first_row == in.rows_read && (header.rows > 0 || header.ring_rows == 0) &&
        header.rows <= chunk_in_.capacity && header.rows <= in.rows_left) {
        return true;
    }
    fail(FailureReason::protocol, in.source,
         "a chunk from rank " + std::to_string(in.source) + " holds rows " + std::to_string(header.first_row) + " + " +
             std::to_string(header.rows) + " of call " + std::to_string(header.epoch) + ", expected row " +
             std::to_string(in.rows_read) + " of call " + std::to_string(epoch_));
    return false;
}

// The first chunk of a ring says how many rows it really has: as many as announced, unless somebody overflows.
bool Dispatch::begin_ring(Incoming& in, const ChunkHeader& header) {
    if (header.ring_rows > in.rows_left || (header.ring_rows < in.rows_left && overflows_.empty())) {
        fail(FailureReason::protocol, in.source,
             "rank " + std::to_string(in.source) + " announced " + std::to_string(in.rows_left) +
                 " rows for this node and begins to send " + std::to_string(header.ring_rows));
        return false;
    }
    in.rows_left = header.ring_rows;
    if (made_) {
        made_->node_matrix[std::size_t{in.source} * made_->nodes + exchange_.node()] = header.ring_rows;
        made_->masks[in.source].reserve(header.ring_rows * exchange_.nodes().mask_words(exchange_.node()));
    }
    return true;
}

std::uint64_t Dispatch::forward(Incoming& in, std::uint64_t budget) {
    std::uint64_t moved = in.ring.flush() ? 1 : 0;
    const std::uint64_t words = exchange_.nodes().mask_words(exchange_.node());
    while (moved < budget && in.rows_left > 0 && failure_.reason == FailureReason::none) {
        const std::byte* const chunk = in.ring.front();
        if (chunk == nullptr) break;
        ChunkHeader header;
        std::memcpy(&header, chunk, sizeof header);
        if (in.rows_noted == in.rows_read) {
            if (!check_chunk(in, header)) return moved;
            if (in.rows_read == 0 && !begin_ring(in, header)) return moved;
            in.rows_noted += header.rows;
            if (made_) {
                const auto* const masks = reinterpret_cast<const std::uint64_t*>(chunk + chunk_in_.masks);
                made_->masks[in.source].insert(made_->masks[in.source].end(), masks, masks + header.rows * words);
            }
        }
        for (; in.row < header.rows && moved < budget; ++in.row) {
            if (windowed_ && !row_granted(in, chunk)) break;
            if (!forward_row(in, chunk)) return moved;
            moved += direct_ ? sizeof(RowMeta) : request_.row_bytes * 2;
        }
        if (in.row < header.rows) break;
        in.row = 0;
        in.rows_read += header.rows;
        in.rows_left -= header.rows;
        // The last rows must be visible before their `done`; credit may go before that.
        if (in.rows_left == 0) finish_source(in.source);
        in.ring.pop();
    }
    if (windowed_) tell_forwarded(in);
    return moved;
}

bool Dispatch::forward_row(Incoming& in, const std::byte* chunk) {
    const std::uint64_t words = exchange_.nodes().mask_words(exchange_.node());
    const std::byte* const masks = chunk + chunk_in_.masks + in.row * words * sizeof(std::uint64_t);
    const std::byte* const row = chunk + chunk_in_.rows + in.row * request_.row_bytes;
    RowMeta meta;
    std::memcpy(&meta.token, chunk + chunk_in_.tokens + in.row * sizeof meta.token, sizeof meta.token);
    meta.indices = chunk + chunk_in_.indices + std::uint64_t{in.row} * request_.topk * request_.index_bytes;
    meta.weights = chunk + chunk_in_.weights + std::uint64_t{in.row} * request_.topk * sizeof(float);
    meta.scales = chunk + chunk_in_.scales + std::uint64_t{in.row} * row_.scale_bytes;
    for (std::uint64_t word = 0; word < words; ++word) {
        std::uint64_t mask;
        std::memcpy(&mask, masks + word * sizeof mask, sizeof mask);
        for (; mask != 0; mask &= mask - 1) {
            const std::size_t index = word * 64 + static_cast<std::size_t>(std::countr_zero(mask));
            if (index >= targets_.size() || in.next[index] == in.limit[index]) {
                fail(FailureReason::protocol, in.source,
                     "rank " + std::to_string(in.source) + " sent more rows to local index " + std::to_string(index) +
                         " of this node than its notify said");
                return false;
            }
            const std::uint64_t at = in.next[index]++;
            if (direct_) {
                write_meta(targets_[index], at, meta);
            } else {
                place(targets_[index], at, row, meta);
            }
        }
    }
    return true;
}

// ---- ending

bool Dispatch::all_arrived() const {
    for (std::uint32_t source = 0; source < routing_->ranks; ++source) {
        const std::uint32_t expected = routing_->rows(source, exchange_.rank());
        if (expected > 0 && count_at(exchange_.layout().done(source)) != expected) return false;
    }
    return true;
}

bool Dispatch::rows_done() const {
    if (!near_done_ || (spilled() && taken_ < received())) return false;
    for (const Outgoing& out : outgoing_) {
        if (out.ring.sent() != out.ring.chunks()) return false;
    }
    for (const Incoming& in : incoming_) {
        if (in.rows_left > 0 || !in.ring.settled()) return false;
    }
    return all_arrived();
}

bool Dispatch::drained() {
    bool all = true;
    for (Outgoing& out : outgoing_) {
        all = out.ring.ended() && all;
        if (out.ring.failure() != Status::ok) {
            fail(FailureReason::put, out.ring.peer(), "rows could not be delivered", out.ring.failure());
        }
    }
    return all;
}

std::uint64_t Dispatch::chunks_sent() const {
    std::uint64_t total = 0;
    for (const Outgoing& out : outgoing_) total += out.ring.sent();
    return total;
}

void Dispatch::describe(PeerProgress& row) const {
    row.rows_expected = routing_->rows(row.rank, exchange_.rank());
    row.rows_arrived = count_at(exchange_.layout().done(row.rank));
    if (row.rows_arrived < row.rows_expected) row.missing = "its rows";
    for (const Target& target : targets_) {
        if (target.rank == row.rank && !near_done_ && target.next >= target.granted) row.missing = "room in its window";
    }
    for (const Outgoing& out : outgoing_) {
        if (out.ring.peer() != row.rank) continue;
        row.chunks_to_send += out.ring.chunks();
        row.chunks_sent += out.ring.sent();
        row.chunks_credited += out.ring.credited();
        if (out.ring.sent() < out.ring.chunks()) row.missing = "credit for my chunks";
    }
    for (const Incoming& in : incoming_) {
        if (in.source == row.rank && in.rows_left > 0) row.missing = "rows that I forward for it";
    }
}

}  // namespace expertwire::exchange
