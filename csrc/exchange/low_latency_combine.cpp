// A low-latency combine. A block at a home: the rows that the home sent to that rank's experts, in the order in which
// it sent them, so that nothing but the rows travels. The home sums them, weighted, in top-k order.
#include <algorithm>
#include <utility>

#include "exchange/dispatch.hpp"
#include "exchange/low_latency_calls.hpp"
#include "exchange/words.hpp"
#include "rows/fp8.hpp"

namespace expertwire::exchange {

namespace {

constexpr std::uint64_t kPieceBytes = 64 << 10;  // a put's cost beside its bytes is that of copying about so many
constexpr std::size_t kPiecesMax = 16;           // of one put: far below what a queue can take at once

}  // namespace

std::string plan_combine(const LowLatencyCombineRequest& request, std::vector<RowPlace>& places) {
    const LowLatencyHandle& handle = *request.handle;
    const std::uint64_t topk = request.topk;
    const std::vector<std::uint64_t>& first = handle.call.expert_first;
    places.assign(request.tokens * topk, {});
    for (std::uint64_t token = 0; token < request.tokens; ++token) {
        const std::int64_t* const ids = handle.ids.data() + token * topk;
        std::vector<std::uint8_t> used;  // only where a token's ids are not those of the dispatch
        for (std::uint64_t k = 0; k < topk; ++k) {
            const std::int64_t id = load_index(request.topk_idx, request.index_bytes, token * topk + k);
            if (id == -1) continue;
            std::uint64_t found = k;
            if (ids[k] != id || !used.empty()) {
                used.resize(topk, 0);
                found = 0;
                while (found < topk && (ids[found] != id || used[found])) ++found;
                if (found == topk) {
                    return "topk_idx[" + std::to_string(token) + ", " + std::to_string(k) + "] is " +
                           std::to_string(id) + ", to which the handle's dispatch sent no row of that token";
                }
                used[found] = 1;
            }
            const auto after = std::upper_bound(first.begin(), first.end(), static_cast<std::uint64_t>(id));
            places[token * topk + k] = {static_cast<std::uint32_t>(after - first.begin() - 1),
                                        handle.place[token * topk + found]};
        }
    }
    return {};
}

LowLatencyCombine::LowLatencyCombine(LowLatency& exchange, const LowLatencyCombineRequest& request,
                                     std::vector<RowPlace> places)
    : LowLatencyOperation(exchange, Kind::combine, request.handle->call),
      request_(request),
      places_(std::move(places)),
      row_bytes_(2 * request.handle->call.hidden),
      blocks_(blocks_of(call_)),
      usable_(exchange.nodes().ranks(), 0),
      pointers_(request.topk),
      chosen_(request.topk),
      expert_of_(exchange.nodes().ranks(), 0),
      before_(exchange.nodes().ranks(), 0) {
    weights_.assign(request.weights, request.weights + request.tokens * request.topk);
    std::uint64_t behind = blocks_.bytes;
    if (request.zero_copy) behind += combine_buffer_bytes(call_, exchange.rank());
    gathers_ = !request.zero_copy || gathering_pays(behind);
    if (gathers_) exchange.open_staging(parity_, half() + behind, half() + exchange.half_bytes());
}

// Rows of zero copy lie apart, by experts. In small pieces it is quicker to gather them first, where there is room for
// all of a rank's behind the buffer that they lie in.
bool LowLatencyCombine::gathering_pays(std::uint64_t behind) const {
    const LowLatencyHandle& handle = *request_.handle;
    const std::uint64_t ranks = exchange_.nodes().ranks();
    std::uint64_t most = 0, rows = 0, pieces = 0;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        if (exchange_.near(rank)) continue;
        most = std::max<std::uint64_t>(most, handle.came[rank]);
        rows += handle.came[rank];
        for (std::size_t at = rank; at < handle.count.size(); at += ranks) pieces += handle.count[at] > 0;
    }
    return rows * row_bytes_ < pieces * kPieceBytes && behind + most * row_bytes_ <= exchange_.half_bytes();
}

// ---- sending

void LowLatencyCombine::open_target(Target& target) {
    target.rows = target.units = request_.handle->came[target.rank];
    if (!target.near) return;
    target.block = exchange_.port().memory()[target.rank].data + half() + blocks_.of(exchange_.rank());
}

// Where row number `row` of those that came from the target lies in x. Called with rows that rise.
const std::byte* LowLatencyCombine::row_of(const Target& target, std::uint64_t row) {
    const LowLatencyHandle& handle = *request_.handle;
    const std::uint64_t ranks = exchange_.nodes().ranks();
    std::uint32_t& expert = expert_of_[target.rank];
    std::uint64_t& before = before_[target.rank];
    while (row - before >= handle.count[expert * ranks + target.rank]) {
        before += handle.count[expert * ranks + target.rank];
        ++expert;
    }
    const std::uint64_t begin = handle.begin[expert * ranks + target.rank];
    return request_.x + (expert * ranks * call_.tokens_max + begin + row - before) * row_bytes_;
}

std::uint64_t LowLatencyCombine::send_rows(Target& target, std::uint64_t budget) {
    if (target.near) return send_near(target, budget);
    return gathers_ ? send_staged(target, budget) : send_direct(target);
}

std::uint64_t LowLatencyCombine::send_near(Target& target, std::uint64_t budget) {
    std::uint64_t moved = 0;
    for (; target.next < target.rows && moved < budget; ++target.next) {
        rows::copy(target.block + target.next * row_bytes_, row_of(target, target.next), row_bytes_,
                   rows::Store::streaming);
        moved += row_bytes_;
    }
    if (target.next < target.rows) return moved;
    finish_near(target);
    return moved + 1;
}

