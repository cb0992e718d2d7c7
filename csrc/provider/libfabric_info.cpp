// What getinfo is asked and what its answers mean.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "provider/capabilities_table.hpp"
#include "provider/libfabric_objects.hpp"

namespace expertwire::fabric {
namespace {

constexpr std::uint64_t kNeeded =
    FI_MSG | FI_SEND | FI_RECV | FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
// Modes that registration here can follow; raw keys and device memory are not among them.
constexpr int kMemoryModes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;

Info make_hints(const std::shared_ptr<const LibfabricLibrary>& library, const std::string& provider, bool atomics,
                bool delivery_complete) {
    Info hints(library->calls().dupinfo(nullptr), InfoDeleter{library});
    if (!hints) return hints;
    hints->caps = kNeeded | (atomics ? FI_ATOMIC : 0);
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = kMemoryModes;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->tx_attr->op_flags = delivery_complete ? FI_DELIVERY_COMPLETE : 0;
    if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
    return hints;
}

Info query(const std::shared_ptr<const LibfabricLibrary>& library, const std::string& provider,
           const std::string& source, bool atomics, bool delivery_complete, int& code) {
    const Info hints = make_hints(library, provider, atomics, delivery_complete);
    if (!hints) {
        code = FI_ENOMEM;
        return Info(nullptr, InfoDeleter{library});
    }
    fi_info* found = nullptr;
    const char* node = source.empty() ? nullptr : source.c_str();
    code = -library->calls().getinfo(kApiVersion, node, nullptr, node != nullptr ? std::uint64_t{FI_SOURCE} : 0,
                                     hints.get(), &found);
    return Info(code == 0 ? found : nullptr, InfoDeleter{library});
}

struct Wish {
    bool atomics, delivery_complete;
};
// Atomics first: an emulated signal costs two messages. Delivery-complete matters more than atomics, since without it a
// signal of class B could not be gated at all.
constexpr std::array<Wish, 4> kWishes{{{true, true}, {false, true}, {true, false}, {false, false}}};

std::string text(const char* words) {
    return words != nullptr ? words : "";
}

// A NIC's domain by its own name, or with what the provider adds to it: efa calls "rdmap0s6" "rdmap0s6-rdm".
bool is_domain(const std::string& offered, const std::string& wanted) {
    return wanted.empty() || offered == wanted || offered.starts_with(wanted + "-");
}

std::string address_text(const fi_info& info) {
    std::array<char, NI_MAXHOST> host{};
    if (info.src_addr == nullptr || (info.addr_format != FI_SOCKADDR_IN && info.addr_format != FI_SOCKADDR_IN6))
        return "";
    const auto* address = static_cast<const sockaddr*>(info.src_addr);
    const auto length = static_cast<socklen_t>(info.src_addrlen);
    return getnameinfo(address, length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) == 0 ? host.data() : "";
}

}  // namespace

std::string full_provider_name(const std::string& name) {
    if (name == "tcp" || name == "verbs")
        return name + ";ofi_rxm";  // their own endpoints are connections, not datagrams
    return name;
}

bool resolve_source(const std::string& interface, std::string& address) {
    address = interface;
    if (interface.empty()) return true;
    std::array<unsigned char, sizeof(in6_addr)> scratch{};
    if (inet_pton(AF_INET, interface.c_str(), scratch.data()) == 1 ||
        inet_pton(AF_INET6, interface.c_str(), scratch.data()) == 1) {
        return true;
    }
    ifaddrs* list = nullptr;
    if (getifaddrs(&list) != 0) return false;
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
    for (const int family : {AF_INET, AF_INET6}) {
        for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
            if (item->ifa_addr == nullptr || item->ifa_addr->sa_family != family || interface != item->ifa_name)
                continue;
            std::array<char, NI_MAXHOST> host{};
            const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
            if (getnameinfo(item->ifa_addr, length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0)
                continue;
            address = host.data();
            return true;
        }
    }
    return false;
}

Info select_info(const std::shared_ptr<const LibfabricLibrary>& library, const LibfabricOptions& options,
                 ControlResult& result) {
    const std::string provider = full_provider_name(options.provider);
    std::string source;
    // Others are chosen by their domain: shm would take an IP address for its name, and every process for the same.
    const bool binds_ip = rules_of(provider).binds_ip_address;
    if (binds_ip && !resolve_source(options.source_address, source)) {
        result = {Status::invalid, 0,
                  "interface \"" + options.source_address +
                      "\" does not exist here or has no IP address; "
                      "give the name of one that has (ip -brief address) or a numeric address"};
        return Info(nullptr, InfoDeleter{library});
    }
    int code = 0;
    std::string unsafe;
    for (const Wish& wish : kWishes) {
        if (wish.atomics && options.signal_path == SignalPath::message) continue;
        if (!wish.atomics && options.signal_path == SignalPath::atomic) continue;
        if (wish.atomics && options.signal_path == SignalPath::automatic && !rules_of(provider).atomics_kept) continue;
        Info list = query(library, provider, source, wish.atomics, wish.delivery_complete, code);
        for (const fi_info* item = list.get(); item != nullptr; item = item->next) {
            if (!is_domain(text(item->domain_attr->name), options.domain)) continue;
            if (provider != text(item->fabric_attr->prov_name)) continue;
            // The wider wishes come later: efa's two fabrics must not be mistaken for each other.
            if (!classify_order(granted_order(*item, options.endpoints), options.settings).safe) {
                unsafe = classify_order(granted_order(*item, options.endpoints), options.settings).why;
                continue;
            }
            return Info(library->calls().dupinfo(item), InfoDeleter{library});
        }
    }
    if (!unsafe.empty()) {
        result = {Status::refused, 0, "provider \"" + options.provider + "\" cannot be used safely: " + unsafe};
        return Info(nullptr, InfoDeleter{library});
    }
    result = {Status::refused, code,
              "libfabric " + std::to_string(library->major()) + "." + std::to_string(library->minor()) + " (" +
                  library->path() + ") offers no provider \"" + provider + "\"" +
                  (source.empty() ? "" : " on address " + source) +
                  (options.domain.empty() ? "" : " and domain " + options.domain) +
                  (options.signal_path == SignalPath::atomic ? " with remote atomics" : "") + ": fi_getinfo says " +
                  library->calls().strerror(code) + " (" + std::to_string(code) +
                  "). `expertwire doctor` lists what there is"};
    return Info(nullptr, InfoDeleter{library});
}

GrantedOrder granted_order(const fi_info& info, std::uint32_t endpoints) {
    const std::uint64_t both = info.tx_attr->msg_order & info.rx_attr->msg_order;
    const std::string fabric = text(info.fabric_attr->name);
    const ProviderRules& rules = rules_of(text(info.fabric_attr->prov_name), fabric);
    return {.provider = text(info.fabric_attr->prov_name),
            .fabric = fabric,
            .write_after_write = (both & FI_ORDER_WAW) != 0,
            .send_after_write = (both & FI_ORDER_SAW) != 0,
            .waw_bytes_max = info.ep_attr->max_order_waw_size,
            .atomics = (info.caps & FI_ATOMIC) != 0,
            .delivery_complete = rules.delivery_complete_kept && (info.tx_attr->op_flags & FI_DELIVERY_COMPLETE) != 0,
            .immediates = *rules.immediates_missing == '\0' && info.domain_attr->cq_data_size >= 4,
            .version = FI_MAJOR(info.fabric_attr->prov_version),
            .endpoints = endpoints};
}

Capabilities describe(const fi_info& info, const LibfabricOptions& options) {
    const GrantedOrder granted = granted_order(info, options.endpoints);
    const OrderingVerdict verdict = classify_order(granted, options.settings);
    Capabilities capabilities;
    capabilities.provider = granted.provider;
    capabilities.ordering = verdict.ordering;
    // In class C without it (asked for, or not there) every write is acknowledged by its target.
    const bool unwanted = verdict.ordering == OrderingClass::counted_immediates &&
                          options.settings.delivery_complete == DeliveryComplete::off;
    capabilities.delivery_complete = granted.delivery_complete && !unwanted;
    const ProviderRules& rules = rules_of(granted.provider, granted.fabric);
    // Without delivery-complete an atomic ends when it has left; a message ends with its answer.
    const bool ends_there = capabilities.delivery_complete || verdict.ordering != OrderingClass::counted_immediates;
    capabilities.remote_atomics = granted.atomics && ends_there &&
                                  (options.signal_path == SignalPath::atomic ||
                                   (options.signal_path == SignalPath::automatic && rules.atomics_kept));
    capabilities.local_registration = (info.domain_attr->mr_mode & FI_MR_LOCAL) != 0;
    // An advertised FI_PROGRESS_AUTO was not honoured by native tcp (DESIGN), so the target polls on every provider.
    capabilities.manual_progress = true;
    capabilities.detects_death = rules.reports_death;
    capabilities.tested = rules.tested;
    capabilities.source = rules.source;
    capabilities.message_bytes_max = info.ep_attr->max_msg_size;
    if (verdict.ordering == OrderingClass::ordered) capabilities.ordered_bytes_max = granted.waw_bytes_max;
    capabilities.notification_bytes_max =
        std::min<std::uint64_t>(options.notification_bytes_max, info.ep_attr->max_msg_size - sizeof(MessageHeader));
    capabilities.inject_bytes_max = info.tx_attr->inject_size;
    capabilities.transmit_queue = static_cast<std::uint32_t>(std::min<std::uint64_t>(info.tx_attr->size, 65'536));
    if (options.transmit_queue != 0)
        capabilities.transmit_queue = std::min(capabilities.transmit_queue, options.transmit_queue);
    capabilities.why = verdict.why;
    return capabilities;
}

Status status_of_error(int code) {
    switch (code < 0 ? -code : code) {
        case FI_EACCES:
        case FI_EKEYREJECTED:
        case FI_ENOKEY:
            return Status::bad_key;
        case FI_ECONNRESET:
        case FI_ECONNABORTED:
        case FI_ECONNREFUSED:
        case FI_ENOTCONN:
        case FI_EHOSTUNREACH:
        case FI_EHOSTDOWN:
        case FI_ESHUTDOWN:
        case FI_ETIMEDOUT:
        case EPIPE:
        case FI_ECANCELED:  // nothing here cancels: the connection was lost (seen on tcp;ofi_rxm after a SIGKILL)
            return Status::peer_dead;
        default:
            return Status::io_error;
    }
}

}  // namespace expertwire::fabric

namespace expertwire {

std::vector<ProviderFacts> query_providers(const std::vector<std::string>& libraries, const ProviderSettings& settings,
                                           ControlResult& result) {
    using namespace fabric;
    std::vector<ProviderFacts> rows;
    const auto library = load_libfabric(libraries, result);
    if (!library) return rows;
    LibfabricOptions options;
    options.settings = settings;
    for (const Wish& wish : kWishes) {
        int code = 0;
        const Info list = query(library, "", "", wish.atomics, wish.delivery_complete, code);
        for (const fi_info* item = list.get(); item != nullptr; item = item->next) {
            ProviderFacts facts;
            facts.capabilities = describe(*item, options);
            facts.domain = text(item->domain_attr->name);
            facts.fabric = text(item->fabric_attr->name);
            facts.source_address = address_text(*item);
            const auto same = [&](const ProviderFacts& row) {
                return row.capabilities.provider == facts.capabilities.provider && row.domain == facts.domain &&
                       row.source_address == facts.source_address;
            };
            if (std::any_of(rows.begin(), rows.end(), same))
                continue;  // a wish that was granted already is the better one
            facts.capability_bits = item->caps;
            facts.mr_mode = static_cast<std::uint64_t>(static_cast<unsigned>(item->domain_attr->mr_mode));
            facts.mode = item->mode;
            facts.message_order = item->tx_attr->msg_order & item->rx_attr->msg_order;
            facts.waw_bytes_max = item->ep_attr->max_order_waw_size;
            facts.usable = classify_order(granted_order(*item, 1), settings).safe;
            rows.push_back(std::move(facts));
        }
    }
    return rows;
}

}  // namespace expertwire
