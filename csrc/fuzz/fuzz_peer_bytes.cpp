// Whatever bytes a peer hands over: a blob, the address and the region keys in it, and datagrams. They are refused or
// taken; what is taken comes out again as it went in, and nothing but that happens.
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fuzz/bytes.hpp"
#include "provider/local.hpp"
#include "runtime/blob.hpp"
#include "runtime/failure.hpp"

namespace expertwire::fuzz {
namespace {

[[noreturn]] void fail(const char* why) {
    std::fprintf(stderr, "fuzz_peer_bytes: %s\n", why);
    std::abort();
}

void decode(std::span<const std::byte> bytes) {
    runtime::Blob blob;
    try {
        blob = runtime::decode_blob(bytes, 1);
    } catch (const runtime::Failure&) {
        return;
    }
    const std::vector<std::byte> again = runtime::encode_blob(blob);
    if (again.size() != bytes.size() || std::memcmp(again.data(), bytes.data(), bytes.size()) != 0)
        fail("a blob that was taken is not what it decodes to");
}

// A provider, and beside it itself as its only honest peer.
class Target {
  public:
    Target() {
        ControlResult result;
        provider_ = open_local({}, result);
        if (!provider_) fail("the local provider does not open");
        address_ = provider_->address(EndpointId{0});
        if (!provider_->add_peer(PeerId{0}, address_).ok()) fail("its own address is refused");
        socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
        if (socket_ < 0) fail("socket");
        std::uint64_t name = 0;
        std::memcpy(&name, address_.data() + 16, sizeof(name));
        to_.sun_family = AF_UNIX;
        const int length = std::snprintf(to_.sun_path + 1, sizeof(to_.sun_path) - 1, "expertwire-%016llx",
                                         static_cast<unsigned long long>(name));
        to_bytes_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
    }

    // Our own address with some bytes changed, so that more than the first check is reached.
    void address(Bytes& bytes) {
        std::vector<std::byte> changed = address_;
        const std::uint32_t changes = bytes.below(4);
        for (std::uint32_t i = 0; i < changes; ++i) changed[bytes.byte() % changed.size()] = std::byte{bytes.byte()};
        if (bytes.below(8) == 0) changed.resize(bytes.below(64));
        const PeerId peer{1 + bytes.below(3)};
        if (provider_->add_peer(peer, changed).ok()) static_cast<void>(provider_->remove_peer(peer));
    }

    void key(Bytes& bytes) {
        const RemoteRegionId id{bytes.below(4)};
        std::vector<std::byte> key(40);
        const std::uint32_t magic = 0x31'52'58'45;
        std::memcpy(key.data(), &magic, sizeof(magic));
        const auto rest = bytes.take(36);
        if (!rest.empty()) std::memcpy(key.data() + 4, rest.data(), rest.size());
        if (!provider_->add_remote_region(PeerId{0}, id, key).ok()) return;
        PostCommand command;
        command.kind = OpKind::signal;
        command.ticket = {0, 1};
        command.endpoint = EndpointId{0};
        command.peer = PeerId{0};
        command.remote = id;
        command.remote_offset = std::uint64_t{bytes.byte()} << bytes.below(60);
        if (provider_->post(command).outcome == PostOutcome::posted) fail("a key that nobody gave out was taken");
    }

    void datagram(Bytes& bytes) {
        std::vector<std::byte> message;
        const bool honest = bytes.below(2) == 0;
        if (honest) {  // the right magic and secret, and as much behind them as there is
            const std::uint32_t head[2] = {0x31'44'58'45, bytes.below(3)};
            message.resize(24);
            std::memcpy(message.data(), head, sizeof(head));
            std::memcpy(message.data() + 8, address_.data() + 16, 16);
        }
        const auto rest = bytes.take(bytes.byte());
        message.insert(message.end(), rest.begin(), rest.end());
        static_cast<void>(sendto(socket_, message.data(), message.size(), MSG_DONTWAIT,
                                 reinterpret_cast<const sockaddr*>(&to_), to_bytes_));
        std::vector<Arrival> arrivals;
        Completion completions[8];
        for (int i = 0; i < 64; ++i) static_cast<void>(provider_->poll(completions, arrivals));
        for (const Arrival& arrival : arrivals)
            if (!honest || arrival.peer != PeerId{0} || arrival.payload.size() > rest.size())
                fail("a datagram arrived that nobody sent like this");
    }

  private:
    std::unique_ptr<Provider> provider_;
    std::vector<std::byte> address_;
    sockaddr_un to_{};
    socklen_t to_bytes_ = 0;
    int socket_ = -1;
};

}  // namespace
}  // namespace expertwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static expertwire::fuzz::Target& target = *new expertwire::fuzz::Target();
    if (size == 0 || size > 4096) return -1;
    expertwire::fuzz::Bytes bytes(data, size);
    switch (bytes.below(4)) {
        case 0:
            target.address(bytes);
            break;
        case 1:
            target.key(bytes);
            break;
        case 2:
            target.datagram(bytes);
            break;
        default:
            expertwire::fuzz::decode(bytes.take(size));
    }
    return 0;
}
