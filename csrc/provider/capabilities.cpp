#include "provider/capabilities.hpp"

#include "provider/capabilities_table.hpp"
#include "provider/provider.hpp"

namespace expertwire {
namespace {

// Order that is believed, in words; "" where none is.
std::string order_proof(const GrantedOrder& granted, const ProviderSettings& settings, const ProviderRules& rules) {
    const bool order_bit = granted.atomics ? granted.write_after_write : granted.send_after_write;
    const std::string bit = granted.atomics ? "FI_ORDER_WAW" : "FI_ORDER_SAW";
    // Order is per endpoint (fi_endpoint(3), msg_order).
    if (!order_bit || granted.endpoints > 1 || rules.order == OrderTrust::never) return "";
    if (rules.order == OrderTrust::on_request) {
        // What is pulled by the target is overtaken by an eager atomic, and getinfo does not show it (source A, with a
        // threshold of 0). With any of these settings changed nobody has measured which sizes are pulled.
        const bool pulled = core_of(granted.provider) == "cxi" && !settings.rendezvous.empty();
        return settings.trust_order && !pulled ? "EXPERTWIRE_TRUST_ORDER=1 and " + bit + " granted" : "";
    }
    if (granted.waw_bytes_max == 0) return "";
    return bit + " granted on tx and rx up to " + std::to_string(granted.waw_bytes_max) + " bytes (fi_endpoint(3))";
}

}  // namespace

OrderingVerdict classify_order(const GrantedOrder& granted, const ProviderSettings& settings) {
    const ProviderRules& rules = rules_of(granted.provider, granted.fabric);
    if (*rules.avoided != '\0') return {OrderingClass::delivery_gated, false, rules.avoided};
    if (granted.version != 0 && granted.version < rules.since) {
        return {OrderingClass::delivery_gated, false,
                "this one is of libfabric " + std::to_string(granted.version / 100) + "." +
                    std::to_string(granted.version % 100) + ": " + rules.before};
    }
    if (std::string proof = order_proof(granted, settings, rules); !proof.empty()) {
        return {OrderingClass::ordered, true, std::move(proof)};
    }
    const bool safe = *rules.immediates_unsafe == '\0' || settings.trust_immediates;
    const bool counts = granted.immediates && safe;
    const bool gates = granted.delivery_complete && rules.delivery_complete_kept;
    if (settings.ordering == OrderingWish::counted) {
        if (granted.immediates && !safe) {
            return {OrderingClass::counted_immediates, false,
                    std::string("counted immediates were asked for, and ") + rules.immediates_unsafe +
                        "; leave ordering at auto, or set EXPERTWIRE_TRUST_IMMEDIATES=1 where that may happen"};
        }
        return {OrderingClass::counted_immediates, granted.immediates,
                granted.immediates ? "counted immediates were asked for"
                                   : "counted immediates were asked for, and it has none of 4 bytes (fi_rma(3))"};
    }
    if (gates && counts && rules.prefers_counting && settings.ordering == OrderingWish::automatic) {
        return {
            OrderingClass::counted_immediates, true,
            "no order is proved: the target counts writes, which costs less here than to wait for delivery-complete"};
    }
    if (gates) {
        return {OrderingClass::delivery_gated, true, "no order is proved: signals wait for delivery-complete"};
    }
    if (rules.plain_completion_gates) {
        return {OrderingClass::delivery_gated, true,
                "no delivery-complete here; its own completion will do (source A)"};
    }
    const std::string missing = rules.delivery_complete_kept ? "no delivery-complete (fi_cq(3))"
                                                             : "a delivery-complete that means no more than sent";
    if (counts) {
        return {OrderingClass::counted_immediates, true,
                "no order is proved and " + missing + ": the target counts writes"};
    }
    return {OrderingClass::delivery_gated, false,
            "no order is proved and " + missing + ": nothing says when a payload is in place"};
}

GatePolicy make_gate_policy(const Capabilities& capabilities, const ProviderSettings& settings, ControlResult& result) {
    result = {};
    GatePolicy policy;
    policy.ordering = capabilities.ordering;
    policy.delivery_complete = capabilities.delivery_complete;
    policy.ordered_bytes_max = capabilities.ordered_bytes_max;
    const bool counted = capabilities.ordering == OrderingClass::counted_immediates;
    const bool needed =
        capabilities.ordering == OrderingClass::delivery_gated || (counted && capabilities.delivery_complete);
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
            if (needed && !rules_of(capabilities.provider).plain_completion_gates) {
                result = {Status::refused, 0,
                          "EXPERTWIRE_DELIVERY_COMPLETE=0 is unsafe on provider \"" + capabilities.provider + "\" (" +
                              capabilities.why +
                              "): a signal could overtake its payload; leave it at auto, or use cxi"};
            } else {
                policy.delivery_complete = false;
            }
            break;
    }
    // What is not counted for a signal is acknowledged by its target all the same, one by one where the provider
    // cannot.
    policy.delivery_complete = policy.delivery_complete || counted;
    return policy;
}

GatePolicy make_gate_policy(const Capabilities& capabilities, const ProviderSettings& settings) {
    ControlResult ignored;
    return make_gate_policy(capabilities, settings, ignored);
}

}  // namespace expertwire
