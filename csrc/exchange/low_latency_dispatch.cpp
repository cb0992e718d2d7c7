// A low-latency dispatch. A block at a receiver: for each row of its experts, in their order, then of tokens, the
// number of the slot and which of the units behind has the row, u32 each; then the units, scales and row, each token
// once. How many rows there are of each expert is in the record that comes with it.
#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/dispatch.hpp"
#include "exchange/low_latency_calls.hpp"
#include "exchange/words.hpp"
#include "rows/fp8.hpp"

namespace expertwire::exchange {

std::string plan_dispatch(const LowLatencyDispatchRequest& request, LowLatencyHandle& handle,
                          std::vector<std::uint32_t>& order) {
    const LowLatencyCall& call = request.call;
    const std::uint64_t slots = request.tokens * call.topk;
    if (request.tokens > 0 && request.topk_idx == nullptr) return "topk_idx is missing";
    if (request.index_bytes != 4 && request.index_bytes != 8) {
        return "topk_idx has elements of " + std::to_string(request.index_bytes) + " bytes, must be 4 or 8";
    }
    if (slots > ~std::uint32_t{0}) return "topk_idx has " + std::to_string(slots) + " elements, too many for one call";
    std::vector<std::uint64_t> begin(call.num_experts + 1, 0);
    handle.ids.resize(slots);
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        const std::int64_t id = load_index(request.topk_idx, request.index_bytes, slot);
        handle.ids[slot] = id;
        if (id == -1) continue;
        if (id < 0 || id >= static_cast<std::int64_t>(call.num_experts)) {
            return "topk_idx[" + std::to_string(slot / call.topk) + ", " + std::to_string(slot % call.topk) + "] is " +
                   std::to_string(id) + ", must be -1 (no expert) or in [0, " + std::to_string(call.num_experts) + ")";
        }
        if (++begin[static_cast<std::size_t>(id) + 1] > call.tokens_max) {
            return "expert " + std::to_string(id) + " gets " + std::to_string(begin[static_cast<std::size_t>(id) + 1]) +
                   " rows or more from this rank, for topk_idx names it twice in a row; it has room for " +
                   std::to_string(call.tokens_max) + ", num_max_dispatch_tokens_per_rank";
        }
    }
    for (std::uint64_t expert = 0; expert < call.num_experts; ++expert) begin[expert + 1] += begin[expert];
    handle.sent.resize(call.expert_first.size() - 1);
    for (std::size_t rank = 0; rank < handle.sent.size(); ++rank) {
        handle.sent[rank] = begin[call.expert_first[rank + 1]] - begin[call.expert_first[rank]];
        if (handle.sent[rank] <= call.rows_max(static_cast<std::uint32_t>(rank))) continue;
        return "the experts of rank " + std::to_string(rank) + " get " + std::to_string(handle.sent[rank]) +
               " rows from this rank, for topk_idx names some twice in a row; there is room for " +
               std::to_string(call.rows_max(static_cast<std::uint32_t>(rank)));
    }
    order.resize(begin.back());
    handle.place.assign(slots, 0);
    std::vector<std::uint64_t> next(begin.begin(), begin.end() - 1);
    std::vector<std::uint64_t> first_of(call.num_experts, 0);  // of the rank that owns the expert
    for (std::size_t rank = 0; rank + 1 < call.expert_first.size(); ++rank) {
        for (std::uint64_t e = call.expert_first[rank]; e < call.expert_first[rank + 1]; ++e) {
            first_of[e] = begin[call.expert_first[rank]];
        }
    }
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        if (handle.ids[slot] < 0) continue;
        const auto expert = static_cast<std::size_t>(handle.ids[slot]);
        handle.place[slot] = static_cast<std::uint32_t>(next[expert] - first_of[expert]);
        order[next[expert]++] = static_cast<std::uint32_t>(slot);
    }
    return {};
}

