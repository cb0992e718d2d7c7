// The fixed table of slots: the only place where a generation is minted or retired. One instance serves the submission
// slots (whose tickets travel through a provider), a second one the logical requests.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/types.hpp"

namespace expertwire {

class SlotTable {
  public:
    explicit SlotTable(std::uint32_t size, std::uint32_t first_generation = 1)
        : generations_(size, first_generation), used_(size, 0), free_(size) {
        for (std::uint32_t i = 0; i < size; ++i) free_[i] = size - 1 - i;  // slot 0 goes out first
    }

    std::uint32_t size() const { return static_cast<std::uint32_t>(generations_.size()); }
    std::uint32_t used() const { return size() - available(); }
    std::uint32_t available() const { return static_cast<std::uint32_t>(free_.size()); }

    // A free slot under its present generation; an invalid ticket when the table is full.
    Ticket mint() {
        if (free_.empty()) return {};
        const std::uint32_t slot = free_.back();
        free_.pop_back();
        used_[slot] = 1;
        return {slot, generations_[slot]};
    }

    // True while the ticket names what it was minted for.
    bool current(Ticket ticket) const {
        return ticket.slot < size() && used_[ticket.slot] && generations_[ticket.slot] == ticket.generation;
    }
    bool in_use(std::uint32_t slot) const { return slot < size() && used_[slot]; }
    Ticket ticket_of(std::uint32_t slot) const { return {slot, generations_[slot]}; }

    // From here on every ticket minted for this slot before is stale. Generation 0 is never given out.
    void retire(Ticket ticket) {
        if (!current(ticket)) return;
        used_[ticket.slot] = 0;
        if (++generations_[ticket.slot] == 0) generations_[ticket.slot] = 1;
        free_.push_back(ticket.slot);  // never beyond the capacity that the constructor took
    }

  private:
    std::vector<std::uint32_t> generations_;
    std::vector<std::uint8_t> used_;
    std::vector<std::uint32_t> free_;
};

}  // namespace expertwire