Port::Piece LowLatencyCombine::piece(const Target&, std::uint64_t from, std::uint64_t row, std::uint64_t rows) const {
    return {Region::data, from, Region::data, half() + blocks_.of(exchange_.rank()) + row * row_bytes_,
            rows * row_bytes_};
}

// Through the memory behind the blocks, in rounds where not all rows find room at once.
std::uint64_t LowLatencyCombine::send_staged(Target& target, std::uint64_t budget) {
    std::uint64_t moved = 0;
    if (target.staged == 0) {
        std::uint64_t rows = target.rows - target.next;
        std::optional<std::uint64_t> at = exchange_.reserve(parity_, rows * row_bytes_);
        while (!at && rows > 1) at = exchange_.reserve(parity_, (rows = (rows + 1) / 2) * row_bytes_);
        if (!at) return 0;
        target.staged_at = *at;
        target.staged = rows;
        target.staged_from = target.next;
        exchange_.outgoing_[parity_].push_back({{}, epoch_, target.rank, *at, *at + rows * row_bytes_});
        moved = 1;
    }
    const std::uint64_t end = target.staged_from + target.staged;
    std::byte* const to = exchange_.data() + target.staged_at;
    for (; target.next < end && moved < budget; ++target.next) {
        rows::copy(to + (target.next - target.staged_from) * row_bytes_, row_of(target, target.next), row_bytes_,
                   rows::Store::cached);
        moved += row_bytes_;
    }
    if (target.next < end) return moved;
    const Port::Piece rows = piece(target, target.staged_at, target.staged_from, target.staged);
    Port::Put part;
    part.rank = target.rank;
    part.head = rows;
    const bool last = end == target.rows;
    if (!(last ? finish_far(target, {&rows, 1})
               : exchange_.put_part(parity_, part, epoch_, rows.from_offset, rows.from_offset + rows.bytes))) {
        return moved;
    }
    std::erase_if(exchange_.outgoing_[parity_],
                  [&](const LowLatency::Outgoing& out) { return out.rank == target.rank && !out.ticket.valid(); });
    target.staged = 0;
    return moved + 1;
}

// In large pieces, or without room to gather them: from where they lie, a piece for each expert, a few pieces to a put.
std::uint64_t LowLatencyCombine::send_direct(Target& target) {
    std::vector<Port::Piece> pieces;
    expert_of_[target.rank] = 0;  // an earlier try may have gone further
    before_[target.rank] = 0;
    std::uint64_t row = target.next;
    while (row < target.rows && pieces.size() < kPiecesMax) {
        const std::byte* const from = row_of(target, row);
        const std::uint32_t expert = expert_of_[target.rank];
        const std::uint64_t rows =
            request_.handle->count[expert * std::uint64_t{exchange_.nodes().ranks()} + target.rank] -
            (row - before_[target.rank]);
        pieces.push_back(piece(target, static_cast<std::uint64_t>(from - exchange_.data()), row, rows));
        row += rows;
    }
    if (row == target.rows) return finish_far(target, pieces) ? 1 : 0;
    Port::Put part;
    part.rank = target.rank;
    part.head = pieces[0];
    part.more = std::span<const Port::Piece>(pieces).subspan(1);
    if (!exchange_.put_part(parity_, part, epoch_, pieces.front().from_offset,
                            pieces.back().from_offset + pieces.back().bytes)) {
        return 0;
    }
    target.next = row;
    return 1;
}

void LowLatencyCombine::write_notify(std::byte* at, std::uint32_t, std::uint64_t rows) const {
    const LowLatencyNotify notify = header(rows);
    std::copy_n(reinterpret_cast<const std::byte*>(&notify), sizeof notify, at);
}

// ---- receiving

// A rank that left this one out in the dispatch has nothing of it: its part is missing, as a masked rank's is.
void LowLatencyCombine::begin_packing() {
    for (std::uint32_t rank = 0; rank < usable_.size(); ++rank) {
        if (!takes(rank)) continue;
        const std::uint64_t rows = notify(rank).rows;
        usable_[rank] = rows == request_.handle->sent[rank] && rows > 0;
        if (usable_[rank] || rows == 0 || request_.handle->sent[rank] == 0) continue;
        fail(FailureReason::protocol, rank,
             "rank " + std::to_string(rank) + " brings back " + std::to_string(rows) + " rows of " +
                 std::to_string(request_.handle->sent[rank]) + " that were sent there");
    }
}

std::uint64_t LowLatencyCombine::pack(std::uint64_t budget) {
    std::uint64_t moved = 0;
    for (; token_ < request_.tokens && moved < budget; ++token_) {
        std::uint32_t count = 0;
        for (std::uint64_t k = 0; k < request_.topk; ++k) {
            const std::uint64_t slot = token_ * request_.topk + k;
            const RowPlace& place = places_[slot];
            if (place.rank == kNobody || !usable_[place.rank]) continue;
            pointers_[count] = exchange_.data() + half() + blocks_.of(place.rank) + place.row * row_bytes_;
            chosen_[count++] = weights_[slot];
        }
        rows::reduce_weighted(request_.out + token_ * row_bytes_, pointers_.data(), chosen_.data(), count,
                              call_.hidden);
        moved += (count + 1) * row_bytes_;
    }
    return moved;
}

}  // namespace expertwire::exchange
