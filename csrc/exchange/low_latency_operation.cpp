// What a low-latency dispatch and combine have in common: whom rows go to and when, who must be heard, and what all
// must agree on.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "exchange/low_latency_calls.hpp"
#include "exchange/words.hpp"
#include "rows/rows.hpp"

namespace expertwire::exchange {

namespace {

constexpr std::uint32_t kMagic = 0x45584C32;  // "EXL2": the layout of LowLatencyNotify

struct AgreedField {
    const char* name;
    std::uint64_t (*value)(const LowLatencyNotify&);
};
constexpr AgreedField kAgreed[] = {
    {"protocol", [](const LowLatencyNotify& n) -> std::uint64_t { return n.magic; }},
    {"operation", [](const LowLatencyNotify& n) -> std::uint64_t { return n.operation; }},
    {"number of the call", [](const LowLatencyNotify& n) -> std::uint64_t { return n.epoch; }},
    {"num_max_dispatch_tokens_per_rank", [](const LowLatencyNotify& n) -> std::uint64_t { return n.tokens_max; }},
    {"hidden", [](const LowLatencyNotify& n) -> std::uint64_t { return n.hidden; }},
    {"num_experts", [](const LowLatencyNotify& n) -> std::uint64_t { return n.num_experts; }},
    {"num_topk", [](const LowLatencyNotify& n) -> std::uint64_t { return n.topk; }},
    {"format of rows (use_fp8, round_scale, use_ue8m0)",
     [](const LowLatencyNotify& n) -> std::uint64_t { return n.format; }},
    {"the handle (number of its dispatch)", [](const LowLatencyNotify& n) -> std::uint64_t { return n.handle_epoch; }},
};

std::string field_text(const AgreedField& field, const LowLatencyNotify& notify) {
    static constexpr const char* formats[] = {"bf16", "fp8", "fp8 with rounded scales", "fp8 with UE8M0 scales"};
    if (std::strcmp(field.name, "operation") == 0) return kind_name(static_cast<Kind>(notify.operation));
    if (field.name == kAgreed[7].name && notify.format < 4) return formats[notify.format];
    return std::to_string(field.value(notify));
}

}  // namespace

const char* kind_name(Kind kind) {
    return kind == Kind::dispatch ? "low_latency_dispatch" : kind == Kind::combine ? "low_latency_combine" : "nothing";
}

const char* low_latency_stage_name(std::uint32_t stage) {
    static constexpr const char* names[] = {"send", "wait", "pack", "done", "failed"};
    return stage < std::size(names) ? names[stage] : "unknown";
}

LowLatencyOperation::LowLatencyOperation(LowLatency& exchange, Kind kind, const LowLatencyCall& call)
    : exchange_(exchange),
      kind_(kind),
      epoch_(exchange.epoch_ + 1),
      parity_(epoch_ % 2),
      call_(call),
      left_out_(exchange.nodes().ranks(), 0),
      arrived_(exchange.nodes().ranks(), 0) {}

void LowLatencyOperation::fail(FailureReason reason, std::uint32_t rank, std::string text, Status status) {
    if (failure_.reason == FailureReason::none) failure_ = {reason, rank, status, std::move(text)};
}

void LowLatencyOperation::abandon(FailureReason reason, const std::string& text) {
    fail(reason, exchange_.rank(), text);
    stage_ = Stage::failed;
}

bool LowLatencyOperation::leave_out(std::uint32_t rank) {
    if (stage_ >= Stage::packing) return false;  // its rows are here and counted
    left_out_[rank] = 1;
    for (Target& target : targets_) {
        if (target.rank != rank || target.done) continue;
        target.done = true;
        std::erase_if(exchange_.outgoing_[parity_],
                      [&](const LowLatency::Outgoing& out) { return out.rank == rank && !out.ticket.valid(); });
    }
    return true;
}

std::uint64_t LowLatencyOperation::half() const {
    return parity_ * exchange_.half_bytes();
}

LowLatencyNotify LowLatencyOperation::header(std::uint64_t rows) const {
    LowLatencyNotify notify;
    notify.magic = kMagic;
    notify.operation = static_cast<std::uint32_t>(kind_);
    notify.epoch = epoch_;
    notify.handle_epoch = handle_epoch();
    notify.tokens_max = call_.tokens_max;
    notify.hidden = call_.hidden;
    notify.num_experts = call_.num_experts;
    notify.topk = call_.topk;
    notify.format = static_cast<std::uint32_t>(call_.format);
    notify.rows = rows;
    return notify;
}

LowLatencyNotify LowLatencyOperation::notify(std::uint32_t source) const {
    LowLatencyNotify notify;
    std::memcpy(&notify, exchange_.control() + exchange_.layout().notify_in(parity_, source), sizeof notify);
    return notify;
}

// ---- sending

// Ranks of other nodes first, for they take longest, and every rank begins with another one.
Step LowLatencyOperation::step_sending(std::uint64_t budget) {
    LowLatency& exchange = exchange_;
    const std::uint32_t ranks = exchange.nodes().ranks();
    if (!opened_) {
        opened_ = true;
        for (const bool near : {false, true}) {
            for (std::uint32_t step = 1; step <= ranks; ++step) {
                const std::uint32_t rank = (exchange.rank() + step) % ranks;
                if (exchange.near(rank) != near || left_out_[rank]) continue;
                Target target;
                target.rank = rank;
                target.near = near;
                targets_.push_back(target);
            }
        }
    }
    if (!settled()) return Step::failed;
    std::uint64_t moved = 0;
    bool all = true;
    for (Target& target : targets_) {
        if (target.done || moved >= budget) {
            all &= target.done;
            continue;
        }
        if (!target.open) {
            if (!exchange.takes_rows(target.rank, epoch_) && !mutant(Mutant::no_consumed_gate)) {
                all = false;
                continue;
            }
            target.open = true;
            if (refused_.empty()) open_target(target);
            if (mutant(Mutant::flag_before_rows) && target.near) finish_near(target);
            ++moved;
        }
        if (target.rows > 0) {
            moved += send_rows(target, budget - std::min(budget, moved));
        } else if (target.near) {
            finish_near(target);
        } else if (finish_far(target, {})) {
            ++moved;
        }
        all &= target.done;
    }
    if (all) return Step::done;
    return moved > 0 ? Step::progressed : Step::waiting;
}

// What hooks and unmasking left to be done. False: rows of a call could not be delivered.
bool LowLatencyOperation::settled() {
    std::uint32_t failed = 0;
    Status status = Status::ok;
    exchange_.settle(failed, status);
    if (status == Status::ok) return true;
    fail(FailureReason::put, failed, "rows could not be delivered", status);
    return false;
}

Step LowLatencyOperation::send(std::uint64_t budget) {
    if (stage_ == Stage::failed) return Step::failed;
    if (stage_ != Stage::sending) return Step::done;
    const Step step = step_sending(budget);
    if (step == Step::done) stage_ = Stage::sent;
    if (step == Step::failed) stage_ = Stage::failed;
    return step;
}

void LowLatencyOperation::finish_near(Target& target) {
    const LowLatencyLayout& layout = exchange_.layout();
    std::byte* const control = exchange_.port().memory()[target.rank].control;
    write_notify(control + layout.notify_in(parity_, exchange_.rank()), target.rank, target.rows);
    rows::fence();
    store_word(control, layout.arrived(parity_, exchange_.rank()), epoch_);
    exchange_.port().wake(target.rank);
    target.done = target.next >= target.units;
    exchange_.sent_[target.rank] = {LowLatencyTold::sent, epoch_, static_cast<std::uint32_t>(target.rows)};
}

// The last put to a rank, with its record. Parts before it must have ended: its signal covers itself alone.
bool LowLatencyOperation::finish_far(Target& target, std::span<const Port::Piece> pieces) {
    if (exchange_.in_flight(parity_, target.rank)) return false;
    const LowLatencyLayout& layout = exchange_.layout();
    const std::uint64_t record = layout.notify_out(parity_, target.rank);
    write_notify(exchange_.control() + record, target.rank, target.rows);
    Port::Put put;
    put.rank = target.rank;
    put.head = {Region::control, record, Region::control, layout.notify_in(parity_, exchange_.rank()),
                notify_bytes(target.rank)};
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    if (!pieces.empty()) {
        put.tail = pieces[0];
        put.more = pieces.subspan(1);
        from = ~std::uint64_t{0};
        for (const Port::Piece& piece : pieces) {
            from = std::min(from, piece.from_offset);
            to = std::max(to, piece.from_offset + piece.bytes);
        }
    }
    if (!exchange_.put(parity_, put, epoch_, from, to)) return false;
    target.done = true;
    exchange_.sent_[target.rank] = {LowLatencyTold::sent, epoch_, static_cast<std::uint32_t>(target.rows)};
    return true;
}

// ---- receiving

bool LowLatencyOperation::everyone_arrived(TimeNs now) {
    if (!waiting_) {
        waiting_ = true;
        waiting_since_ = now;
    }
    bool all = true;
    for (std::uint32_t rank = 0; rank < arrived_.size(); ++rank) {
        if (arrived_[rank] || left_out_[rank]) continue;
        const std::uint64_t word = load_word(exchange_.control(), exchange_.layout().arrived(parity_, rank));
        if (word != epoch_ && !(mutant(Mutant::any_flag) && word != 0)) {
            all = false;
            continue;
        }
        arrived_[rank] = 1;
        if (wait_ns() != nullptr) wait_ns()[rank] += static_cast<std::int64_t>(now - waiting_since_);
    }
    return all;
}

// Every rank compares the same records, so that all fail with the same words.
bool LowLatencyOperation::agree() {
    const auto ranks = static_cast<std::uint32_t>(left_out_.size());
    std::uint32_t first = 0;
    while (left_out_[first]) ++first;  // this rank is never left out
    const LowLatencyNotify base = notify(first);
    for (const AgreedField& field : kAgreed) {
        for (std::uint32_t rank = first + 1; rank < ranks; ++rank) {
            if (left_out_[rank]) continue;
            const LowLatencyNotify other = notify(rank);
            if (field.value(base) == field.value(other)) continue;
            fail(FailureReason::mismatch, rank,
                 std::string("ranks disagree on ") + field.name + ": rank " + std::to_string(first) + " has " +
                     field_text(field, base) + ", rank " + std::to_string(rank) + " has " + field_text(field, other));
            return false;
        }
    }
    if (!refused_.empty()) fail(FailureReason::capacity, exchange_.rank(), refused_);
    return refused_.empty();
}

Step LowLatencyOperation::receive(std::uint64_t budget, TimeNs now) {
    if (!ended() && !settled()) stage_ = Stage::failed;
    switch (stage_) {
        case Stage::sending:
            return Step::waiting;
        case Stage::sent:
            if (!everyone_arrived(now)) return Step::waiting;
            if (agree()) begin_packing();
            stage_ = failure_.reason == FailureReason::none ? Stage::packing : Stage::failed;
            if (stage_ == Stage::packing) return Step::progressed;
            return failure_.reason == FailureReason::protocol ? Step::failed : finish();
        case Stage::packing:
            if (mutant(Mutant::consumed_before_packed)) exchange_.packed(epoch_);
            if (pack(budget) > 0) return Step::progressed;
            if (failure_.reason != FailureReason::none) {
                stage_ = Stage::failed;
                return Step::failed;
            }
            end_packing();
            return finish();
        case Stage::done:
            return Step::done;
        case Stage::failed:
            return Step::failed;
    }
    return Step::failed;
}

Step LowLatencyOperation::finish() {
    exchange_.packed(epoch_);
    stage_ = settled() && failure_.reason == FailureReason::none ? Stage::done : Stage::failed;
    return stage_ == Stage::done ? Step::done : Step::failed;
}

std::vector<LowLatencyPeer> LowLatencyOperation::progress() const {
    std::vector<LowLatencyPeer> table(left_out_.size());
    for (std::uint32_t rank = 0; rank < table.size(); ++rank) {
        LowLatencyPeer& row = table[rank];
        row.rank = rank;
        row.masked = left_out_[rank] != 0;
        row.arrived = std::max(load_word(exchange_.control(), exchange_.layout().arrived(0, rank)),
                               load_word(exchange_.control(), exchange_.layout().arrived(1, rank)));
        row.consumed = exchange_.consumed_by(rank);
        if (row.masked) continue;
        row.rows_missing = stage_ == Stage::sent && !arrived_[rank];
        if (row.rows_missing) row.missing = "its rows";
    }
    for (const Target& target : targets_) {
        if (stage_ != Stage::sending || target.done) continue;
        table[target.rank].missing =
            target.open ? "room for rows to it"
                        : "its hook of call " + std::to_string(epoch_ - 2) + ", or the end of its puts of that call";
    }
    return table;
}

}  // namespace expertwire::exchange
