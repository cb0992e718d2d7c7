#include "exchange/exchange.hpp"

#include <algorithm>
#include <utility>

#include "exchange/combine.hpp"
#include "exchange/dispatch.hpp"
#include "exchange/words.hpp"

namespace expertwire::exchange {

Exchange::Exchange(const Shape& shape, Port& port, std::uint64_t data_bytes)
    : layout_(shape),
      port_(port),
      data_bytes_(data_bytes),
      identity_(std::make_shared<const char>('x')),
      remote_words_(shape.nodes.ranks(), std::vector<std::uint64_t>(4 + 2 * std::size_t{shape.ring_slots}, 0)) {}

std::uint64_t& Exchange::known(std::uint32_t rank, RemoteWord word, std::uint32_t slot) {
    std::size_t index = static_cast<std::size_t>(word) + slot;
    if (word == RemoteWord::arrived_outer) index += shape().ring_slots - 1;
    return remote_words_[rank][index];
}

std::optional<Ticket> Exchange::put(Port::Put put, RemoteWord word, std::uint32_t slot, std::uint64_t word_offset,
                                    std::uint64_t value) {
    std::uint64_t& held = known(put.rank, word, slot);
    put.word_offset = word_offset;
    put.delta = value - held;
    const std::optional<Ticket> ticket = port_.put(put);
    if (ticket) held = value;
    return ticket;
}

bool Exchange::raise(std::uint32_t rank, RemoteWord word, std::uint64_t word_offset, std::uint64_t value) {
    std::uint64_t& held = known(rank, word, 0);
    if (!port_.add(rank, word_offset, value - held)) return false;
    held = value;
    return true;
}

// ---- arguments

namespace {

std::string count_error(const char* name, std::size_t index, std::int64_t given, std::int64_t counted, const char* by) {
    return std::string(name) + "[" + std::to_string(index) + "] is " + std::to_string(given) + " but " + by +
           " gives " + std::to_string(counted);
}

// What each expert gets from here, counted from topk_idx and compared with what the caller says.
std::string count_experts(const DispatchRequest& request, std::vector<std::int32_t>& per_expert) {
    per_expert.assign(request.num_experts, 0);
    for (std::uint64_t token = 0; token < request.tokens; ++token) {
        for (std::uint32_t slot = 0; slot < request.topk; ++slot) {
            const std::int64_t id = load_index(request.topk_idx, request.index_bytes, token * request.topk + slot);
            if (id == -1) continue;
            if (id < 0 || id >= static_cast<std::int64_t>(request.num_experts)) {
                return "topk_idx[" + std::to_string(token) + ", " + std::to_string(slot) + "] is " +
                       std::to_string(id) + ", must be -1 (no expert) or in [0, " +
                       std::to_string(request.num_experts) + ")";
            }
            ++per_expert[static_cast<std::size_t>(id)];
        }
    }
    if (request.per_expert == nullptr) return {};
    for (std::size_t expert = 0; expert < per_expert.size(); ++expert) {
        if (request.topk == 0) per_expert[expert] = request.per_expert[expert];
        if (request.per_expert[expert] == per_expert[expert]) continue;
        return count_error("num_tokens_per_expert", expert, request.per_expert[expert], per_expert[expert], "topk_idx");
    }
    return {};
}

std::string routing_error(const DispatchRequest& request, const Shape& shape) {
    const std::uint32_t ranks = shape.nodes.ranks();
    if (request.tokens > 0 && request.in_rank == nullptr) return "is_token_in_rank is missing";
    if (request.topk > 0 && request.topk_idx == nullptr && request.tokens > 0) {
        return "topk_idx is missing but num_topk is " + std::to_string(request.topk);
    }
    if (request.topk_weights != nullptr && request.topk == 0) return "topk_weights needs topk_idx";
    if (request.rows_max > 0 && request.topk == 0) return "num_worst_tokens needs topk_idx";
    if (request.rows_max > kCountMax) {
        return "num_worst_tokens is " + std::to_string(request.rows_max) + ", must be at most " +
               std::to_string(kCountMax);
    }
    if (request.topk > 0 && request.index_bytes != 4 && request.index_bytes != 8) {
        return "topk_idx has elements of " + std::to_string(request.index_bytes) + " bytes, must be 4 or 8";
    }
    const std::string owners = expert_first_error(request.expert_first, ranks, request.num_experts);
    if (!owners.empty()) return owners;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        const std::uint64_t owned = request.expert_first[rank + 1] - request.expert_first[rank];
        if (owned > shape.local_experts_max) {
            return "rank " + std::to_string(rank) + " owns " + std::to_string(owned) + " of num_experts " +
                   std::to_string(request.num_experts) + ", at most " + std::to_string(shape.local_experts_max) +
                   " were planned when the Buffer was made";
        }
    }
    return {};
}

}  // namespace

