// The address vector of libfabric, fi_av(3), and when an address may leave it.
#pragma once

#include <cerrno>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "provider/libfabric_objects.hpp"

namespace expertwire::fabric {

// Where `keeps` is set, an address that was inserted stays until the book closes, and a peer who comes back under it
// gets it again. fi_av(3) wants an address removed only when nothing of ours uses it; libfabric's shm wants that
// nothing of the *peer's* does either, which nobody here can know: smr_unmap_region (prov/shm/src/smr_av.c) unmaps the
// peer's memory, and a command of its that stands in our queue is then answered through a null pointer (smr_progress.c,
// smr_peer_region). Measured with 2.5.1, two ranks on a busy machine: 3 crashes in 540 removals of a live peer.
class AddressBook {
  public:
    int open(fid_domain* domain, fi_av_type type, bool keeps) {
        keeps_ = keeps;
        fi_av_attr attributes{};
        attributes.type = type;
        return fi_av_open(domain, &attributes, vector_.out(), nullptr);
    }

    fid_av* get() const { return vector_.get(); }

    std::size_t kept() const { return kept_.size(); }

    // 0, or libfabric's negative error; -FI_ENOSPC where it keeps what it has and takes no more. All or none: where one
    // fails those before it are given back. Kept ones stay, for who comes under them again.
    int insert(std::span<const std::span<const std::byte>> names, std::vector<fi_addr_t>& found) {
        for (const std::span<const std::byte> name : names) {
            fi_addr_t address = FI_ADDR_UNSPEC;
            if (const int code = insert(name, address); code != 0) {
                remove(found);
                return code;
            }
            found.push_back(address);
        }
        return 0;
    }

    // They are empty afterwards.
    void remove(std::vector<fi_addr_t>& addresses) {
        if (!keeps_ && !addresses.empty()) fi_av_remove(vector_.get(), addresses.data(), addresses.size(), 0);
        addresses.clear();
    }

  private:
    int insert(std::span<const std::byte> name, fi_addr_t& found) {
        const std::string key(reinterpret_cast<const char*>(name.data()), name.size());
        if (const auto kept = kept_.find(key); kept != kept_.end()) {
            found = kept->second;
            return 0;
        }
        const int inserted = fi_av_insert(vector_.get(), name.data(), 1, &found, 0, nullptr);
        if (inserted != 1) return inserted < 0 ? inserted : keeps_ ? -FI_ENOSPC : -FI_EINVAL;
        if (keeps_) kept_.emplace(key, found);
        return 0;
    }

    Handle<fid_av> vector_;
    bool keeps_ = false;
    std::map<std::string, fi_addr_t> kept_;
};

}  // namespace expertwire::fabric
