// What doctor and discover ask of the providers, and ProviderProbe: one provider with no engine above it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/native_bind.hpp"
#include "bind/native_probe.hpp"
#include "provider/capabilities_table.hpp"
#include "provider/libfabric.hpp"
#include "provider/loader.hpp"
#include "provider/local.hpp"

namespace nb = nanobind;

namespace expertwire {
namespace bind {

const char* name_of(OrderingClass ordering) {
    switch (ordering) {
        case OrderingClass::ordered:
            return "ordered";
        case OrderingClass::delivery_gated:
            return "delivery_gated";
        case OrderingClass::counted_immediates:
            return "counted_immediates";
    }
    return "unknown";
}

ProviderSettings settings_from(const nb::dict& options) {
    ProviderSettings settings;
    const auto word = nb::cast<std::string>(options.get("delivery_complete", nb::str("auto")));
    settings.delivery_complete = word == "1"   ? DeliveryComplete::on
                                 : word == "0" ? DeliveryComplete::off
                                               : DeliveryComplete::automatic;
    const auto order = nb::cast<std::string>(options.get("ordering", nb::str("auto")));
    settings.ordering = order == "gated"     ? OrderingWish::gated
                        : order == "counted" ? OrderingWish::counted
                                             : OrderingWish::automatic;
    settings.trust_order = nb::cast<bool>(options.get("trust_order", nb::bool_(false)));
    settings.trust_immediates = nb::cast<bool>(options.get("trust_immediates", nb::bool_(false)));
    settings.rendezvous = nb::cast<std::string>(options.get("rendezvous", nb::str("")));
    return settings;
}

nb::dict to_dict(const Capabilities& capabilities) {
    nb::dict row;
    row["provider"] = capabilities.provider;
    row["ordering"] = name_of(capabilities.ordering);
    row["delivery_complete"] = capabilities.delivery_complete;
    row["remote_atomics"] = capabilities.remote_atomics;
    row["local_registration"] = capabilities.local_registration;
    row["manual_progress"] = capabilities.manual_progress;
    row["ends_at_post"] = capabilities.ends_at_post;
    row["detects_death"] = capabilities.detects_death;
    row["message_bytes_max"] = capabilities.message_bytes_max;
    row["ordered_bytes_max"] = capabilities.ordered_bytes_max;
    row["notification_bytes_max"] = capabilities.notification_bytes_max;
    row["inject_bytes_max"] = capabilities.inject_bytes_max;
    row["transmit_queue"] = capabilities.transmit_queue;
    row["waits_on_descriptor"] = capabilities.waits_on_descriptor;
    row["tested"] = capabilities.tested;
    row["why"] = capabilities.why;
    row["source"] = capabilities.source;
    return row;
}

namespace {

nb::dict library_facts(const std::vector<std::string>& candidates) {
    ControlResult result;
    std::shared_ptr<const LibfabricLibrary> library;
    {
        const nb::gil_scoped_release released;
        library = load_libfabric(candidates, result);
    }
    nb::dict facts;
    facts["found"] = library != nullptr;
    facts["path"] = library ? library->path() : "";
    facts["version"] = library ? nb::make_tuple(library->major(), library->minor()) : nb::make_tuple(0, 0);
    facts["message"] = result.message;
    nb::list tried;
    if (library) {
        for (const LibraryCandidate& candidate : library->tried()) {
            nb::dict row;
            row["path"] = candidate.path;
            row["version"] = nb::make_tuple(candidate.major, candidate.minor);
            row["error"] = candidate.error;
            tried.append(row);
        }
    }
    facts["tried"] = tried;
    return facts;
}

nb::list provider_facts(const std::vector<std::string>& candidates, const nb::dict& options) {
    const ProviderSettings settings = settings_from(options);
    ControlResult result;
    std::vector<ProviderFacts> rows;
    {
        const nb::gil_scoped_release released;
        rows = query_providers(candidates, settings, result);
    }
    nb::list list;
    for (const ProviderFacts& facts : rows) {
        nb::dict row = to_dict(facts.capabilities);
        row["domain"] = facts.domain;
        row["fabric"] = facts.fabric;
        row["source_address"] = facts.source_address;
        row["capability_bits"] = facts.capability_bits;
        row["mr_mode"] = facts.mr_mode;
        row["mode"] = facts.mode;
        row["message_order"] = facts.message_order;
        row["waw_bytes_max"] = facts.waw_bytes_max;
        row["usable"] = facts.usable;
        list.append(row);
    }
    return list;
}

const char* trust_name(OrderTrust trust) {
    return trust == OrderTrust::never ? "never" : trust == OrderTrust::on_request ? "on_request" : "as_granted";
}

nb::list provider_table_rows() {
    nb::list rows;
    for (const ProviderRules& rules : provider_table()) {
        nb::dict row;
        row["name"] = rules.name;
        row["tested"] = rules.tested;
        row["avoided"] = rules.avoided;
        row["since"] = rules.since;
        row["order"] = trust_name(rules.order);
        row["delivery_complete_kept"] = rules.delivery_complete_kept;
        row["atomics_kept"] = rules.atomics_kept;
        row["plain_completion_gates"] = rules.plain_completion_gates;
        row["prefers_counting"] = rules.prefers_counting;
        row["immediates_missing"] = rules.immediates_missing;
        row["immediates_unsafe"] = rules.immediates_unsafe;
        row["binds_ip_address"] = rules.binds_ip_address;
        row["reports_death"] = rules.reports_death;
        row["keeps_addresses"] = rules.keeps_addresses;
        row["source"] = rules.source;
        rows.append(row);
    }
    return rows;
}

nb::dict gate_facts(const nb::dict& granted, const nb::dict& options) {
    const auto flag = [&](const char* name) { return nb::cast<bool>(granted.get(name, nb::bool_(false))); };
    GrantedOrder order;
    order.provider = nb::cast<std::string>(granted["provider"]);
    order.fabric = nb::cast<std::string>(granted.get("fabric", nb::str("")));
    order.write_after_write = flag("write_after_write");
    order.send_after_write = flag("send_after_write");
    order.waw_bytes_max = nb::cast<std::uint64_t>(granted.get("waw_bytes_max", nb::int_(0)));
    order.atomics = flag("atomics");
    order.delivery_complete = flag("delivery_complete");
    order.immediates = flag("immediates");
    order.version = nb::cast<std::uint32_t>(granted.get("version", nb::int_(0)));
    order.endpoints = nb::cast<std::uint32_t>(granted.get("endpoints", nb::int_(1)));
    const ProviderSettings settings = settings_from(options);
    const OrderingVerdict verdict = classify_order(order, settings);
    Capabilities capabilities;
    capabilities.provider = order.provider;
    capabilities.ordering = verdict.ordering;
    capabilities.delivery_complete = order.delivery_complete;
    capabilities.why = verdict.why;
    ControlResult result;
    const GatePolicy policy = make_gate_policy(capabilities, settings, result);
    nb::dict facts;
    facts["ordering"] = name_of(verdict.ordering);
    facts["safe"] = verdict.safe;
    facts["why"] = verdict.why;
    facts["delivery_complete"] = policy.delivery_complete;
    facts["refused"] = result.message;
    return facts;
}

}  // namespace
}  // namespace bind

void bind_provider(nb::module_& module) {
    module.def("library_facts", &bind::library_facts, nb::arg("candidates"),
               "Load the best libfabric.so.1 among `candidates` (paths). Returns {found, path, version, message, "
               "tried}; never raises.");
    module.def("provider_facts", &bind::provider_facts, nb::arg("candidates"), nb::arg("settings"),
               "What fi_getinfo offers with the hints that the core uses, one dict per provider and domain; [] without "
               "a library.");
    module.def("provider_table", &bind::provider_table_rows,
               "What is known of each provider beside what getinfo grants, with its source: one dict per provider.");
    module.def("gate_facts", &bind::gate_facts, nb::arg("granted"), nb::arg("settings"),
               "Ordering class and gate policy for what a getinfo grants (pure): {ordering, safe, why, "
               "delivery_complete, refused}.");
    bind::bind_probe(module);
}

}  // namespace expertwire
