// One row for each provider: what getinfo cannot say of it, or says and does not keep. Data; the rules that read it are
// in capabilities.cpp, so that both are tested without a NIC.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace expertwire {

// Whether an advertised write-after-write (send-after-write) order is believed.
enum class OrderTrust : unsigned char {
    never,       // seen broken, or never granted
    on_request,  // EXPERTWIRE_TRUST_ORDER=1
    as_granted,  // what getinfo grants, up to max_order_waw_size
};

struct ProviderRules {
    const char* name;                // libfabric's provider, before any ";"; a fabric of it where the two differ
    bool tested;                     // our tests have run over it
    const char* avoided;             // why it is not used; "" where it may be
    std::uint32_t since;             // the first version that may be used, 100 × major + minor; 0: any
    const char* before;              // why not the ones before it, and what to do
    OrderTrust order;                //
    bool delivery_complete_kept;     // FI_DELIVERY_COMPLETE, where granted, means "visible at the target"
    bool atomics_kept;               // FI_ATOMIC, where granted, adds each operand exactly once
    bool plain_completion_gates;     // an ordinary completion will do instead
    bool prefers_counting;           // class C where class B would do: it was measured, and everything has run with it
    const char* immediates_missing;  // what a write with immediate data lacks here; "" where it works as it comes
    const char* immediates_unsafe;   // what one may cost its target; "" where nothing. EXPERTWIRE_TRUST_IMMEDIATES=1
    bool binds_ip_address;           // its source is an IP address; else the domain names the NIC
    bool reports_death;              // operations to a dead peer end in errors
    bool keeps_addresses;            // of removed peers: address_book.hpp says why
    const char* source;              // where all of this is written or was measured
};

// The row of "tcp;ofi_rxm" is that of "tcp". An unknown provider gets the most careful row.
const ProviderRules& rules_of(const std::string& provider, const std::string& fabric = {});
std::span<const ProviderRules> provider_table();

// "tcp;ofi_rxm" → "tcp"
std::string core_of(const std::string& provider);

}  // namespace expertwire