LowLatencyDispatch::LowLatencyDispatch(LowLatency& exchange, const LowLatencyDispatchRequest& request,
                                       std::shared_ptr<LowLatencyHandle> handle, std::vector<std::uint32_t> order,
                                       std::string refused)
    : LowLatencyOperation(exchange, Kind::dispatch, request.call),
      request_(request),
      handle_(std::move(handle)),
      order_(std::move(order)),
      expert_begin_(request.call.num_experts + 1, 0) {
    refused_ = std::move(refused);
    for (const std::uint32_t slot : order_) ++expert_begin_[static_cast<std::size_t>(handle_->ids[slot]) + 1];
    for (std::size_t expert = 1; expert < expert_begin_.size(); ++expert) {
        expert_begin_[expert] += expert_begin_[expert - 1];
    }
    blocks_ = blocks_of(call_);
    plans_.resize(exchange.nodes().ranks());
    if (!refused_.empty()) return;
    quantise();
    exchange.open_staging(parity_, half() + blocks_.bytes, half() + exchange.half_bytes());
}

// Each token once, however many experts it goes to.
void LowLatencyDispatch::quantise() {
    if (call_.format == RowFormat::bf16) return;
    const std::uint64_t words = call_.scale_words();
    const std::size_t blocks = rows::scale_blocks(call_.hidden);
    const rows::ScaleKind kind =
        call_.format == RowFormat::fp8 ? rows::ScaleKind::exact : rows::ScaleKind::power_of_two;
    rows_.resize(request_.tokens * call_.hidden);
    scales_.resize(request_.tokens * words);
    std::vector<float> scales(blocks);
    for (std::uint64_t token = 0; token < request_.tokens; ++token) {
        rows::quantise(rows_.data() + token * call_.hidden, scales.data(), request_.x + token * 2 * call_.hidden,
                       call_.hidden, kind);
        std::uint32_t* const to = scales_.data() + token * words;
        if (call_.format == RowFormat::fp8_ue8m0) {
            rows::pack_ue8m0(to, scales.data(), blocks);
        } else {
            std::memcpy(to, scales.data(), 4 * blocks);
        }
    }
}

// ---- sending

// A token that goes to several experts of the rank goes there once.
void LowLatencyDispatch::open_target(Target& target) {
    target.rows = handle_->sent[target.rank];
    const std::uint32_t* const slots = order_.data() + expert_begin_[call_.expert_first[target.rank]];
    unit_of_token_.assign(request_.tokens, kNobody);
    Plan& plan = plans_[target.rank];
    plan.entries.reserve(target.rows);
    for (std::uint64_t row = 0; row < target.rows; ++row) {
        const std::uint32_t token = slots[row] / call_.topk;
        if (unit_of_token_[token] == kNobody) {
            unit_of_token_[token] = static_cast<std::uint32_t>(plan.tokens.size());
            plan.tokens.push_back(token);
        }
        plan.entries.push_back({slots[row], unit_of_token_[token]});
    }
    target.units = plan.tokens.size();
    if (!target.near) return;
    target.block = exchange_.port().memory()[target.rank].data + half() + blocks_.of(exchange_.rank());
}

std::uint64_t LowLatencyDispatch::unit_bytes() const {
    return 4 * call_.scale_words() + call_.row_bytes();
}

void LowLatencyDispatch::place(std::byte* unit, std::uint32_t token) const {
    const std::uint64_t words = call_.scale_words();
    const std::uint64_t row_bytes = call_.row_bytes();
    if (words > 0) std::memcpy(unit, scales_.data() + token * words, 4 * words);
    const std::byte* const from = words > 0 ? rows_.data() + token * row_bytes : request_.x + token * row_bytes;
    rows::copy(unit + 4 * words, from, row_bytes, rows::Store::cached);
}