std::string Exchange::extent_error(std::uint64_t offset, std::uint64_t capacity) const {
    if (offset % kAlignment != 0) {
        return "offer_offset is " + std::to_string(offset) + ", must be a multiple of " + std::to_string(kAlignment);
    }
    if (offset > data_bytes_ || capacity > data_bytes_ - offset) {
        return "the offered extent [" + std::to_string(offset) + ", + " + std::to_string(capacity) +
               ") ends beyond the data region of " + std::to_string(data_bytes_) + " bytes";
    }
    return {};
}

std::string Exchange::handle_error(const std::shared_ptr<const Handle>& handle) const {
    if (handle && handle->owner != identity_) return "the handle was made by another Buffer";
    return {};
}

std::unique_ptr<Dispatch> Exchange::dispatch(const DispatchRequest& request, std::string& error) {
    error = epoch_error();
    if (error.empty()) error = extent_error(request.offer_offset, request.offer_capacity);
    if (error.empty()) error = handle_error(request.handle);
    if (!error.empty()) return nullptr;
    if (!request.allocate) error = "allocate is missing";
    if (request.row_bytes == 0) error = "x has rows of 0 bytes, must be at least 1";
    if (request.tokens > kCountMax) {
        error = "x has " + std::to_string(request.tokens) + " rows, at most " + std::to_string(kCountMax) + " a call";
    }
    if (request.tokens > 0 && request.x == nullptr) error = "x is missing";
    if (request.tokens > 0 && request.scale_bytes > 0 && request.scales == nullptr) error = "the scales are missing";
    if (!error.empty()) return nullptr;
    if (!request.handle) {
        error = routing_error(request, shape());
    } else if (request.topk_idx != nullptr || request.topk > 0 || request.topk_weights != nullptr) {
        error = "topk_idx and topk_weights must be absent with a handle";
    } else if (request.tokens != request.handle->tokens) {
        error = "x has " + std::to_string(request.tokens) + " rows but the handle's dispatch had " +
                std::to_string(request.handle->tokens);
    }
    if (!error.empty()) return nullptr;
    if (nodes().nodes() > 1) {
        for (std::uint32_t node = 0; node < nodes().nodes() && error.empty(); ++node) {
            const ChunkShape chunk = dispatch_chunk(shape().slot_bytes, request.row(), nodes().mask_words(node));
            if (chunk.capacity > 0) continue;
            error = "a row of " + std::to_string(request.row_bytes + request.scale_bytes) + " bytes with num_topk " +
                    std::to_string(request.topk) + " does not fit a ring slot of " +
                    std::to_string(shape().slot_bytes) + " bytes";
        }
    }
    if (!error.empty()) return nullptr;
    std::shared_ptr<Handle> made;
    std::vector<std::int32_t> per_expert;
    if (!request.handle) {
        error = count_experts(request, per_expert);
        if (error.empty()) made = make_handle(request, error);
        if (!error.empty()) return nullptr;
    }
    return std::make_unique<Dispatch>(*this, request, std::move(made), per_expert);
}

