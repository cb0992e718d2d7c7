// The standing side: what call comes next, whose memory it may take, what is on its way out, whom this rank leaves out.
#include "exchange/low_latency.hpp"

#include <algorithm>
#include <utility>

#include "exchange/low_latency_calls.hpp"
#include "exchange/words.hpp"

namespace expertwire::exchange {

LowLatency::LowLatency(const LowLatencyShape& shape, Port& port, std::uint64_t data_bytes)
    : shape_(shape),
      layout_(shape.nodes.ranks(), shape.local_experts_max),
      port_(port),
      data_bytes_(data_bytes),
      identity_(std::make_shared<const char>('l')),
      masked_(shape.nodes.ranks(), 0),
      late_(shape.nodes.ranks(), LateRows::none),
      sent_(shape.nodes.ranks()),
      left_out_(shape.nodes.ranks(), 0),
      taken_in_(shape.nodes.ranks(), 0),
      told_(shape.nodes.ranks(), 0) {
    for (auto& words : announced_) words.assign(shape.nodes.ranks(), 0);
    for (auto& late : late_then_) late.assign(shape.nodes.ranks(), 0);
}

void LowLatency::start_after(std::uint64_t epoch) {
    epoch_ = consumed_ = epoch;
    for (std::uint32_t rank = 0; rank < nodes().ranks(); ++rank) {
        told_[rank] = epoch;
        store_word(control(), layout_.consumed(rank), epoch);
    }
}

std::uint64_t LowLatency::consumed_by(std::uint32_t rank) const {
    return load_word(control(), layout_.consumed(rank));
}

// ---- beginning

Refusal LowLatency::may_begin(const char* what) const {
    const std::uint64_t next = epoch_ + 1;
    const std::shared_ptr<LowLatencyOperation>& before = calls_[next % 2];
    if (before && !before->ended()) {
        std::string live = std::string(kind_name(before->kind())) + " (call " + std::to_string(before->epoch()) + ")";
        const std::shared_ptr<LowLatencyOperation>& last = calls_[epoch_ % 2];
        if (last && last != before && !last->ended()) {
            live += " and of " + std::string(kind_name(last->kind())) + " (call " + std::to_string(last->epoch()) + ")";
        }
        return {Refusal::Kind::state, std::string(what) + " would be call " + std::to_string(next) +
                                          ", which takes the memory of call " + std::to_string(next - 2) +
                                          ", but the hook of " + live +
                                          " has not been called: at most two results live at a time, call it first"};
    }
    return {};
}

std::string LowLatency::call_error(const LowLatencyCall& call) const {
    if (call.tokens_max == 0 || call.tokens_max > kCountMax) {
        return "num_max_dispatch_tokens_per_rank is " + std::to_string(call.tokens_max) + ", must be in [1, " +
               std::to_string(kCountMax) + "]";
    }
    if (call.hidden == 0) return "hidden is 0, must be at least 1";
    if (call.topk == 0) return "topk_idx has no columns, must have at least 1";
    const std::string owners = expert_first_error(call.expert_first, nodes().ranks(), call.num_experts);
    if (!owners.empty()) return owners;
    for (std::uint32_t rank = 0; rank < nodes().ranks(); ++rank) {
        if (call.owned(rank) > shape_.local_experts_max) {
            return "rank " + std::to_string(rank) + " owns " + std::to_string(call.owned(rank)) + " of num_experts " +
                   std::to_string(call.num_experts) + ", at most " + std::to_string(shape_.local_experts_max) +
                   " were planned when the Buffer was made (max_local_experts)";
        }
    }
    return {};
}

std::string LowLatency::capacity_error(const LowLatencyCall& call) const {
    const std::uint64_t needed = low_latency_bytes(call, nodes());
    if (needed <= 2 * half_bytes()) return {};
    return "num_max_dispatch_tokens_per_rank " + std::to_string(call.tokens_max) + ", hidden " +
           std::to_string(call.hidden) + ", num_experts " + std::to_string(call.num_experts) + " and top-k " +
           std::to_string(call.topk) + " need " + std::to_string(needed) +
           " bytes of low-latency memory on a rank, num_rdma_bytes is " + std::to_string(data_bytes_);
}

// Whom that call of mine does without, as far as is known: it was left out before the call had its rows.
bool LowLatency::out_of(std::uint32_t rank, std::uint64_t call) const {
    return masked_[rank] || (left_out_[rank] <= call && call <= taken_in_[rank]);
}

// A rank that was stopped in the middle of a call writes where its block was then, when it wakes. Whether it has died
// or come back since says nothing of what it wrote before.
std::string LowLatency::moved_error(const LowLatencyCall& call) const {
    const std::uint64_t next = epoch_ + 1;
    const std::uint64_t before = block_bytes_[next % 2];
    const std::uint64_t now = blocks_of(call).block;
    if (before == 0 || before == now) return {};
    const bool consumed = consumed_ + 2 >= next;
    for (std::uint32_t rank = 0; rank < nodes().ranks(); ++rank) {
        const bool may_come = late_[rank] == LateRows::may_come;
        const bool then = consumed ? late_then_[next % 2][rank] != 0 : may_come && out_of(rank, next - 2);
        const bool still = masked_[rank] && may_come;
        if (!still && (!then || mutant(Mutant::late_rows_forgotten))) continue;
        return "rank " + std::to_string(rank) + (masked_[rank] ? " is" : " was") +
               (still ? " left out but may still write rows of a call that it took part in, in blocks of "
                      : " left out and may have written over rows that have come for this call, in blocks of ") +
               std::to_string(before) + " bytes, and this call has blocks of " + std::to_string(now) +
               ": keep num_max_dispatch_tokens_per_rank, hidden, num_experts and top-k until its process has ended or "
               "it is taken in again, and for two calls more";
    }
    return {};
}

// Call k goes to a rank once that has consumed call k − 2, or, after it was left out, knows what call comes next.
bool LowLatency::takes_rows(std::uint32_t rank, std::uint64_t epoch) const {
    const std::uint64_t consumed = consumed_by(rank);
    return consumed + 2 >= epoch && consumed >= taken_in_[rank];
}

void LowLatency::begin(const std::shared_ptr<LowLatencyOperation>& operation) {
    ++epoch_;
    calls_[epoch_ % 2] = operation;
    block_bytes_[epoch_ % 2] = blocks_of(operation->call_).block;
    for (std::uint32_t rank = 0; rank < nodes().ranks(); ++rank) {
        if (masked_[rank]) operation->leave_out(rank);
    }
}

std::shared_ptr<LowLatencyOperation> LowLatency::dispatch(const LowLatencyDispatchRequest& request,
                                                          std::shared_ptr<const LowLatencyHandle>& handle,
                                                          Refusal& refusal) {
    refusal = may_begin("low_latency_dispatch");
    if (refusal.kind != Refusal::Kind::none) return nullptr;
    refusal.text = call_error(request.call);
    if (refusal.text.empty()) {
        refusal.text = moved_error(request.call);
        refusal.kind = Refusal::Kind::state;
        if (!refusal.text.empty()) return nullptr;
    }
    if (refusal.text.empty() && request.tokens > request.call.tokens_max) {
        refusal.text = "x has " + std::to_string(request.tokens) + " rows, num_max_dispatch_tokens_per_rank is " +
                       std::to_string(request.call.tokens_max);
    }
    auto made = std::make_shared<LowLatencyHandle>();
    made->owner = identity_;
    made->epoch = epoch_ + 1;
    made->call = request.call;
    made->tokens = request.tokens;
    std::vector<std::uint32_t> order;
    if (refusal.text.empty()) refusal.text = plan_dispatch(request, *made, order);
    if (!refusal.text.empty()) {
        refusal.kind = Refusal::Kind::argument;
        return nullptr;
    }
    const auto operation =
        std::make_shared<LowLatencyDispatch>(*this, request, made, std::move(order), capacity_error(request.call));
    begin(operation);
    handle = made;
    return operation;
}

std::shared_ptr<LowLatencyOperation> LowLatency::combine(const LowLatencyCombineRequest& request, Refusal& refusal) {
    refusal = may_begin("low_latency_combine");
    if (refusal.kind != Refusal::Kind::none) return nullptr;
    const auto refuse = [&](Refusal::Kind kind, std::string text) {
        refusal = {kind, std::move(text)};
        return nullptr;
    };
    const LowLatencyHandle* const handle = request.handle.get();
    if (handle == nullptr || handle->owner != identity_) {
        return refuse(Refusal::Kind::argument, "the handle was made by another Buffer");
    }
    if (!handle->complete) {
        return refuse(Refusal::Kind::state, "the hook of the handle's dispatch (call " + std::to_string(handle->epoch) +
                                                ") has not been called, or that call failed");
    }
    if (request.tokens != handle->tokens || request.topk != handle->call.topk ||
        request.hidden != handle->call.hidden) {
        return refuse(Refusal::Kind::argument,
                      "topk_idx is [" + std::to_string(request.tokens) + ", " + std::to_string(request.topk) +
                          "] and hidden " + std::to_string(request.hidden) + ", the handle's dispatch had [" +
                          std::to_string(handle->tokens) + ", " + std::to_string(handle->call.topk) + "] and hidden " +
                          std::to_string(handle->call.hidden));
    }
    if (request.zero_copy && buffer_epoch_ != epoch_ + 1) {
        return refuse(Refusal::Kind::state,
                      "zero_copy is set but the combine buffer was handed out for call " +
                          std::to_string(buffer_epoch_) + " and this is call " + std::to_string(epoch_ + 1) +
                          ": take get_next_low_latency_combine_buffer after every other call, just before the combine");
    }
    if (std::string moved = moved_error(handle->call); !moved.empty())
        return refuse(Refusal::Kind::state, std::move(moved));
    std::vector<RowPlace> places;
    std::string text = plan_combine(request, places);
    if (!text.empty()) return refuse(Refusal::Kind::argument, std::move(text));
    const std::uint64_t buffer = (epoch_ + 1) % 2 * half_bytes() + blocks_of(handle->call).bytes;
    const std::byte* const inside = data();
    LowLatencyCombineRequest actual = request;
    if (request.zero_copy) {
        actual.x = inside + buffer;
    } else if (request.x >= inside && request.x < inside + data_bytes_) {
        if (buffer_epoch_ != epoch_ + 1 || request.x != inside + buffer) {
            return refuse(Refusal::Kind::argument,
                          "x lies in the low-latency memory of this Buffer but is not the combine buffer of this call");
        }
        actual.zero_copy = true;
    }
    const auto operation = std::make_shared<LowLatencyCombine>(*this, actual, std::move(places));
    begin(operation);
    return operation;
}

std::optional<std::uint64_t> LowLatency::combine_buffer(const LowLatencyHandle& handle, bool& waiting,
                                                        Refusal& refusal) {
    waiting = false;
    refusal = may_begin("get_next_low_latency_combine_buffer");
    if (refusal.kind != Refusal::Kind::none) return std::nullopt;
    if (handle.owner != identity_) {
        refusal = {Refusal::Kind::argument, "the handle was made by another Buffer"};
        return std::nullopt;
    }
    const std::uint32_t parity = (epoch_ + 1) % 2;
    const std::uint64_t blocks = blocks_of(handle.call).bytes;
    const std::uint64_t needed = blocks + combine_buffer_bytes(handle.call, rank());
    if (needed > half_bytes()) {
        refusal = {Refusal::Kind::capacity, "the combine buffer and what a combine receives need " +
                                                std::to_string(2 * needed) +
                                                " bytes of low-latency memory, num_rdma_bytes is " +
                                                std::to_string(data_bytes_) + ": combine without zero_copy"};
        return std::nullopt;
    }
    std::uint32_t failed = 0;
    Status status = Status::ok;
    settle(failed, status);
    if (status != Status::ok) {
        refusal = {Refusal::Kind::state, "rows of an earlier call could not be delivered to rank " +
                                             std::to_string(failed) + ": destroy this Buffer and make a new one"};
        return std::nullopt;
    }
    waiting = std::any_of(outgoing_[parity].begin(), outgoing_[parity].end(),
                          [](const Outgoing& out) { return !out.given_up; });
    if (waiting) return std::nullopt;
    buffer_epoch_ = epoch_ + 1;
    return parity * half_bytes() + blocks;
}

// ---- what is on its way out

// Tickets that have ended give back what they hold, at once: others may be waiting for room in the same table.
bool LowLatency::reap(std::uint32_t parity, std::uint32_t& rank, Status& status) {
    bool good = true;
    std::vector<std::uint32_t> unreached;
    std::erase_if(outgoing_[parity], [&](const Outgoing& out) {
        if (!out.ticket.valid()) return false;
        const Status now = port_.status(out.ticket);
        if (now == Status::pending) return false;
        if (now == Status::cancelled && out.word_before) announced_[parity][out.rank] = *out.word_before;
        if (now == Status::ok || now == Status::cancelled || masked_[out.rank]) return true;
        if (mask_what_fails_) {
            unreached.push_back(out.rank);
            return true;
        }
        good = false;
        rank = out.rank;
        status = now;
        return true;
    });
    for (const std::uint32_t lost : unreached) mask(lost, true);
    return good;
}

bool LowLatency::in_flight(std::uint32_t parity, std::uint32_t rank) const {
    if (mutant(Mutant::reused_in_flight)) return false;
    return std::any_of(outgoing_[parity].begin(), outgoing_[parity].end(),
                       [&](const Outgoing& out) { return out.rank == rank && out.ticket.valid(); });
}

bool LowLatency::drains(std::uint64_t epoch) const {
    if (mutant(Mutant::consumed_in_flight)) return false;
    return std::any_of(outgoing_[epoch % 2].begin(), outgoing_[epoch % 2].end(),
                       [&](const Outgoing& out) { return out.epoch == epoch && !out.given_up; });
}

void LowLatency::open_staging(std::uint32_t parity, std::uint64_t from, std::uint64_t to) {
    staging_[parity] = {from, from, to};
}

// What is given up may be read by a NIC for long, and may hold anything. What others still hold is stepped over, and
// waited for where there is no room beside it.
std::optional<std::uint64_t> LowLatency::reserve(std::uint32_t parity, std::uint64_t bytes) {
    Staging& staging = staging_[parity];
    const auto place = [&](std::uint64_t at) {
        for (bool clear = false; !clear;) {
            clear = true;
            for (const Outgoing& out : outgoing_[parity]) {
                if (out.given_up || at >= out.to || at + bytes <= out.from) continue;
                if (mutant(Mutant::reused_in_flight)) continue;
                at = (out.to + 15) / 16 * 16;
                clear = false;
            }
        }
        return at;
    };
    std::uint64_t at = place(staging.next);
    if (at + bytes > staging.to) at = place(staging.from);
    if (at + bytes > staging.to) return std::nullopt;
    staging.next = (at + bytes + 15) / 16 * 16;
    return at;
}

// The call's only flagged put to that rank: brings its word to the call's number once everything before is there.
bool LowLatency::put(std::uint32_t parity, const Port::Put& put, std::uint64_t epoch, std::uint64_t from,
                     std::uint64_t to) {
    Port::Put flagged = put;
    flagged.word_offset = layout_.arrived(parity, rank());
    flagged.delta = epoch - announced_[parity][put.rank];
    const std::optional<Ticket> ticket = port_.put(flagged);
    if (!ticket) return false;
    outgoing_[parity].push_back({*ticket, epoch, put.rank, from, to, announced_[parity][put.rank]});
    announced_[parity][put.rank] = epoch;
    return true;
}

bool LowLatency::put_part(std::uint32_t parity, const Port::Put& put, std::uint64_t epoch, std::uint64_t from,
                          std::uint64_t to) {
    Port::Put part = put;
    part.word_offset = layout_.arrived(parity, rank());
    part.delta = 0;
    const std::optional<Ticket> ticket = port_.put(part);
    if (!ticket) return false;
    outgoing_[parity].push_back({*ticket, epoch, put.rank, from, to});
    return true;
}

// ---- what is consumed, and who knows

void LowLatency::packed(std::uint64_t epoch) {
    if (epoch > consumed_ && std::find(packed_.begin(), packed_.end(), epoch) == packed_.end())
        packed_.push_back(epoch);
}

// Every call up to the number told has been consumed: a hook that is called early waits for the one before.
bool LowLatency::settle(std::uint32_t& failed, Status& status) {
    const bool good = reap(0, failed, status) && reap(1, failed, status);
    while (!drains(consumed_ + 1) && std::erase(packed_, consumed_ + 1) > 0) {
        ++consumed_;
        for (std::uint32_t rank = 0; rank < nodes().ranks(); ++rank)
            late_then_[consumed_ % 2][rank] = late_[rank] == LateRows::may_come && out_of(rank, consumed_);
    }
    return tell() && packed_.empty() && good;
}

bool LowLatency::tell() {
    bool all = true;
    for (std::uint32_t rank = 0; rank < nodes().ranks(); ++rank) {
        if (masked_[rank] || told_[rank] == consumed_) continue;
        if (near(rank)) {
            store_word(port_.memory()[rank].control, layout_.consumed(this->rank()), consumed_);
            port_.wake(rank);
        } else if (!port_.add(rank, layout_.consumed(this->rank()), consumed_ - told_[rank])) {
            all = false;
            continue;
        }
        told_[rank] = consumed_;
    }
    return all;
}

void LowLatency::mask(std::uint32_t rank, bool masked) {
    if (masked_[rank] == static_cast<std::uint8_t>(masked)) return;
    masked_[rank] = masked;
    if (masked) {
        late_[rank] = LateRows::may_come;
        left_out_[rank] = epoch_ + 1;
        for (const std::shared_ptr<LowLatencyOperation>& call : calls_) {
            if (call && !call->ended() && call->leave_out(rank))
                left_out_[rank] = std::min(left_out_[rank], call->epoch());
        }
        give_up(rank);
        return;
    }
    taken_in_[rank] = epoch_;
    if (mutant(Mutant::mask_forgets_consumed)) told_[rank] = consumed_;
    tell();
}

// Rows on their way to who is masked now are behind a word that has not left. It does not leave any more: then they may
// be overwritten at once, by this rank and by its peers, and the rank, which hears from which call on it is left out,
// never takes them for what was sent. Nobody can wait for them instead, for it may be stopped for good.
void LowLatency::give_up(std::uint32_t rank) {
    for (auto& outgoing : outgoing_) {
        for (Outgoing& out : outgoing) {
            if (out.rank != rank || !out.ticket.valid()) continue;
            if (mutant(Mutant::told_of_overwritten)) {
                out.given_up = true;
                continue;
            }
            const Status said = port_.withhold(out.ticket);
            out.given_up = said != Status::pending;
            if (said == Status::cancelled) left_out_[rank] = std::min(left_out_[rank], out.epoch);
        }
    }
}

// ---- left out

void LowLatency::abandon(const std::string& text) {
    for (std::shared_ptr<LowLatencyOperation>& call : calls_) {
        if (call && !call->ended()) call->abandon(FailureReason::left_out, text);
    }
    for (auto& outgoing : outgoing_) std::erase_if(outgoing, [](const Outgoing& out) { return !out.ticket.valid(); });
}

void LowLatency::go_on_after(std::uint64_t epoch) {
    for (std::shared_ptr<LowLatencyOperation>& call : calls_) call.reset();
    packed_.clear();
    buffer_epoch_ = 0;
    epoch_ = consumed_ = epoch;
    tell();
}

std::vector<LowLatency::GivenUp> LowLatency::given_up(std::uint32_t rank) const {
    std::vector<GivenUp> found;
    for (const auto& outgoing : outgoing_) {
        for (const Outgoing& out : outgoing) {
            if (out.rank == rank && out.given_up) found.push_back({out.epoch, out.from, out.to});
        }
    }
    return found;
}

bool LowLatency::quiet(std::uint32_t rank) const {
    return !in_flight(0, rank) && !in_flight(1, rank);
}

LowLatencyWord LowLatency::told(std::uint32_t rank) const {
    if (masked_[rank]) {
        return {quiet(rank) ? LowLatencyTold::left_out_quiet : LowLatencyTold::left_out, left_out_[rank], 0};
    }
    if (taken_in_[rank] > 0 && sent_[rank].call <= taken_in_[rank]) {
        return {LowLatencyTold::taken_in, taken_in_[rank], 0};
    }
    return sent_[rank];
}

std::uint32_t LowLatency::stage() const {
    const std::shared_ptr<LowLatencyOperation>& last = calls_[epoch_ % 2];
    return static_cast<std::uint32_t>(last ? last->stage_ : LowLatencyOperation::Stage::done);
}

bool LowLatency::hook_uncalled() const {
    return std::any_of(std::begin(calls_), std::end(calls_), [](const auto& call) { return call && !call->ended(); });
}

}  // namespace expertwire::exchange