std::uint64_t LowLatencyDispatch::send_rows(Target& target, std::uint64_t budget) {
    const Plan& plan = plans_[target.rank];
    const std::uint64_t entries = plan.entries.size() * sizeof(Entry);
    const std::uint64_t bytes = entries + target.units * unit_bytes();
    std::uint64_t moved = 0;
    if (!target.near && target.staged == 0) {
        const std::optional<std::uint64_t> at = exchange_.reserve(parity_, bytes);
        if (!at) return 0;
        target.staged_at = *at;
        target.staged = target.rows;
        exchange_.outgoing_[parity_].push_back({{}, epoch_, target.rank, *at, *at + bytes});
        moved = 1;
    }
    std::byte* const block = target.near ? target.block : exchange_.data() + target.staged_at;
    if (target.next == 0) std::memcpy(block, plan.entries.data(), entries);
    for (; target.next < target.units && moved < budget; ++target.next) {
        place(block + entries + target.next * unit_bytes(), plan.tokens[target.next]);
        moved += unit_bytes();
    }
    if (target.next < target.units) return moved;
    if (target.near) {
        finish_near(target);
        return moved + 1;
    }
    const std::uint64_t there = half() + blocks_.of(exchange_.rank());
    const Port::Piece piece{Region::data, target.staged_at, Region::data, there, bytes};
    if (!finish_far(target, {&piece, 1})) return moved;
    // The put holds the bytes now; the reservation without a ticket has served.
    std::erase_if(exchange_.outgoing_[parity_],
                  [&](const LowLatency::Outgoing& out) { return out.rank == target.rank && !out.ticket.valid(); });
    return moved + 1;
}

std::uint64_t LowLatencyDispatch::notify_bytes(std::uint32_t to) const {
    return sizeof(LowLatencyNotify) + call_.owned(to) * sizeof(std::uint32_t);
}

void LowLatencyDispatch::write_notify(std::byte* at, std::uint32_t to, std::uint64_t rows) const {
    const LowLatencyNotify notify = header(rows);
    std::memcpy(at, &notify, sizeof notify);
    at += sizeof notify;
    for (std::uint64_t expert = call_.expert_first[to]; expert < call_.expert_first[to + 1]; ++expert) {
        std::uint32_t count = 0;
        if (rows > 0) count = static_cast<std::uint32_t>(expert_begin_[expert + 1] - expert_begin_[expert]);
        std::memcpy(at, &count, sizeof count);
        at += sizeof count;
    }
}

// ---- receiving

std::uint32_t LowLatencyDispatch::count_of(std::uint32_t source, std::uint64_t expert) const {
    std::uint32_t count;
    std::memcpy(&count,
                exchange_.control() + exchange_.layout().notify_in(parity_, source) + sizeof(LowLatencyNotify) +
                    expert * sizeof count,
                sizeof count);
    return count;
}

bool LowLatencyDispatch::take_counts(std::uint32_t source) {
    const std::uint64_t mine = call_.owned(exchange_.rank());
    const std::uint64_t ranks = exchange_.nodes().ranks();
    std::uint64_t rows = 0;
    for (std::uint64_t expert = 0; expert < mine; ++expert) {
        const std::uint32_t count = count_of(source, expert);
        handle_->count[expert * ranks + source] = count;
        taken_[expert * ranks + source] = rows;
        rows += count;
        if (count <= call_.tokens_max && rows <= call_.rows_max(exchange_.rank())) continue;
        fail(FailureReason::protocol, source,
             "rank " + std::to_string(source) + " says that it sent " + std::to_string(count) +
                 " rows to local expert " + std::to_string(expert) + ", more than num_max_dispatch_tokens_per_rank, " +
                 std::to_string(call_.tokens_max));
        return false;
    }
    handle_->came[source] = rows;
    for (std::uint64_t row = 0; row < rows; ++row) {
        if (entry(source, row).unit < rows) continue;
        fail(FailureReason::protocol, source,
             "rank " + std::to_string(source) + " sent " + std::to_string(rows) + " rows and names number " +
                 std::to_string(entry(source, row).unit));
        return false;
    }
    return true;
}

