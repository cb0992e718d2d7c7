// ProviderProbe: one provider as it is, without engine, gate or progress thread. The provider tests drive it, and the
// benchmark's raw baseline (what the wire gives to somebody who needs nothing else).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <optional>

#include "bind/native_bind.hpp"
#include "bind/native_probe.hpp"
#include "provider/libfabric.hpp"
#include "provider/local.hpp"

namespace nb = nanobind;

namespace expertwire::bind {
namespace {

using runtime::Failure;
using runtime::FailureKind;
using runtime::now_ns;

constexpr TimeNs kSliceNs = 50'000'000;  // Ctrl-C is looked for this often

const char* name_of(Status status) {
    static constexpr std::array<const char*, 14> kNames{"ok",        "pending", "would_block",  "cancelled", "aborted",
                                                        "peer_dead", "bad_key", "out_of_range", "timed_out", "refused",
                                                        "invalid",   "stale",   "closed",       "io_error"};
    return kNames[static_cast<std::size_t>(status)];
}

void check(const ControlResult& result) {
    if (result.ok()) return;
    const FailureKind kind = result.status == Status::invalid   ? FailureKind::invalid_argument
                             : result.status == Status::refused ? FailureKind::unavailable
                             : result.status == Status::closed  ? FailureKind::state
                                                                : FailureKind::transfer;
    throw Failure(kind, result.message);
}

template <class Value>
Value option(const nb::dict& options, const char* name, Value fallback) {
    return options.contains(name) ? nb::cast<Value>(options[name]) : fallback;
}

LibfabricOptions libfabric_options(const nb::dict& options) {
    LibfabricOptions made;
    made.libraries = option(options, "libraries", made.libraries);
    made.provider = option(options, "provider", made.provider);
    made.source_address = option(options, "interface", made.source_address);
    made.domain = option(options, "domain", made.domain);
    made.endpoints = option(options, "endpoints", made.endpoints);
    made.slots = option(options, "slots", made.slots);
    made.transmit_queue = option(options, "transmit_queue", made.transmit_queue);
    made.receive_buffers = option(options, "receive_buffers", made.receive_buffers);
    made.notification_bytes_max = option(options, "notification_bytes_max", made.notification_bytes_max);
    const auto path = option<std::string>(options, "signal_path", "auto");
    made.signal_path = path == "atomic"    ? SignalPath::atomic
                       : path == "message" ? SignalPath::message
                                           : SignalPath::automatic;
    made.settings = settings_from(options);
    return made;
}

LocalOptions local_options(const nb::dict& options) {
    LocalOptions made;
    made.endpoints = option(options, "endpoints", made.endpoints);
    made.slots = option(options, "slots", made.slots);
    made.regions_max = option(options, "regions_max", made.regions_max);
    made.transmit_queue = option(options, "transmit_queue", made.transmit_queue);
    made.notification_bytes_max = option(options, "notification_bytes_max", made.notification_bytes_max);
    return made;
}

nb::bytes to_python(const std::vector<std::byte>& bytes) {
    return nb::bytes(bytes.data(), bytes.size());
}
std::span<const std::byte> from_python(const nb::bytes& bytes) {
    return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

class Memory {  // a memfd region of the probe's own
  public:
    explicit Memory(std::uint64_t bytes) : bytes_(bytes), fd_(memfd_create("expertwire-probe", MFD_CLOEXEC)) {
        if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0)
            throw Failure(FailureKind::capacity, "memfd of " + std::to_string(bytes) + " bytes failed");
        void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
        if (address == MAP_FAILED)
            throw Failure(FailureKind::capacity, "mmap of " + std::to_string(bytes) + " bytes failed");
        address_ = static_cast<std::byte*>(address);
    }
    ~Memory() {
        if (address_ != nullptr) munmap(address_, bytes_);
        if (fd_ >= 0) ::close(fd_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::byte* address() const { return address_; }
    std::uint64_t bytes() const { return bytes_; }
    int fd() const { return fd_; }

  private:
    std::uint64_t bytes_;
    int fd_ = -1;
    std::byte* address_ = nullptr;
};

struct Window {  // what write_window() did
    double seconds = 0;
    std::uint64_t completed = 0, again = 0;
    std::string status = "ok";
};

class ProviderProbe {
  public:
    ProviderProbe(const std::string& kind, const nb::dict& options) {
        ControlResult result;
        if (kind == "local") {
            provider_ = open_local(local_options(options), result);
        } else {
            const LibfabricOptions made = libfabric_options(options);
            const nb::gil_scoped_release released;
            provider_ = open_libfabric(made, result);
        }
        check(result);
    }

    std::uint64_t create_region(std::uint32_t id, std::uint64_t bytes, bool remote_write, bool remote_read,
                                bool mappable) {
        auto memory = std::make_unique<Memory>(bytes);
        RegionSpec spec;
        spec.address = memory->address();
        spec.bytes = bytes;
        spec.remote_write = remote_write;
        spec.remote_read = remote_read;
        spec.fd = mappable ? memory->fd() : -1;
        check(provider_->register_region(RegionId{id}, spec));
        const auto address = reinterpret_cast<std::uintptr_t>(memory->address());
        memory_.insert_or_assign(id, std::move(memory));
        return address;
    }

    // False: a peer may still be writing; poll and call again. The memory itself stays until the probe goes, so that
    // tests can look at it.
    bool deregister_region(std::uint32_t id) {
        const ControlResult result = provider_->deregister_region(RegionId{id});
        if (result.status == Status::would_block) return false;
        check(result);
        kept_.push_back(std::move(memory_.at(id)));
        memory_.erase(id);
        return true;
    }

    nb::tuple post(const std::string& kind, std::uint32_t slot, std::uint32_t peer, std::uint32_t local,
                   std::uint64_t local_offset, std::uint32_t remote, std::uint64_t remote_offset, std::uint64_t bytes,
                   std::uint64_t operand, const nb::bytes& payload, std::uint32_t endpoint, bool delivered,
                   std::uint32_t generation, std::uint32_t counted) {
        PostCommand command;
        if (counted != 0) command.counted = {counted % 4096, counted};
        command.ticket = {slot, generation};
        command.kind = kind == "write"    ? OpKind::write
                       : kind == "read"   ? OpKind::read
                       : kind == "signal" ? OpKind::signal
                                          : OpKind::notification;
        command.level = delivered ? Level::delivered : Level::local;
        command.endpoint = EndpointId{endpoint};
        command.peer = PeerId{peer};
        command.local = RegionId{local};
        command.local_offset = local_offset;
        command.remote = RemoteRegionId{remote};
        command.remote_offset = remote_offset;
        command.operand = operand;
        command.bytes = command.kind == OpKind::notification ? payload.size() : bytes;
        command.payload = static_cast<const std::byte*>(payload.data());
        const PostResult result = provider_->post(command);
        const char* outcome = result.outcome == PostOutcome::posted  ? "posted"
                              : result.outcome == PostOutcome::again ? "again"
                                                                     : "failed";
        return nb::make_tuple(outcome, name_of(result.status), result.code);
    }

    nb::tuple poll(std::size_t completions_max) {
        completions_.resize(completions_max);
        std::vector<Arrival> arrivals;
        const std::size_t count = provider_->poll(completions_, arrivals);
        nb::list completions, notes;
        for (std::size_t index = 0; index < count; ++index) {
            const Completion& completion = completions_[index];
            completions.append(nb::make_tuple(completion.ticket.slot, completion.ticket.generation,
                                              name_of(completion.status), completion.code));
        }
        for (const Arrival& arrival : arrivals)
            notes.append(nb::make_tuple(arrival.peer.value, to_python(arrival.payload)));
        return nb::make_tuple(completions, notes);
    }

    // True: wait_fd became readable, or there was no need to sleep.
    bool sleep(int timeout_ms) {
        const nb::gil_scoped_release released;
        if (!provider_->may_sleep()) return true;
        pollfd item{provider_->wait_fd(), POLLIN, 0};
        return ::poll(&item, 1, timeout_ms) > 0;
    }

    // Polls until the 64-bit word at `address` is at least `value`. Nothing else progresses at a target.
    bool serve_until(std::uint64_t address, std::uint64_t value, std::uint32_t timeout_ms, bool sleeping) {
        auto& word = *reinterpret_cast<std::uint64_t*>(static_cast<std::uintptr_t>(address));
        const TimeNs deadline = now_ns() + TimeNs{timeout_ms} * 1'000'000;
        std::array<Completion, 64> completions;
        std::vector<Arrival> arrivals;
        for (;;) {
            {
                const nb::gil_scoped_release released;
                const TimeNs until = std::min(deadline, now_ns() + kSliceNs);
                while (std::atomic_ref(word).load(std::memory_order_acquire) < value && now_ns() < until) {
                    const std::size_t got = provider_->poll(completions, arrivals);
                    if (got == 0 && sleeping && provider_->may_sleep()) {
                        pollfd item{provider_->wait_fd(), POLLIN, 0};
                        ::poll(&item, 1, 10);
                    }
                }
            }
            check_signals();
            if (std::atomic_ref(word).load(std::memory_order_acquire) >= value) return true;
            if (now_ns() >= deadline) return false;
        }
    }

    // `count` writes (or reads) of `bytes` with `window` in flight, each followed by a gated signal when
    // `signal_remote` is given.
    Window write_window(const std::string& kind, std::uint32_t peer, std::uint32_t local, std::uint32_t remote,
                        std::uint64_t bytes, std::uint32_t window, std::uint64_t count, bool delivered,
                        std::uint32_t timeout_ms, bool signal, std::uint32_t signal_remote,
                        std::uint64_t signal_offset) {
        const TimeNs deadline = now_ns() + TimeNs{timeout_ms} * 1'000'000;
        PostCommand command;
        command.kind = kind == "read" ? OpKind::read : OpKind::write;
        command.level = delivered ? Level::delivered : Level::local;
        command.endpoint = EndpointId{0};
        command.peer = PeerId{peer};
        command.local = RegionId{local};
        command.remote = RemoteRegionId{remote};
        command.bytes = bytes;
        Window done;
        const nb::gil_scoped_release released;
        const TimeNs begin = now_ns();
        run_window(command, window, count, signal, RemoteRegionId{signal_remote}, signal_offset, deadline, done);
        done.seconds = static_cast<double>(now_ns() - begin) * 1e-9;
        return done;
    }

    Provider& provider() { return *provider_; }
    double close() {
        const TimeNs begin = now_ns();
        const nb::gil_scoped_release released;
        provider_->close();
        return static_cast<double>(now_ns() - begin) * 1e-9;
    }

  private:
    // Slot s carries write s, then its signal; an operation that got AGAIN is kept and tried first.
    void run_window(PostCommand& write, std::uint32_t window, std::uint64_t count, bool with_signal,
                    RemoteRegionId signal_remote, std::uint64_t signal_offset, TimeNs deadline, Window& done) {
        PostCommand signal = write;
        signal.kind = OpKind::signal;
        signal.remote = signal_remote;
        signal.remote_offset = signal_offset;
        signal.operand = 1;
        std::vector<bool> signalling(window, false);
        std::vector<std::uint32_t> free, ready;  // slots to write from; slots whose signal may leave
        for (std::uint32_t slot = window; slot-- > 0;) free.push_back(slot);
        std::vector<Completion> completions(window);
        std::vector<Arrival> arrivals;
        const auto attempt = [&](PostCommand& command, std::uint32_t slot) {
            command.ticket = {slot, 1};
            const PostResult result = provider_->post(command);
            if (result.outcome == PostOutcome::again) ++done.again;
            if (result.outcome == PostOutcome::failed) done.status = name_of(result.status);
            return result.outcome == PostOutcome::posted;
        };
        for (std::uint64_t posted = 0; done.completed < count && done.status == "ok";) {
            while (!ready.empty() && attempt(signal, ready.back())) {
                signalling[ready.back()] = true;
                ready.pop_back();
            }
            while (posted < count && !free.empty()) {
                const std::uint64_t place = free.back() * write.bytes;
                write.local_offset = write.remote_offset = place;
                if (!attempt(write, free.back())) break;
                free.pop_back();
                ++posted;
            }
            const std::size_t got = provider_->poll(completions, arrivals);
            for (std::size_t index = 0; index < got; ++index) {
                const std::uint32_t slot = completions[index].ticket.slot;
                if (completions[index].status != Status::ok) done.status = name_of(completions[index].status);
                if (with_signal && !signalling[slot]) {
                    ready.push_back(slot);
                    continue;
                }
                signalling[slot] = false;
                free.push_back(slot);
                ++done.completed;
            }
            if (got != 0) continue;
            if (now_ns() > deadline) done.status = "timed_out";
            if (provider_->may_sleep()) {  // the target may need this core
                pollfd item{provider_->wait_fd(), POLLIN, 0};
                ::poll(&item, 1, 10);
            }
        }
    }

    std::map<std::uint32_t, std::unique_ptr<Memory>> memory_;
    std::vector<std::unique_ptr<Memory>> kept_;
    std::vector<Completion> completions_;
    std::unique_ptr<Provider> provider_;  // last: it goes before the memory that it knows
};

nb::dict counters_of(ProviderProbe& probe) {
    const ProviderCounters counters = probe.provider().counters();
    nb::dict row;
    row["posted"] = counters.posted;
    row["again"] = counters.again;
    row["completed"] = counters.completed;
    row["failed"] = counters.failed;
    row["unattributed_errors"] = counters.unattributed_errors;
    row["dropped_messages"] = counters.dropped_messages;
    row["signals_applied"] = counters.signals_applied;
    return row;
}

// Endpoints that are replaced by hand, so that a test says who polls when.
void bind_replacement(nb::class_<ProviderProbe>& type) {
    using P = ProviderProbe;
    type.def(
            "open_replacement",
            [](P& probe, std::uint32_t old) {
                EndpointId fresh;
                check(probe.provider().open_replacement(EndpointId{old}, fresh));
                return fresh.value;
            },
            nb::arg("old"), "Opens endpoints in place of those from `old` on; returns the first one's number.")
        .def(
            "announce_replacement",
            [](P& probe, std::uint32_t peer) {
                const std::array<PeerId, 1> told{PeerId{peer}};
                probe.provider().announce_replacement(told);
            },
            nb::arg("peer"))
        .def("greet_peers", [](P& probe) { probe.provider().greet_peers(); })
        .def(
            "unmoved_peers",
            [](P& probe) {
                nb::list found;
                for (const UnmovedPeer& each : probe.provider().unmoved_peers())
                    found.append(nb::make_tuple(each.peer.value, each.told));
                return found;
            },
            "[(peer, it was told)] of who still uses the old endpoints, or has them used for it.")
        .def(
            "forgo_peer", [](P& probe, std::uint32_t peer) { probe.provider().forgo_peer(PeerId{peer}); },
            nb::arg("peer"))
        .def(
            "close_endpoints",
            [](P& probe, std::uint32_t old) {
                const ControlResult result = probe.provider().close_endpoints(EndpointId{old});
                if (result.status == Status::would_block) return false;
                check(result);
                return true;
            },
            nb::arg("old"), "False: peers still use them.");
}

}  // namespace

void bind_probe(nb::module_& module) {
    using P = ProviderProbe;
    nb::class_<Window>(module, "ProbeWindow", "What `ProviderProbe.write_window` did.")
        .def_ro("seconds", &Window::seconds)
        .def_ro("completed", &Window::completed)
        .def_ro("again", &Window::again)
        .def_ro("status", &Window::status);
    nb::class_<P> type(module, "ProviderProbe",
                       "One provider with nothing above it, for its tests and for raw figures. Single-threaded.");
    type.def(nb::init<const std::string&, const nb::dict&>(), nb::arg("kind"), nb::arg("options"))
        .def("capabilities", [](P& probe) { return to_dict(probe.provider().capabilities()); })
        .def("counters", &counters_of)
        .def("create_region", &P::create_region, nb::arg("id"), nb::arg("bytes"), nb::arg("remote_write") = true,
             nb::arg("remote_read") = true, nb::arg("mappable") = true,
             "A memfd region of the probe's own; returns its address.")
        .def("deregister_region", &P::deregister_region, nb::arg("id"))
        .def(
            "address",
            [](P& probe, std::uint32_t endpoint) { return to_python(probe.provider().address(EndpointId{endpoint})); },
            nb::arg("endpoint") = 0)
        .def(
            "region_key",
            [](P& probe, std::uint32_t id) { return to_python(probe.provider().region_key(RegionId{id})); },
            nb::arg("id"))
        .def(
            "add_peer",
            [](P& probe, std::uint32_t peer, const nb::bytes& blob) {
                check(probe.provider().add_peer(PeerId{peer}, from_python(blob)));
            },
            nb::arg("peer"), nb::arg("address"))
        .def("fence_peer", [](P& probe, std::uint32_t peer) { probe.provider().fence_peer(PeerId{peer}); })
        .def("expect_nothing_of",
             [](P& probe, std::uint32_t peer) { probe.provider().expect_nothing_of(PeerId{peer}); })
        .def(
            "remove_peer", [](P& probe, std::uint32_t peer) { check(probe.provider().remove_peer(PeerId{peer})); },
            nb::arg("peer"))
        .def(
            "add_remote_region",
            [](P& probe, std::uint32_t peer, std::uint32_t id, const nb::bytes& key) {
                check(probe.provider().add_remote_region(PeerId{peer}, RemoteRegionId{id}, from_python(key)));
            },
            nb::arg("peer"), nb::arg("id"), nb::arg("key"))
        .def("post", &P::post, nb::arg("kind"), nb::arg("slot"), nb::arg("peer"), nb::arg("local") = 0,
             nb::arg("local_offset") = 0, nb::arg("remote") = 0, nb::arg("remote_offset") = 0, nb::arg("bytes") = 0,
             nb::arg("operand") = 0, nb::arg("payload") = nb::bytes("", 0), nb::arg("endpoint") = 0,
             nb::arg("delivered") = true, nb::arg("generation") = 1, nb::arg("counted") = 0,
             "Returns (outcome, status, code). `counted`, not 0: the request whose writes and signal the target "
             "counts. A notification's payload must outlive its completion.")
        .def("poll", &P::poll, nb::arg("completions_max") = 64,
             "([(slot, generation, status, code)], [(peer, payload)])")
        .def("sleep", &P::sleep, nb::arg("timeout_ms"))
        .def("serve_until", &P::serve_until, nb::arg("address"), nb::arg("value"), nb::arg("timeout_ms"),
             nb::arg("sleeping") = true)
        .def("write_window", &P::write_window, nb::arg("kind"), nb::arg("peer"), nb::arg("local"), nb::arg("remote"),
             nb::arg("bytes"), nb::arg("window"), nb::arg("count"), nb::arg("delivered") = true,
             nb::arg("timeout_ms") = 10'000, nb::arg("signal") = false, nb::arg("signal_remote") = 0,
             nb::arg("signal_offset") = 0)
        .def("close", &P::close, "Closes the provider; returns the seconds that it took.");
    bind_replacement(type);
}

}  // namespace expertwire::bind