// Counts come from in_rank and topk_idx themselves: offsets computed from a caller's wrong counts would overrun a peer.
std::shared_ptr<Handle> Exchange::make_handle(const DispatchRequest& request, std::string& error) const {
    const std::uint32_t ranks = nodes().ranks();
    auto handle = std::make_shared<Handle>();
    handle->owner = identity_;
    handle->rank = rank();
    handle->ranks = ranks;
    handle->nodes = nodes().nodes();
    handle->tokens = request.tokens;
    handle->rows_max = request.rows_max;
    handle->matrix.assign(std::size_t{ranks} * ranks, 0);
    handle->node_matrix.assign(std::size_t{ranks} * nodes().nodes(), 0);
    if (request.tokens > 0) handle->in_rank.assign(request.in_rank, request.in_rank + request.tokens * ranks);
    std::uint32_t* const per_rank = handle->matrix.data() + std::size_t{rank()} * ranks;
    std::uint32_t* const per_node = handle->node_matrix.data() + std::size_t{rank()} * nodes().nodes();
    std::vector<std::uint8_t> in_node(nodes().nodes());
    for (std::uint64_t token = 0; token < request.tokens; ++token) {
        const std::uint8_t* const present = handle->in_rank.data() + token * ranks;
        std::fill(in_node.begin(), in_node.end(), 0);
        for (std::uint32_t to = 0; to < ranks; ++to) {
            per_rank[to] += present[to] != 0;
            in_node[nodes().node_of(to)] |= present[to] != 0;
        }
        for (std::uint32_t node = 0; node < nodes().nodes(); ++node) per_node[node] += in_node[node];
    }
    for (std::uint32_t to = 0; to < ranks && request.per_rank != nullptr; ++to) {
        if (request.per_rank[to] == static_cast<std::int64_t>(per_rank[to])) continue;
        error = count_error("num_tokens_per_rank", to, request.per_rank[to], per_rank[to], "is_token_in_rank");
    }
    for (std::uint32_t node = 0; node < nodes().nodes() && request.per_node != nullptr; ++node) {
        if (request.per_node[node] == static_cast<std::int64_t>(per_node[node])) continue;
        error =
            count_error("num_tokens_per_rdma_rank", node, request.per_node[node], per_node[node], "is_token_in_rank");
    }
    return handle;
}

// A word holds its epoch in 36 bits: what came next would look like the first calls' words.
std::string Exchange::epoch_error() const {
    if (epoch_ < kEpochMax) return {};
    return "this Buffer has made " + std::to_string(epoch_) +
           " calls, the most that its words can tell apart: make a new Buffer";
}

std::unique_ptr<Combine> Exchange::combine(const CombineRequest& request, std::string& error) {
    error = epoch_error();
    if (error.empty()) error = extent_error(request.offer_offset, request.offer_capacity);
    if (error.empty() && !request.handle) error = "the handle is missing";
    if (error.empty()) error = handle_error(request.handle);
    if (!error.empty()) return nullptr;
    const std::uint64_t received = request.handle->received(rank());
    if (request.rows != received) {
        error = "x has " + std::to_string(request.rows) + " rows but the handle's dispatch received " +
                std::to_string(received);
    } else if (request.row_bytes == 0 || request.row_bytes % 2 != 0) {
        error = "x has rows of " + std::to_string(request.row_bytes) + " bytes, must be bfloat16 rows of at least one";
    } else if (request.rows > 0 && request.x == nullptr) {
        error = "x is missing";
    } else if (request.rows > 0 && request.topk > 0 && request.weights == nullptr) {
        error = "topk_weights is missing but num_topk is " + std::to_string(request.topk);
    } else if (request.handle->tokens > 0 && request.out == nullptr) {
        error = "out is missing";
    } else if (request.handle->tokens > 0 && request.topk > 0 && request.out_weights == nullptr) {
        error = "out_weights is missing but num_topk is " + std::to_string(request.topk);
    } else if (nodes().nodes() > 1 && combine_chunk(shape().slot_bytes, request.row()).capacity == 0) {
        error = "a row of " + std::to_string(request.row_bytes) + " bytes with num_topk " +
                std::to_string(request.topk) + " does not fit a ring slot of " + std::to_string(shape().slot_bytes) +
                " bytes";
    }
    if (!error.empty()) return nullptr;
    return std::make_unique<Combine>(*this, request);
}

}  // namespace expertwire::exchange