LowLatencyDispatch::Entry LowLatencyDispatch::entry(std::uint32_t source, std::uint64_t row) const {
    Entry found;
    std::memcpy(&found, exchange_.data() + half() + blocks_.of(source) + row * sizeof found, sizeof found);
    return found;
}

void LowLatencyDispatch::begin_packing() {
    const auto ranks = exchange_.nodes().ranks();
    const std::uint64_t mine = call_.owned(exchange_.rank());
    handle_->count.assign(mine * ranks, 0);
    handle_->begin.assign(mine * ranks, 0);
    handle_->came.assign(ranks, 0);
    taken_.assign(mine * ranks, 0);
    for (std::uint32_t source = 0; source < ranks; ++source) {
        if (takes(source) && !take_counts(source)) return;
        if (!takes(source)) handle_->sent[source] = 0;  // it was left out, perhaps after rows had gone there
    }
    for (std::uint64_t expert = 0; expert < mine; ++expert) {
        std::uint32_t begin = 0;
        for (std::uint32_t source = 0; source < ranks; ++source) {
            const std::size_t at = expert * ranks + source;
            handle_->begin[at] = begin;
            begin += handle_->count[at];
            request_.layout_range[at] = static_cast<std::int64_t>(handle_->begin[at]) << 32 | handle_->count[at];
        }
        request_.counts[expert] = static_cast<std::int32_t>(begin);
        if (request_.statistics != nullptr) request_.statistics[expert] += static_cast<std::int32_t>(begin);
    }
}

std::uint64_t LowLatencyDispatch::pack_rows(std::uint64_t expert, std::uint32_t source) {
    const std::uint64_t ranks = exchange_.nodes().ranks();
    const std::uint64_t capacity = ranks * call_.tokens_max;
    const std::size_t at = expert * ranks + source;
    const std::uint64_t count = handle_->count[at];
    const std::uint64_t rows = handle_->came[source];
    const std::uint64_t words = call_.scale_words();
    const std::uint64_t row_bytes = call_.row_bytes();
    const std::byte* const units = exchange_.data() + half() + blocks_.of(source) + rows * sizeof(Entry);
    for (std::uint64_t row = 0; row < count; ++row) {
        const Entry from = entry(source, taken_[at] + row);
        if (from.unit >= rows) {  // it was good when it came
            fail(FailureReason::protocol, source,
                 "rows of rank " + std::to_string(source) + " were written over while they were packed");
            return 0;
        }
        const std::uint64_t to = handle_->begin[at] + row;
        request_.src_info[expert * capacity + to] = static_cast<std::int32_t>(from.slot / call_.topk);
        const std::byte* const unit = units + from.unit * unit_bytes();
        for (std::uint64_t word = 0; word < words; ++word) {
            std::memcpy(request_.scales + (expert * words + word) * capacity + to, unit + 4 * word, 4);
        }
        rows::copy(request_.out + (expert * capacity + to) * row_bytes, unit + 4 * words, row_bytes,
                   rows::Store::streaming);
    }
    return count * row_bytes;
}

std::uint64_t LowLatencyDispatch::pack(std::uint64_t budget) {
    const std::uint64_t ranks = exchange_.nodes().ranks();
    const std::uint64_t end = call_.owned(exchange_.rank()) * ranks;
    std::uint64_t moved = 0;
    for (; next_ < end && moved < budget && failure_.reason == FailureReason::none; ++next_) {
        const auto source = static_cast<std::uint32_t>(next_ % ranks);
        moved += 1;
        if (takes(source)) moved += pack_rows(next_ / ranks, source);
    }
    return moved;
}

void LowLatencyDispatch::end_packing() {
    rows::fence();  // another thread may be the one that reads
    handle_->complete = true;
}

}  // namespace expertwire::exchange
