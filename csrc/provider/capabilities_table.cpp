#include "provider/capabilities_table.hpp"

#include <array>

namespace expertwire {
namespace {

constexpr const char* kMisbehaves = "known to misbehave; use tcp";
// prov/shm/src/smr_progress.c, smr_progress_resp: it stops at the first response that is not there, whose ever it is;
// and smr.h: `lock` of the region that a process shares with its peers, which they take too, to post there.
constexpr const char* kOrderedEnds =
    "before libfabric 2.5 its operations end in the order of their posts, so that one for a stopped or killed rank "
    "holds "
    "up all behind it, and a rank that was stopped with the lock of its queue holds its writers for ever; use "
    "libfabric "
    "2.5 or later, provider local (ranks of one host) or tcp";

// prov/rxm/src/rxm_cq.c, rxm_handle_comp_error: it reads the state of an operation behind op_context, and the error of
// a write with immediate data that breaks off at its target has none (prov/tcp: such a write is no internal transfer).
constexpr const char* kEndsItsTarget =
    "a writer that dies or closes in the middle of a write with immediate data takes its target along: libfabric's rxm "
    "reads address 0 there (seen with 2.5)";

constexpr std::array<ProviderRules, 10> kTable{{
    {.name = "tcp",
     .tested = true,
     .avoided = "",
     .since = 0,
     .before = "",
     .order = OrderTrust::never,
     .delivery_complete_kept = true,
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = kEndsItsTarget,
     .binds_ip_address = true,
     .reports_death = true,
     .keeps_addresses = false,
     .source =
         "tests/fabric/test_order.py: a signal on another endpoint overtook its payload in 95 of 100 rounds, with "
         "a gate on the ordinary completion too; never with delivery-complete, nor where the target counted. "
         "docs/counted_immediates.md: for single writes counted immediates cost 0.83 to 1.03 of this gate's CPU, for a "
         "whole layer the same"},
    {.name = "shm",
     .tested = true,
     .avoided = "",
     .since = 205,
     .before = kOrderedEnds,
     .order = OrderTrust::on_request,
     .delivery_complete_kept = true,
     .atomics_kept = false,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = "",
     .binds_ip_address = false,
     .reports_death = false,
     .keeps_addresses = true,
     .source = "fi_shm(7) and measured: signals are messages, for 1.17 added a wrong operand in one run of eight; no "
               "wait object, a dead peer hangs what is on its way to it, atomics land when "
               "the target polls, a killed process leaves files in /dev/shm"},
    {.name = "cxi",
     .tested = false,
     .avoided = "",
     .since = 0,
     .before = "",
     .order = OrderTrust::on_request,
     .delivery_complete_kept = true,  // a flushing read at the target (fi_cxi(7), "Operation flags")
     .atomics_kept = true,
     .plain_completion_gates = true,  // source A; fi_cxi(7) promises transmit-complete only
     .prefers_counting = false,
     .immediates_missing = "FI_CXI_ENABLE_WRITEDATA=1 and keys of the provider (fi_cxi(7))",
     .immediates_unsafe = "",
     .binds_ip_address = false,
     .reports_death = true,
     .keeps_addresses = false,
     .source = "fi_cxi(7) and prov/cxi/src/cxip_info.c: FI_MR_ENDPOINT, WAW of any size granted, order lost with "
               "FI_CXI_RDZV_THRESHOLD=0, high-rate puts and several NICs; wait descriptor with a race"},
    {.name = "efa-direct",
     .tested = false,
     .avoided = "",
     .since = 0,
     .before = "",
     .order = OrderTrust::never,
     .delivery_complete_kept = false,  // in op_flags, but nothing in efa_rma.c acts on it
     .atomics_kept = false,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",  // 4 bytes, unsolicited: they consume no receive
     .immediates_unsafe = "",
     .binds_ip_address = false,
     .reports_death = true,
     .keeps_addresses = false,
     .source = "fi_efa(7) and prov/efa/docs/efa_fabric_comparison.md: no atomics, no order, FI_CONTEXT2, FI_MR_LOCAL, "
               "messages of at most about 8 KiB"},
    {.name = "efa",
     .tested = false,
     .avoided = "",
     .since = 0,
     .before = "",
     .order = OrderTrust::never,      // SAS and ATOMIC_* only
     .delivery_complete_kept = true,  // efa_rdm_rma.c takes a write protocol with an acknowledgement
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = "",
     .binds_ip_address = false,
     .reports_death = true,
     .keeps_addresses = false,
     .source =
         "fi_efa(7): reliable and unordered (SRD); atomics by software of the target; FI_MR_VIRT_ADDR, ALLOCATED, "
         "PROV_KEY; an advertised automatic progress does not hold"},
    {.name = "verbs",
     .tested = false,
     .avoided = "",
     .since = 0,
     .before = "",
     .order = OrderTrust::as_granted,
     .delivery_complete_kept = false,  // ofi_rxm grants it and verbs_rma.c takes it for an ordinary completion
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = "",
     .binds_ip_address = true,  // rdma_cm resolves IP addresses
     .reports_death = true,
     .keeps_addresses = false,
     .source = "fi_verbs(7), fi_rxm(7) and prov/verbs/src/verbs_info.c: RC queue pairs keep WAW and SAW; MSG endpoints "
               "have fetching atomics only, ofi_rxm makes the others by messages; FI_MR_LOCAL, FI_RX_CQ_DATA"},
    {.name = "sockets",
     .tested = false,
     .avoided = kMisbehaves,
     .since = 0,
     .before = "",
     .order = OrderTrust::never,
     .delivery_complete_kept = false,
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = "",
     .binds_ip_address = true,
     .reports_death = false,
     .keeps_addresses = false,
     .source = "fi_sockets(7): deprecated"},
    {.name = "udp",
     .tested = false,
     .avoided = kMisbehaves,
     .since = 0,
     .before = "",
     .order = OrderTrust::never,
     .delivery_complete_kept = false,
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = "",
     .binds_ip_address = true,
     .reports_death = false,
     .keeps_addresses = false,
     .source = "fi_udp(7), fi_rxd(7): for development"},
    {.name = "net",
     .tested = false,
     .avoided = kMisbehaves,
     .since = 0,
     .before = "",
     .order = OrderTrust::never,
     .delivery_complete_kept = false,
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "",
     .immediates_unsafe = "",
     .binds_ip_address = true,
     .reports_death = false,
     .keeps_addresses = false,
     .source = "measured with 1.17; later versions have folded it into tcp"},
    {.name = "",
     .tested = false,
     .avoided = "",
     .since = 0,
     .before = "",
     .order = OrderTrust::never,
     .delivery_complete_kept = true,
     .atomics_kept = true,
     .plain_completion_gates = false,
     .prefers_counting = false,
     .immediates_missing = "knowledge of this provider",
     .immediates_unsafe = "",
     .binds_ip_address = true,
     .reports_death = false,
     .keeps_addresses = false,
     .source = "no row for this provider: gated on delivery-complete, or not used"},
}};

}  // namespace

std::string core_of(const std::string& provider) {
    return provider.substr(0, provider.find(';'));
}

const ProviderRules& rules_of(const std::string& provider, const std::string& fabric) {
    const std::string core = core_of(provider);
    const ProviderRules* found = &kTable.back();
    for (const ProviderRules& row : kTable) {
        if (core == row.name && found == &kTable.back()) found = &row;
        if (!fabric.empty() && fabric == row.name && fabric != core && fabric.starts_with(core)) return row;
    }
    return *found;
}

std::span<const ProviderRules> provider_table() {
    return {kTable.data(), kTable.size() - 1};
}

}  // namespace expertwire
