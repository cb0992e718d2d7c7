#include "provider/capabilities.hpp"

#include "provider/provider.hpp"

namespace expertwire {
namespace {

bool is(const std::string& provider, const char* core) {
    return provider == core || provider.rfind(std::string(core) + ";", 0) == 0;
}

}  // namespace

OrderingVerdict classify_order(const GrantedOrder& granted, const ProviderSettings& settings) {
    const auto gated = [&](std::string why) -> OrderingVerdict {
        if (granted.delivery_complete) return {OrderingClass::delivery_gated, true, std::move(why)};
        // Source A measured cxi's ordinary completion as good enough to gate on; nobody measured that elsewhere.
        if (is(granted.provider, "cxi"))
            return {OrderingClass::delivery_gated, true, std::move(why) + "; cxi's own completion (source A)"};
        return {OrderingClass::delivery_gated, false,
                std::move(why) + ", and no delivery-complete (fi_cq(3)): nothing says when a payload is in place"};
    };
    for (const char* avoided : {"sockets", "udp", "net"}) {
        if (is(granted.provider, avoided)) return {OrderingClass::delivery_gated, false, "known to misbehave; use tcp"};
    }
    // A signal overtook its payload here, even when gated on the ordinary completion (DESIGN, measured at 7 and 64
    // KiB).
    if (is(granted.provider, "tcp")) return gated("tcp: overtaking was measured, advertised order is not relied on");
    if (granted.endpoints > 1) return gated("several endpoints: order is per endpoint (fi_endpoint(3), msg_order)");
    const bool order_bit = granted.atomics ? granted.write_after_write : granted.send_after_write;
    const char* bit = granted.atomics ? "FI_ORDER_WAW" : "FI_ORDER_SAW";
    if (is(granted.provider, "shm") || is(granted.provider, "cxi")) {
        if (settings.trust_order && order_bit &&
            !(is(granted.provider, "cxi") && settings.rendezvous_threshold == "0")) {
            return {OrderingClass::ordered, true, std::string("EXPERTWIRE_TRUST_ORDER=1 and ") + bit + " granted"};
        }
        return gated(is(granted.provider, "shm") ? "shm: grants WAW for 0 bytes, which promises nothing"
                                                 : "cxi: order depends on FI_CXI_RDZV_THRESHOLD, unseen by getinfo");
    }
    if (order_bit && granted.waw_bytes_max > 0) {
        return {OrderingClass::ordered, true,
                std::string(bit) + " granted on tx and rx up to " + std::to_string(granted.waw_bytes_max) +
                    " bytes (fi_endpoint(3))"};
    }
    if (granted.delivery_complete) return gated(std::string(bit) + " not granted");
    if (granted.immediates) {
        return {OrderingClass::counted_immediates, false,
                "no order and no delivery-complete: needs counted immediates, which this version does not have"};
    }
    return gated(std::string(bit) + " not granted");
}

GatePolicy make_gate_policy(const Capabilities& capabilities, const ProviderSettings& settings, ControlResult& result) {
    result = {};
    GatePolicy policy;
    policy.ordering = capabilities.ordering;
    policy.delivery_complete = capabilities.delivery_complete;
    policy.ordered_bytes_max = capabilities.ordered_bytes_max;
    const bool needed = capabilities.ordering == OrderingClass::delivery_gated;
    switch (settings.delivery_complete) {
        case DeliveryComplete::automatic:
            policy.delivery_complete = needed && capabilities.delivery_complete;
            break;
        case DeliveryComplete::on:
            if (!capabilities.delivery_complete) {
                result = {Status::refused, 0,
                          "EXPERTWIRE_DELIVERY_COMPLETE=1, but provider \"" + capabilities.provider +
                              "\" has no delivery-complete; leave it at auto"};
            }
            policy.delivery_complete = capabilities.delivery_complete;
            break;
        case DeliveryComplete::off:
            if (needed && !is(capabilities.provider, "cxi")) {
                result = {Status::refused, 0,
                          "EXPERTWIRE_DELIVERY_COMPLETE=0 is unsafe on provider \"" + capabilities.provider + "\" (" +
                              capabilities.why +
                              "): a signal could overtake its payload; leave it at auto, or use cxi"};
            } else {
                policy.delivery_complete = false;
            }
            break;
    }
    return policy;
}

GatePolicy make_gate_policy(const Capabilities& capabilities, const ProviderSettings& settings) {
    ControlResult ignored;
    return make_gate_policy(capabilities, settings, ignored);
}

}  // namespace expertwire
