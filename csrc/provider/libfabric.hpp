// Provider over libfabric: cxi, efa, verbs, tcp and shm through one implementation. `tcp;ofi_rxm` is what the tests run
// on; the others follow what getinfo grants and are marked untested.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "provider/provider.hpp"

namespace expertwire {

// How a signal (64-bit remote add) travels. `automatic`: FI_ATOMIC where getinfo grants it, else a message that the
// target's poll() applies and answers; the other two force one path (the tests run both).
enum class SignalPath : std::uint8_t { automatic, atomic, message };

struct LibfabricOptions {
    std::vector<std::string> libraries;    // candidate paths, fabric/discover.py
    std::string provider = "tcp;ofi_rxm";  // libfabric's own name
    std::string source_address;            // numeric address to bind ("127.0.0.1"); "" leaves it to the provider
    std::string domain;                    // NIC's domain name ("cxi0", "lo"), "" for any
    std::uint32_t endpoints = 1;           // EndpointId 0 … endpoints-1, one completion queue for all
    std::uint32_t slots = 2048;            // ticket slots: every command's ticket.slot is below it
    std::uint32_t transmit_queue = 0;      // operations an endpoint holds before AGAIN; 0: the provider's own
    std::uint32_t receive_buffers = 256;   // posted for messages
    std::uint32_t notification_bytes_max = 8192;
    std::uint32_t counted_tags = 4096;  // class C: of each peer's writes here, so many may be unacknowledged
    SignalPath signal_path = SignalPath::automatic;
    ProviderSettings settings;
};

// Null on failure, `result` then names the call, its arguments and the code: `refused` where the library or the
// provider is missing (UnavailableError), `io_error` otherwise.
std::unique_ptr<Provider> open_libfabric(const LibfabricOptions& options, ControlResult& result);

// One row of fi_getinfo, for doctor and discover.
struct ProviderFacts {
    Capabilities capabilities;
    std::string domain, fabric, source_address, endpoint_type, protocol;
    std::uint64_t capability_bits = 0, mr_mode = 0, mode = 0, message_order = 0, waw_bytes_max = 0;
    bool usable = false;  // RDM endpoint with RMA that open_libfabric() takes
};

// What the library offers (RDM endpoints only) after the hints that open_libfabric() uses.
std::vector<ProviderFacts> query_providers(const std::vector<std::string>& libraries, const ProviderSettings& settings,
                                           ControlResult& result);

}  // namespace expertwire
