// What a dispatch and a combine have in common: the notify that opens them, the agreement on it, and how they end.
#include <cstring>
#include <utility>

#include "exchange/exchange.hpp"
#include "exchange/words.hpp"

namespace expertwire::exchange {

namespace {

constexpr std::uint32_t kMagic = 0x45585733;  // "EXW3": the layout of NotifyHeader

const char* kind_name(std::uint32_t kind) {
    if (kind == static_cast<std::uint32_t>(Kind::dispatch)) return "dispatch";
    if (kind == static_cast<std::uint32_t>(Kind::combine)) return "combine";
    return "nothing known";
}

const char* element_name(std::uint64_t element) {
    switch (static_cast<Element>(element)) {
        case Element::none:
            return "nothing";
        case Element::bfloat16:
            return "bfloat16";
        case Element::float8_e4m3fn:
            return "float8_e4m3fn";
        case Element::float8_e4m3fnuz:
            return "float8_e4m3fnuz";
        case Element::float32:
            return "float32";
        case Element::int32:
            return "int32";
    }
    return "nothing known";
}

// The fields in which every rank must be equal, in the order in which a difference is named.
struct AgreedField {
    const char* name;
    std::uint64_t (*value)(const NotifyHeader&);
    const char* (*text)(std::uint64_t) = nullptr;  // of a value that stands for a name
};
constexpr AgreedField kAgreed[] = {
    {"protocol", [](const NotifyHeader& h) -> std::uint64_t { return h.magic; }},
    {"operation", [](const NotifyHeader& h) -> std::uint64_t { return h.operation; },
     [](std::uint64_t kind) { return kind_name(static_cast<std::uint32_t>(kind)); }},
    {"number of the call", [](const NotifyHeader& h) -> std::uint64_t { return h.epoch; }},
    {"the handle (number of its dispatch, 0: none)",
     [](const NotifyHeader& h) -> std::uint64_t { return h.handle_epoch; }},
    {"type of x", [](const NotifyHeader& h) { return static_cast<std::uint64_t>(h.element); }, element_name},
    {"type of the scales", [](const NotifyHeader& h) { return static_cast<std::uint64_t>(h.scale_element); },
     element_name},
    {"bytes of the scales of a row", [](const NotifyHeader& h) -> std::uint64_t { return h.scale_bytes; }},
    {"bytes of a row", [](const NotifyHeader& h) -> std::uint64_t { return h.row_bytes; }},
    {"num_topk", [](const NotifyHeader& h) -> std::uint64_t { return h.topk; }},
    {"bytes of a top-k index", [](const NotifyHeader& h) -> std::uint64_t { return h.index_bytes; }},
    {"num_experts", [](const NotifyHeader& h) -> std::uint64_t { return h.num_experts; }},
    {"num_worst_tokens", [](const NotifyHeader& h) -> std::uint64_t { return h.rows_max; }},
    {"presence of topk_weights", [](const NotifyHeader& h) -> std::uint64_t { return h.has_weights; }},
    {"ring slots", [](const NotifyHeader& h) -> std::uint64_t { return h.ring_slots; }},
    {"bytes of a ring slot", [](const NotifyHeader& h) -> std::uint64_t { return h.slot_bytes; }},
};

std::string field_text(const AgreedField& field, const NotifyHeader& header) {
    const std::uint64_t value = field.value(header);
    return field.text != nullptr ? field.text(value) : std::to_string(value);
}

}  // namespace

const char* phase_name(Phase phase) {
    switch (phase) {
        case Phase::notify:
            return "notify";
        case Phase::exchange:
            return "exchange";
        case Phase::drain:
            return "drain";
        case Phase::done:
            return "done";
        case Phase::failed:
            return "failed";
    }
    return "unknown";
}

Operation::Operation(Exchange& exchange, Kind kind, std::shared_ptr<const Handle> handle)
    : exchange_(exchange), kind_(kind), epoch_(++exchange.epoch_), handle_(std::move(handle)) {}

std::byte* Operation::control_of(std::uint32_t rank) const {
    return exchange_.port().memory()[rank].control;
}

std::uint32_t Operation::count_at(std::uint64_t word_offset) const {
    return word_count(load_word(exchange_.mine().control, word_offset), epoch_);
}

void Operation::publish(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t count) {
    store_word(control_of(rank), word_offset, word_value(epoch_, count));
    exchange_.port().wake(rank);
}

void Operation::fail(FailureReason reason, std::uint32_t rank, std::string text, Status status) {
    if (failure_.reason != FailureReason::none) return;  // the first one is the cause
    failure_ = {reason, rank, status, std::move(text)};
}

// ---- notify

void Operation::send_notify(NotifyHeader header, const std::uint32_t* per_rank, const std::uint32_t* per_node,
                            const std::int32_t* per_expert, const std::vector<std::uint64_t>& expert_first) {
    const Layout& layout = exchange_.layout();
    const NodeTable& nodes = exchange_.nodes();
    const std::uint32_t parity = epoch_ % 2;
    header.magic = kMagic;
    header.operation = static_cast<std::uint32_t>(kind_);
    header.epoch = epoch_;
    header.handle_epoch = handle_ ? handle_->epoch : 0;
    header.ring_slots = layout.shape().ring_slots;
    header.slot_bytes = layout.shape().slot_bytes;
    for (std::uint32_t to = 0; to < nodes.ranks(); ++to) {
        const bool near = nodes.node_of(to) == exchange_.node();
        std::byte* const slot = near ? control_of(to) + layout.notify_in(parity, exchange_.rank())
                                     : exchange_.mine().control + layout.notify_out(to);
        std::memcpy(slot, &header, sizeof header);
        std::byte* counts = slot + sizeof header;
        std::memcpy(counts, per_rank, nodes.ranks() * sizeof(std::uint32_t));
        counts += nodes.ranks() * sizeof(std::uint32_t);
        std::memcpy(counts, per_node, nodes.nodes() * sizeof(std::uint32_t));
        counts += nodes.nodes() * sizeof(std::uint32_t);
        std::memset(counts, 0, layout.shape().local_experts_max * sizeof(std::uint32_t));
        if (per_expert != nullptr && expert_first[to + 1] > expert_first[to]) {
            std::memcpy(counts, per_expert + expert_first[to],
                        (expert_first[to + 1] - expert_first[to]) * sizeof(std::uint32_t));
        }
        if (near) {
            publish(to, layout.notified(parity, exchange_.rank()), 1);
        } else {
            unsent_.push_back(to);
        }
    }
}

bool Operation::post_notifies() {
    const Layout& layout = exchange_.layout();
    const std::uint32_t parity = epoch_ % 2;
    const RemoteWord word = parity == 0 ? RemoteWord::notified_even : RemoteWord::notified_odd;
    const std::size_t before = unsent_.size();
    while (!unsent_.empty()) {
        Port::Put put;
        put.rank = unsent_.back();
        put.head = {Region::control, layout.notify_out(put.rank), Region::control,
                    layout.notify_in(parity, exchange_.rank()), layout.notify_slot_bytes()};
        const std::optional<Ticket> ticket =
            exchange_.put(put, word, 0, layout.notified(parity, exchange_.rank()), word_value(epoch_, 1));
        if (!ticket) break;
        notifies_.push_back({unsent_.back(), *ticket});
        unsent_.pop_back();
    }
    return unsent_.size() != before;
}

bool Operation::notifies_here() {
    const Layout& layout = exchange_.layout();
    if (mutant(Mutant::combine_without_notify) && kind_ == Kind::combine) notified_ = exchange_.nodes().ranks();
    while (notified_ < exchange_.nodes().ranks()) {
        const std::uint64_t offset = layout.notified(epoch_ % 2, notified_);
        const bool here = mutant(Mutant::no_wait_for_notify) ? load_word(exchange_.mine().control, offset) != 0
                                                             : count_at(offset) != 0;
        if (!here) return false;
        ++notified_;
    }
    return true;
}

const NotifyHeader& Operation::notify(std::uint32_t source) const {
    return *reinterpret_cast<const NotifyHeader*>(exchange_.mine().control +
                                                  exchange_.layout().notify_in(epoch_ % 2, source));
}

const std::uint32_t* Operation::notify_counts(std::uint32_t source) const {
    return reinterpret_cast<const std::uint32_t*>(
        exchange_.mine().control + exchange_.layout().notify_in(epoch_ % 2, source) + sizeof(NotifyHeader));
}

// Every rank compares every notify with that of rank 0, so that all of them find the same difference.
bool Operation::agree() {
    const NotifyHeader& first = notify(0);
    for (std::uint32_t source = 1; source < exchange_.nodes().ranks(); ++source) {
        const NotifyHeader& other = notify(source);
        for (const AgreedField& field : kAgreed) {
            if (field.value(first) == field.value(other)) continue;
            fail(FailureReason::mismatch, source,
                 "ranks disagree in call " + std::to_string(epoch_) + ": " + field.name + " is " +
                     field_text(field, first) + " on rank 0 and " + field_text(field, other) + " on rank " +
                     std::to_string(source) +
                     "; all ranks must make the same calls in the same order with the same shapes");
            return false;
        }
    }
    return true;
}

bool Operation::check_capacity() {
    for (std::uint32_t rank = 0; rank < exchange_.nodes().ranks(); ++rank) {
        const Need need = needed(rank);
        const std::uint64_t capacity = notify(rank).offer_capacity;
        if (need.rows > kCountMax) {
            fail(FailureReason::capacity, rank,
                 "rank " + std::to_string(rank) + " would receive " + std::to_string(need.rows) + " rows, at most " +
                     std::to_string(kCountMax) + " a call");
            return false;
        }
        if (need.bytes <= capacity) continue;
        fail(FailureReason::capacity, rank,
             std::string(kind_name(static_cast<std::uint32_t>(kind_))) + " of " + std::to_string(need.rows) +
                 " rows of " + std::to_string(notify(rank).row_bytes) + " bytes needs " + std::to_string(need.bytes) +
                 " bytes on rank " + std::to_string(rank) + ", whose buffer has " + std::to_string(capacity) +
                 ": give the Buffer more num_nvl_bytes/num_rdma_bytes, or send fewer tokens a call");
        return false;
    }
    return true;
}

// Gives back what notifies hold as soon as they have ended: others may be waiting for room in the same table.
bool Operation::notifies_ended() {
    std::erase_if(notifies_, [&](const NotifyPut& notify) {
        const Status status = exchange_.port().status(notify.ticket);
        if (status == Status::pending) return false;
        if (status != Status::ok) {
            fail(FailureReason::put, notify.rank, "a notify could not be delivered", status);
        }
        return true;
    });
    return notifies_.empty() && unsent_.empty();
}

// ---- steps

Step Operation::step_notify() {
    notifies_ended();
    if (failure_.reason != FailureReason::none) {
        phase_ = Phase::failed;
        return Step::failed;
    }
    const bool moved = post_notifies();
    if (!unsent_.empty() || !notifies_here()) return moved ? Step::progressed : Step::waiting;
    if (agree() && check_capacity()) {
        begin();
        phase_ = Phase::exchange;
    } else {
        phase_ = Phase::drain;
    }
    return Step::progressed;
}

Step Operation::step(std::uint64_t budget) {
    switch (phase_) {
        case Phase::notify:
            return step_notify();
        case Phase::exchange: {
            notifies_ended();
            const std::uint64_t moved = move(budget);
            if (failure_.reason != FailureReason::none) {
                phase_ = Phase::failed;
                return Step::failed;
            }
            if (!rows_done()) return moved > 0 ? Step::progressed : Step::waiting;
            phase_ = Phase::drain;
            return Step::progressed;
        }
        case Phase::drain: {
            // Rows never moved if the notifies disagreed: only they have to end.
            const bool began = failure_.reason == FailureReason::none;
            if (!notifies_ended() || (began && !drained())) return Step::waiting;
            phase_ = failure_.reason == FailureReason::none ? Phase::done : Phase::failed;
            return phase_ == Phase::done ? Step::done : Step::failed;
        }
        case Phase::done:
            return Step::done;
        case Phase::failed:
            return Step::failed;
    }
    return Step::failed;
}

std::vector<PeerProgress> Operation::progress() const {
    const Layout& layout = exchange_.layout();
    std::vector<PeerProgress> table(exchange_.nodes().ranks());
    for (std::uint32_t rank = 0; rank < table.size(); ++rank) {
        PeerProgress& row = table[rank];
        row.rank = rank;
        row.notified = count_at(layout.notified(epoch_ % 2, rank)) != 0;
        if (phase_ == Phase::notify) {
            if (!row.notified) row.missing = "its notify";
        } else if (phase_ == Phase::exchange || phase_ == Phase::drain) {
            describe(row);
        }
    }
    return table;
}

}  // namespace expertwire::exchange
