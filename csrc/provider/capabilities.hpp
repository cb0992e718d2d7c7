// What each provider promises, as data. Every row names the man page or the measurement that it rests on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace expertwire {

// SPEC T5, DESIGN "What providers promise". A: same-endpoint order is proved; B: a signal leaves when its payload is
// delivered; C: the receiver counts immediates.
enum class OrderingClass : std::uint8_t { ordered, delivery_gated, counted_immediates };

struct Capabilities {
    std::string provider;                 // "tcp;ofi_rxm", "local", "simulated"
    OrderingClass ordering = OrderingClass::delivery_gated;
    bool delivery_complete = false;       // a completion can mean "at the target"
    bool remote_atomics = false;          // else signals travel as messages that the target's progress thread applies
    bool local_registration = false;      // MR_LOCAL: the source of a write must be registered too
    bool manual_progress = true;          // the target must poll
    bool detects_death = false;           // a dead peer shows up as an error completion
    std::uint64_t message_bytes_max = 0;  // largest single write
    std::uint64_t inject_bytes_max = 0;
    std::uint32_t transmit_queue = 0;     // operations one endpoint holds before it says AGAIN
    std::string why;                      // the source of these statements, for doctor
};

}  // namespace expertwire
