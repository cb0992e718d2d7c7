#include "engine/gate.hpp"

#include <algorithm>

namespace expertwire {

Gate::Gate(std::uint32_t records, std::uint32_t thresholds_per_record)
    : records_(records),
      thresholds_(std::size_t{records} * thresholds_per_record),
      stride_(thresholds_per_record),
      available_(records) {
    for (std::uint32_t i = records; i-- > 0;) {
        records_[i].next = free_head_;
        free_head_ = i;
    }
}

std::uint32_t Gate::acquire(std::uint32_t operation, std::span<const Threshold> thresholds, bool wide) {
    const std::uint32_t index = free_head_;
    if (index == no_index || thresholds.size() > stride_) return no_index;
    free_head_ = records_[index].next;
    --available_;
    Record& record = records_[index];
    record = Record{};
    record.operation = operation;
    record.thresholds = static_cast<std::uint32_t>(thresholds.size());
    record.wide = wide;
    std::copy(thresholds.begin(), thresholds.end(), thresholds_.begin() + std::ptrdiff_t(std::size_t{index} * stride_));
    if (wide) {
        record.next_wide = first_wide_;
        if (first_wide_ != no_index) records_[first_wide_].previous_wide = index;
        first_wide_ = index;
    }
    return index;
}

void Gate::free(std::uint32_t index) {
    Record& record = records_[index];
    if (record.wide) {
        if (record.previous_wide != no_index) records_[record.previous_wide].next_wide = record.next_wide;
        if (record.next_wide != no_index) records_[record.next_wide].previous_wide = record.previous_wide;
        if (first_wide_ == index) first_wide_ = record.next_wide;
    }
    record = Record{};
    record.next = free_head_;
    free_head_ = index;
    ++available_;
}

void Gate::wait(std::uint32_t index, Line& line) {
    const std::uint64_t needed = thresholds(index)[records_[index].waiting_on].to;
    std::uint32_t after = line.last_waiter;  // nearly always the right place: positions only grow
    while (after != no_index && thresholds(after)[records_[after].waiting_on].to > needed) {
        after = records_[after].previous;
    }
    Record& record = records_[index];
    record.previous = after;
    record.next = after == no_index ? line.first_waiter : records_[after].next;
    (record.previous == no_index ? line.first_waiter : records_[record.previous].next) = index;
    (record.next == no_index ? line.last_waiter : records_[record.next].previous) = index;
}

void Gate::leave(std::uint32_t index, Line& line) {
    Record& record = records_[index];
    (record.previous == no_index ? line.first_waiter : records_[record.previous].next) = record.next;
    (record.next == no_index ? line.last_waiter : records_[record.next].previous) = record.previous;
    record.previous = record.next = no_index;
}

}  // namespace expertwire
