// Owners of libfabric's objects, and the messages that our providers put on the wire. Private to libfabric*.cpp.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "provider/libfabric.hpp"
#include "provider/live_objects.hpp"
#include "provider/loader.hpp"

namespace expertwire::fabric {

inline constexpr std::uint32_t kApiVersion = FI_VERSION(1, 17);

// One libfabric object, closed when it goes. The order of members in Objects is the order of opening; they close in
// reverse.
template <class Fid>
class Handle {
  public:
    Handle() = default;
    Handle(Handle&& other) noexcept : fid_(std::exchange(other.fid_, nullptr)) {}
    Handle& operator=(Handle&& other) noexcept {
        reset();
        fid_ = std::exchange(other.fid_, nullptr);
        return *this;
    }
    ~Handle() { reset(); }
    void reset() {
        if (fid_ != nullptr) fi_close(&std::exchange(fid_, nullptr)->fid);
    }
    void abandon() { fid_ = nullptr; }  // a forked child closes nothing of its parent's
    Fid* get() const { return fid_; }
    Fid* operator->() const { return fid_; }
    Fid** out() {
        reset();
        return &fid_;
    }
    explicit operator bool() const { return fid_ != nullptr; }

  private:
    Fid* fid_ = nullptr;
    Counted<Live::fabric_handle> counted_;
};

struct InfoDeleter {
    std::shared_ptr<const LibfabricLibrary> library;
    void operator()(fi_info* info) const { library->calls().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, InfoDeleter>;

// ---- getinfo (libfabric_info.cpp)

std::string full_provider_name(const std::string& name);  // "tcp" → "tcp;ofi_rxm"; others unchanged

// The address to bind, from an interface name or a numeric address; "" stays "". False: no such interface or address.
bool resolve_source(const std::string& interface, std::string& address);

// The first RDM info of the provider that has messages and RMA, with FI_ATOMIC where it can be had. Null: `result` says
// why.
Info select_info(const std::shared_ptr<const LibfabricLibrary>& library, const LibfabricOptions& options,
                 ControlResult& result);

GrantedOrder granted_order(const fi_info& info, std::uint32_t endpoints);
Capabilities describe(const fi_info& info, const LibfabricOptions& options);

// ---- errors

inline ControlResult failure(const LibfabricLibrary& library, const std::string& call, int code) {
    const int positive = code < 0 ? -code : code;
    return {Status::io_error, positive,
            call + " failed: " + library.calls().strerror(positive) + " (" + std::to_string(positive) + ")"};
}

Status status_of_error(int code);  // a completion's error number, of either sign

// ---- wire: messages between providers (notifications, emulated signals and their answers)

inline constexpr std::uint32_t kMessageMagic = 0x31'57'58'45;  // "EXW1"

// A revocation says that a region is about to go. It is answered once nothing of the sender's is on its way there any
// more: over tcp a write with a stale key costs the whole connection, and with it what others had in flight.
// `moved` carries the names of the endpoints that replace those that it came over; `moved_answer` is the last that its
// receiver sends to the old ones. `greeting` carries the same to a peer that was added and may know only an older
// address; its receiver may write from then on (libfabric_replace.cpp).
enum class MessageKind : std::uint8_t {
    notification = 1,
    signal,
    answer,
    revocation,
    revocation_answer,
    moved,
    moved_answer,
    greeting,
    counted,  // class C; its bytes follow (counted.cpp)
    inquiry,  // a key: is it one of yours, as it is now? (libfabric_keys.cpp)
    inquiry_answer
};

struct MessageHeader {
    std::uint32_t magic = kMessageMagic;
    MessageKind kind = MessageKind::notification;
    Status status = Status::ok;      // answer: how the signal ended; inquiry_answer: ok or bad_key
    std::uint16_t access = 0;        // inquiry: of the key
    std::uint64_t sender = 0;        // instance that sent it: addresses of a dead process may be taken again
    std::uint64_t ticket = 0;        // signal: comes back in its answer. inquiry: the key's base
    std::uint32_t region = 0;        // signal, revocation, inquiry: the target's RegionId and …
    std::uint32_t registration = 0;  // … which registration of it. moved, moved_answer: how many of them there are
    std::uint64_t offset = 0;        // bytes. inquiry: how many the key says
    std::uint64_t operand = 0;       // inquiry: the provider's key
};
static_assert(sizeof(MessageHeader) == 48);

// What a peer needs to reach this provider; endpoint names follow, each behind its u32 length.
struct AddressHeader {
    std::uint32_t magic = 0x32'41'58'45;  // "EXA2"
    std::uint32_t endpoints = 0;
    std::uint64_t instance = 0;
    std::uint64_t replacements = 0;  // of its endpoints, before this address was made
};
static_assert(sizeof(AddressHeader) == 24);

// What a peer needs to reach one region.
struct RegionKey {
    std::uint32_t magic = 0x31'4b'58'45;  // "EXK1"
    std::uint32_t region = 0;
    std::uint32_t registration = 0;
    std::uint32_t access = 0;  // bit 0: write, bit 1: read
    std::uint64_t base = 0;    // virtual address, or 0 with offset addressing
    std::uint64_t bytes = 0;
    std::uint64_t key = 0;
};
static_assert(sizeof(RegionKey) == 40);

template <class Value>
std::vector<std::byte> to_bytes(const Value& value) {
    std::vector<std::byte> bytes(sizeof(Value));
    std::memcpy(bytes.data(), &value, sizeof(Value));
    return bytes;
}

}  // namespace expertwire::fabric
