// The gate holds a control operation until the operations that it covers have reached the level that the policy asks
// for (SPEC T4, T5). What it covers is recorded when the control is accepted: a position per line, never a count.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/gate_policy.hpp"
#include "engine/mutants.hpp"
#include "engine/queue_pair.hpp"

namespace expertwire {

// Positions [from, to) of one line are covered. All of them must have been posted, and those before `retired_to` must
// have retired as well: all of them where order is not promised (class B), possibly none where it is (class A).
struct Threshold {
    std::uint32_t queue_pair = no_index;
    LineKind line = LineKind::data;
    std::uint64_t from = 0;
    std::uint64_t to = 0;
    std::uint64_t retired_to = 0;
};

inline bool met(const Threshold& threshold, const Line& line) {
    if (mutant(Mutant::no_gate)) return true;
    if (mutant(Mutant::count_for_prefix)) return line.finished >= threshold.retired_to && line.posted >= threshold.to;
    return line.posted >= threshold.to && line.retired >= threshold.retired_to;
}

// What of a line a control must see retired, given what the policy promises about order on one endpoint. In class C
// every control that its target does not hold back itself (Request::counted) is gated like class B's.
inline std::uint64_t retired_needed(const GatePolicy& policy, const QueuePair& covered, LineKind line,
                                    EndpointId control_endpoint, std::uint64_t to) {
    const bool order_promised =
        policy.ordering == OrderingClass::ordered && line == LineKind::data && covered.endpoint == control_endpoint;
    if (!order_promised) return to;
    return covered.ordered_from < to ? covered.ordered_from : to;
}

// Fixed pool of gate records. A record waits in the list of one line at a time: that of its first unmet threshold.
class Gate {
  public:
    struct Record {
        std::uint32_t operation = no_index;
        std::uint32_t thresholds = 0;
        std::uint32_t waiting_on = 0;            // index of the unmet threshold
        std::uint32_t previous = no_index;       // waiters of the line
        std::uint32_t next = no_index;           // … or the free list
        std::uint32_t previous_wide = no_index;  // records of scope queue_pair or peer: they fail with what they cover
        std::uint32_t next_wide = no_index;
        bool wide = false;
    };

    Gate(std::uint32_t records, std::uint32_t thresholds_per_record);

    std::uint32_t available() const { return available_; }
    std::uint32_t held() const { return static_cast<std::uint32_t>(records_.size()) - available_; }
    std::uint32_t thresholds_max() const { return stride_; }

    std::uint32_t acquire(std::uint32_t operation, std::span<const Threshold> thresholds, bool wide);
    void free(std::uint32_t record);

    Record& record(std::uint32_t index) { return records_[index]; }
    const Record& record(std::uint32_t index) const { return records_[index]; }
    std::span<Threshold> thresholds(std::uint32_t index) {
        return {thresholds_.data() + std::size_t{index} * stride_, records_[index].thresholds};
    }
    std::span<const Threshold> thresholds(std::uint32_t index) const {
        return {thresholds_.data() + std::size_t{index} * stride_, records_[index].thresholds};
    }
    std::uint32_t first_wide() const { return first_wide_; }

    // The waiter lists of a line are ordered by the position that is needed, so that a sweep stops early.
    void wait(std::uint32_t record, Line& line);
    void leave(std::uint32_t record, Line& line);

  private:
    std::vector<Record> records_;
    std::vector<Threshold> thresholds_;
    std::uint32_t stride_;
    std::uint32_t free_head_ = no_index;
    std::uint32_t available_ = 0;
    std::uint32_t first_wide_ = no_index;
};

}  // namespace expertwire
