// What each provider promises, as data. Every row names the man page or the measurement that it rests on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/gate_policy.hpp"

namespace expertwire {

struct ControlResult;

struct Capabilities {
    std::string provider;  // "tcp;ofi_rxm", "local", "simulated"
    OrderingClass ordering = OrderingClass::delivery_gated;
    bool delivery_complete = false;       // a completion can mean "at the target"
    bool remote_atomics = false;          // else signals travel as messages that the target's progress thread applies
    bool local_registration = false;      // MR_LOCAL: the source of a write must be registered too
    bool manual_progress = true;          // the target must poll
    bool ends_at_post = false;            // what is small has ended when its post returns
    bool detects_death = false;           // a dead peer shows up as an error completion
    std::uint64_t message_bytes_max = 0;  // largest single write or read
    std::uint64_t ordered_bytes_max = ~std::uint64_t{0};  // class A: order holds up to this size (max_order_waw_size)
    std::uint64_t notification_bytes_max = 0;             // largest notification payload
    std::uint64_t inject_bytes_max = 0;                   // largest operation that the provider copies at the post
    std::uint32_t transmit_queue = 0;                     // operations one endpoint holds before it says AGAIN
    bool waits_on_descriptor = false;                     // wait_fd() is a descriptor; else polling is bounded by time
    bool tested = true;                                   // false: from man pages and sources; nobody has run it
    std::string why;                                      // what decided the ordering class
    std::string source;                                   // where the provider's row comes from
};

// SPEC T8: EXPERTWIRE_DELIVERY_COMPLETE.
enum class DeliveryComplete : std::uint8_t { automatic, on, off };

// Which way signals are kept behind their payload, where there is a choice: what costs less, as the table says; a gate
// on delivery (class B); counted immediates (class C).
enum class OrderingWish : std::uint8_t { automatic, gated, counted };

// What the user and the provider's own environment ask for. Read from the environment in fabric/config.py only.
struct ProviderSettings {
    DeliveryComplete delivery_complete = DeliveryComplete::automatic;
    bool trust_order = false;       // EXPERTWIRE_TRUST_ORDER=1
    bool trust_immediates = false;  // EXPERTWIRE_TRUST_IMMEDIATES=1
    OrderingWish ordering = OrderingWish::automatic;
    std::string rendezvous;  // FI_CXI_RDZV_* as found, "NAME=VALUE …", "" where none is set
};

// What `fi_getinfo` grants, as far as it decides the ordering class. Pure data, so that the rules are tested without a
// NIC.
struct GrantedOrder {
    std::string provider;
    std::string fabric;               // where one provider has several ("efa", "efa-direct")
    bool write_after_write = false;   // FI_ORDER_WAW itself, on tx and rx
    bool send_after_write = false;    // FI_ORDER_SAW, on tx and rx
    std::uint64_t waw_bytes_max = 0;  // max_order_waw_size
    bool atomics = false;             // FI_ATOMIC granted and valid for a 64-bit add
    bool delivery_complete = false;
    bool immediates = false;    // remote CQ data of >= 4 bytes with a write
    std::uint32_t version = 0;  // of the provider, 100 × major + minor of its libfabric; 0: not known
    std::uint32_t endpoints = 1;
};

struct OrderingVerdict {
    OrderingClass ordering = OrderingClass::delivery_gated;
    bool safe = true;  // false: nothing proved and no delivery-complete: the provider cannot be used
    std::string why;
};

// The rules of DESIGN "What providers promise", for one provider.
OrderingVerdict classify_order(const GrantedOrder& granted, const ProviderSettings& settings);

// The policy that the engine follows. `result` is `refused`, with the reason in words, where
// EXPERTWIRE_DELIVERY_COMPLETE=0 would be unsafe (class B anywhere but on cxi) or =1 asks for what the provider does
// not have.
GatePolicy make_gate_policy(const Capabilities& capabilities, const ProviderSettings& settings, ControlResult& result);

// The same for callers that have nothing to report to: falls back to the safe policy where the settings are refused.
GatePolicy make_gate_policy(const Capabilities& capabilities, const ProviderSettings& settings);

}  // namespace expertwire
