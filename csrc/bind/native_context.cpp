// `_native.Context` and `_native.Request`: thin, no decisions. Every call releases the GIL; every wait runs in slices
// of at most 50 ms between which Python's signals are looked at.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bind/native_bind.hpp"
#include "runtime/statistics.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {
namespace bind {

using runtime::Context;
using runtime::Failure;
using runtime::FailureKind;

void check_signals() {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void log_stall(const std::string& text) {
    const nb::gil_scoped_acquire gil;
    nb::module_::import_("logging").attr("getLogger")("expertwire.ep").attr("warning")("%s", text);
}

OpKind parse_kind(const std::string& kind) {
    if (kind == "write") return OpKind::write;
    if (kind == "read") return OpKind::read;
    throw Failure(FailureKind::invalid_argument, "kind is '" + kind + "'; it must be 'write' or 'read'");
}

namespace {

constexpr TimeNs tell_ns = 500'000'000;

using ChunkTuple = std::tuple<std::uint32_t, std::uint64_t, std::uint32_t, std::uint64_t, std::uint64_t, std::uint32_t>;
using SignalTuple = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, int, std::uint32_t>;

std::string text(nb::handle value) {
    return nb::cast<std::string>(value);
}

// One option of the constructor's dict; absent keeps the default of ContextOptions.
template <class T>
void take_option(const nb::dict& options, const char* key, T& field) {
    if (options.contains(key)) field = nb::cast<T>(options[key]);
}

void take_ms(const nb::dict& options, const char* key, TimeNs& field) {
    if (!options.contains(key)) return;
    const auto ms = nb::cast<std::int64_t>(options[key]);
    if (ms < 1)
        throw Failure(FailureKind::invalid_argument,
                      std::string(key) + " is " + std::to_string(ms) + "; it must be at least 1");
    field = static_cast<TimeNs>(ms) * 1'000'000;
}

template <class T>
void take_word(const nb::dict& options, const char* key, T& field,
               std::initializer_list<std::pair<const char*, T>> words) {
    if (!options.contains(key)) return;
    const std::string given = text(options[key]);
    std::string allowed;
    for (const auto& [word, value] : words) {
        if (given == word) {
            field = value;
            return;
        }
        allowed += std::string(allowed.empty() ? "" : ", ") + word;
    }
    throw Failure(FailureKind::invalid_argument,
                  std::string(key) + " is '" + given + "'; it must be one of " + allowed);
}

runtime::ContextOptions read_options(std::uint32_t rank, std::uint32_t size, const nb::dict& options) {
    static constexpr const char* known[] = {
        "provider",          "libraries",         "source_address",     "domain",          "signal_path",
        "delivery_complete", "trust_order",       "rendezvous",         "max_outstanding", "lanes",
        "requests_max",      "counters",          "timeout_ms",         "hard_timeout_ms", "heartbeat_ms",
        "silence_ms",        "sync_writes",       "liveness",           "endpoints",       "bulk_chunk_bytes",
        "bulk_window",       "bulk_hold_us",      "ordering",           "independent",     "regions_max",
        "operations_max",    "notifications_max", "remote_regions_max", "trust_immediates"};
    for (auto [key, value] : options) {
        const std::string name = text(key);
        if (std::none_of(std::begin(known), std::end(known), [&](const char* word) { return name == word; }))
            throw Failure(FailureKind::invalid_argument, "unknown option '" + name + "' of Context");
    }
    runtime::ContextOptions result;
    result.rank = rank;
    result.size = size;
    take_option(options, "provider", result.provider);
    take_option(options, "libraries", result.libraries);
    take_option(options, "source_address", result.source_address);
    take_option(options, "domain", result.domain);
    take_option(options, "rendezvous", result.settings.rendezvous);
    take_option(options, "trust_order", result.settings.trust_order);
    take_option(options, "trust_immediates", result.settings.trust_immediates);
    take_word(options, "signal_path", result.signal_path,
              {{"auto", SignalPath::automatic}, {"atomic", SignalPath::atomic}, {"message", SignalPath::message}});
    take_word(options, "delivery_complete", result.settings.delivery_complete,
              {{"auto", DeliveryComplete::automatic}, {"1", DeliveryComplete::on}, {"0", DeliveryComplete::off}});
    take_word(options, "ordering", result.settings.ordering,
              {{"auto", OrderingWish::automatic}, {"gated", OrderingWish::gated}, {"counted", OrderingWish::counted}});
    take_word(options, "liveness", result.liveness,
              {{"auto", runtime::LivenessMode::automatic}, {"heartbeat", runtime::LivenessMode::heartbeat}});
    take_option(options, "max_outstanding", result.outstanding_max);
    take_option(options, "lanes", result.lanes);
    take_option(options, "endpoints", result.endpoints);
    take_option(options, "bulk_chunk_bytes", result.bulk_chunk_bytes);
    take_option(options, "bulk_window", result.bulk_window);
    if (options.contains("bulk_hold_us"))
        result.bulk_hold_ns = 1000 * static_cast<TimeNs>(nb::cast<std::uint32_t>(options["bulk_hold_us"]));
    take_option(options, "requests_max", result.requests_max);
    take_option(options, "counters", result.counters);
    take_option(options, "independent", result.independent);
    take_option(options, "regions_max", result.regions_max);
    take_option(options, "remote_regions_max", result.remote_regions_max);
    take_option(options, "operations_max", result.operations_max);
    take_option(options, "notifications_max", result.notifications_max);
    take_ms(options, "timeout_ms", result.timeout_ns);
    result.hard_timeout_ns = 2 * result.timeout_ns;
    take_ms(options, "hard_timeout_ms", result.hard_timeout_ns);
    take_ms(options, "heartbeat_ms", result.heartbeat_ns);
    take_ms(options, "silence_ms", result.silence_ns);
    take_option(options, "sync_writes", result.sync_writes);
    return result;
}

std::shared_ptr<PyRequest> submit(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                  const std::vector<ChunkTuple>& chunks, const std::vector<SignalTuple>& signals,
                                  const std::optional<nb::bytes>& notification, bool delivered,
                                  std::int64_t timeout_ms) {
    Context& context = *self.context;
    context.check_usable();
    const OpKind op = parse_kind(kind);
    std::vector<ChunkSpec> specs(chunks.size());
    for (std::size_t i = 0; i < chunks.size(); ++i) {
        const auto& [local, local_offset, remote, remote_offset, bytes, lane] = chunks[i];
        specs[i] =
            context.chunk(rank, op, RegionId{local}, local_offset, RemoteRegionId{remote}, remote_offset, bytes, lane);
    }
    std::vector<ControlSpec> controls;
    for (const auto& [remote, offset, operand, scope, lane] : signals) {
        if (scope < 0 || scope > static_cast<int>(Scope::peer))
            throw Failure(FailureKind::invalid_argument,
                          "scope is " + std::to_string(scope) + "; it must be 0 (request), 1 (queue pair) or 2 (peer)");
        controls.push_back(
            context.signal(rank, RemoteRegionId{remote}, offset, operand, static_cast<Scope>(scope), lane));
    }
    if (notification) {
        const auto* bytes = static_cast<const std::byte*>(notification->data());
        controls.push_back(context.notification(rank, {bytes, notification->size()}, Scope::request, 0));
    }
    const Ticket ticket = submit_specs(context, rank, specs, controls, delivered, timeout_ms);
    return std::make_shared<PyRequest>(self.context, ticket, rank);
}

int request_wait(PyRequest& self, std::int64_t timeout_ms) {
    self.context->check_usable();
    Status status = Status::pending;
    wait_in_slices(timeout_ms, [&](TimeNs until) {
        status = self.context->wait_slice(self.ticket, until);
        return status != Status::pending;
    });
    if (status == Status::pending) self.context->mark_stalled(self.ticket);
    return static_cast<int>(status);
}

void register_failures() {
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        static constexpr const char* names[] = {"InvalidArgumentError", "InvalidTypeError", "CapacityError",
                                                "StateError",           "MismatchError",    "PeerError",
                                                "TransferError",        "DeadlineError",    "CancelledRequestError",
                                                "UnavailableError",     "ExcludedError"};
        try {
            std::rethrow_exception(pointer);
        } catch (const Failure& failure) {
            nb::object type = nb::module_::import_("expertwire.errors").attr(names[static_cast<int>(failure.kind())]);
            nb::object error =
                failure.kind() == FailureKind::peer ? type(failure.what(), failure.rank()) : type(failure.what());
            PyErr_SetObject(type.ptr(), error.ptr());
        }
    });
}

void bind_request(nb::module_& module) {
    nb::class_<PyRequest>(module, "Request",
                          "One logical request. Dropping it gives the handle up, never the memory it still uses.")
        .def(
            "status", [](const PyRequest& self) { return static_cast<int>(self.context->status(self.ticket)); },
            "One local load (SPEC T13): 0 ok, 1 pending, else the number of the failure (Context.status_name).")
        .def(
            "turn", [](const PyRequest& self) { return static_cast<int>(self.context->turn_for(self.ticket, 20'000)); },
            nb::call_guard<nb::gil_scoped_release>(),
            "Help the engine for at most 20 us if nobody does, then status().")
        .def("wait", &request_wait, "timeout_ms"_a, nb::call_guard<nb::gil_scoped_release>(),
             "The terminal status, or 1 (pending) when the deadline passed: the request then still owns its memory.")
        .def(
            "cancel",
            [](const PyRequest& self) {
                self.context->check_usable();
                return static_cast<int>(self.context->cancel(self.ticket));
            },
            nb::call_guard<nb::gil_scoped_release>(),
            "0: cancelled before anything was posted. 'refused': posted work is still owned; the handle stays valid.")
        .def(
            "stalled", [](const PyRequest& self) { return self.context->stalled(self.ticket); },
            "True once a wait for it has passed its deadline (a flag, not a state).")
        .def(
            "code", [](const PyRequest& self) { return self.context->error_code(self.ticket); },
            "The provider's own error number behind a failure, or 0.")
        .def("release", &PyRequest::release, nb::call_guard<nb::gil_scoped_release>(),
             "Give the handle up now; what it owns is freed once it is terminal. Idempotent.")
        .def_ro("rank", &PyRequest::rank, "The peer.");
}

template <class Class>
void bind_regions(Class& cls) {
    using Self = const PyContext&;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def(
           "create_region",
           [](Self self, const std::string& name, std::uint64_t bytes) {
               return self.context->create_region(name, bytes).value;
           },
           "name"_a, "bytes"_a, Release(),
           "A shared region of `bytes` zero bytes (memfd, preallocated), registered with the provider; its number.\n"
           "Raises InvalidArgumentError (name taken, 0 bytes), CapacityError (no memory: call, bytes, errno).")
        .def(
            "register_region",
            [](Self self, std::uintptr_t address, std::uint64_t bytes) {
                return self.context->register_region(reinterpret_cast<std::byte*>(address), bytes).value;
            },
            "address"_a, "bytes"_a, Release(),
            "Register the caller's memory, announced to peers as '#<number>'; its number.")
        .def(
            "deregister_region",
            [](Self self, std::uint32_t region, std::int64_t timeout_ms) {
                if (!wait_in_slices(timeout_ms, [&](TimeNs until) {
                        return self.context->deregister_region(RegionId{region}, until);
                    }))
                    self.context->fail_in_use(RegionId{region}, timeout_ms);
            },
            "region"_a, "timeout_ms"_a, Release(),
            "Raises StateError while a request uses the region (after waiting up to timeout_ms).")
        .def(
            "region", [](Self self, const std::string& name) { return self.context->region(name).value; }, "name"_a,
            Release(), "The number of the region of that name.")
        .def(
            "region_address",
            [](Self self, std::uint32_t region) {
                return reinterpret_cast<std::uintptr_t>(self.context->region_address(RegionId{region}));
            },
            "region"_a, Release(), "Its first byte's address in this process.")
        .def(
            "region_bytes",
            [](Self self, std::uint32_t region) { return self.context->region_bytes(RegionId{region}); }, "region"_a,
            Release(), "Its size.")
        .def(
            "region_key",
            [](Self self, std::uint32_t region) {
                std::vector<std::byte> key;
                {
                    nb::gil_scoped_release release;
                    key = self.context->region_key(RegionId{region});
                }
                return nb::bytes(key.data(), key.size());
            },
            "region"_a, "What announce_region() of a peer takes; b'' where no peer can reach it.")
        .def(
            "region_fd", [](Self self, std::uint32_t region) { return self.context->region_fd(RegionId{region}); },
            "region"_a, Release(),
            "Its descriptor, borrowed (-1: the caller's memory). Pass it to node peers, do not close it.")
        .def(
            "region_names", [](Self self) { return self.context->region_names(); }, Release(),
            "Names of the shared regions, 'runtime' first: node peers map each of them.");
}

template <class Class>
void bind_submissions(Class& cls) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def("submit", &submit, "rank"_a, "kind"_a, "chunks"_a, "signals"_a, "notification"_a.none(), "delivered"_a,
            "timeout_ms"_a, Release(),
            "One logical request. kind: 'write' or 'read'; chunks: [(local region, offset, remote region, offset, "
            "bytes, lane)];\n"
            "signals: [(remote region, byte offset (8-aligned), value added, scope 0 request|1 queue pair|2 peer, "
            "lane)], sent once\n"
            "what they cover is there; notification: bytes or None, likewise. Full: waits up to timeout_ms, then "
            "DeadlineError.")
        .def("submit_batch", &submit_batch, "rank"_a, "kind"_a, "local"_a, "remote"_a, "bytes"_a, "offsets"_a,
             "remote_offsets"_a, "lane"_a, "timeout_ms"_a,
             "One logical request of many chunks of the same size, from arrays: chunk i is `bytes` bytes between local "
             "region\n"
             "`local` at offsets[i] and remote region `remote` at remote_offsets[i] (uint64, one dimension). Otherwise "
             "as submit().")
        .def(
            "prepare_arrays", &prepare_arrays, "rank"_a, "kind"_a, "locals"_a, "offsets"_a, "remotes"_a,
            "remote_offsets"_a, "bytes"_a, "lane"_a,
            "A request of many chunks, from arrays of one length, to be submitted later and often: chunk i is bytes[i] "
            "bytes (uint64)\n"
            "between offsets[i] (uint64) of local region locals[i] (uint32) and remote_offsets[i] of remote region "
            "remotes[i].");
}

template <class Class>
void bind_waits(Class& cls) {
    using Self = const PyContext&;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def(
           "quiet",
           [](Self self, std::int64_t timeout_ms) {
               const auto mark = self.context->quiet_begin();
               if (!wait_in_slices(timeout_ms, [&](TimeNs until) { return self.context->quiet_slice(mark, until); }))
                   self.context->fail_quiet(mark, timeout_ms);
           },
           "timeout_ms"_a, Release(),
           "Wait until everything submitted before the call is terminal; later submissions do not extend it.\n"
           "Raises DeadlineError with what is still unfinished.")
        .def(
            "barrier",
            [](Self self, std::int64_t timeout_ms) {
                const std::uint64_t epoch = self.context->barrier_begin(deadline_after(timeout_ms));
                if (!wait_in_slices(timeout_ms,
                                    [&](TimeNs until) { return self.context->barrier_slice(epoch, until); }))
                    self.context->fail_barrier(epoch, timeout_ms);
            },
            "timeout_ms"_a, Release(),
            "All ranks have arrived, and what each sent to this rank before its barrier is here.\n"
            "Raises DeadlineError naming the ranks that have not arrived, PeerError.")
        .def(
            "wait_word",
            [](Self self, std::uint32_t region, std::uint64_t offset, std::uint64_t at_least, std::int64_t timeout_ms) {
                return wait_in_slices(timeout_ms, [&](TimeNs until) {
                    return self.context->word_slice(RegionId{region}, offset, at_least, until);
                });
            },
            "region"_a, "offset"_a, "at_least"_a, "timeout_ms"_a, Release(),
            "Wait until the 64-bit word of one of my regions is >= at_least; False when the deadline passed. Raises "
            "PeerError.")
        .def(
            "turn", [](Self self) { return self.context->turn(20'000); }, Release(),
            "One turn of at most 20 us if the token is free.")
        .def(
            "step_aside", [](Self self) { self.context->step_aside(); }, Release(),
            "A caller that has taken turns is about to sleep elsewhere: the progress thread takes over at once.")
        .def(
            "ring", [](Self self, std::uint32_t rank) { self.context->ring(rank); }, "rank"_a, Release(),
            "Ring a mapped rank's doorbell after storing into its memory.")
        .def(
            "doorbell_seen", [](Self self) { return self.context->doorbell().seen(); },
            "The count for doorbell_wait().")
        .def(
            "doorbell_wait",
            [](Self self, std::uint32_t seen, std::int64_t timeout_ms) {
                return wait_in_slices(timeout_ms,
                                      [&](TimeNs until) { return self.context->doorbell_slice(seen, until); });
            },
            "seen"_a, "timeout_ms"_a, Release(),
            "Sleep until my doorbell has rung since `seen`; False when the deadline passed.")
        .def(
            "watch_open", [](Self self) { return self.context->watch_open(); }, Release(),
            "A descriptor that becomes readable when something completed; for event loops. Ends with watch_close().")
        .def(
            "watch_close", [](Self self, int fd) { self.context->watch_close(fd); }, "fd"_a, Release(),
            "Close a watch. Idempotent.");
}

nb::dict capabilities_dict(const Capabilities& what) {
    nb::dict result;
    result["provider"] = what.provider;
    result["ordering"] = static_cast<int>(what.ordering);
    result["delivery_complete"] = what.delivery_complete;
    result["remote_atomics"] = what.remote_atomics;
    result["message_bytes_max"] = what.message_bytes_max;
    result["notification_bytes_max"] = what.notification_bytes_max;
    result["why"] = what.why;
    return result;
}

template <class Class>
void bind_low_latency_words(Class& cls) {
    using Self = const PyContext&;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def(
           "publish_low_latency",
           [](Self self, std::uint64_t call, const std::vector<std::uint64_t>& told) {
               self.context->publish_low_latency(call, told, true);
           },
           "call"_a, "told"_a, Release(), "What my pulse tells of low-latency calls, to each rank a word of its own.")
        .def(
            "low_latency_told", [](Self self, std::uint32_t rank) { return self.context->low_latency_told(rank); },
            "rank"_a, "The word of low-latency calls that this rank has for me, as last heard.");
}

template <class Class>
void bind_records(Class& cls) {
    using Self = const PyContext&;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    cls.def(
           "fault",
           [](Self self) -> std::optional<std::tuple<std::uint32_t, int, std::string>> {
               const auto fault = self.context->fault();
               if (!fault) return std::nullopt;
               return std::make_tuple(fault->rank, fault->told_by, fault->why);
           },
           Release(), "None, or (rank at fault, rank that told or -1, why): the first dead peer, root cause first.")
        .def(
            "fault_of",
            [](Self self, std::uint32_t rank) -> std::optional<std::tuple<std::uint32_t, std::string>> {
                const auto fault = self.context->fault_of(rank);
                if (!fault) return std::nullopt;
                return std::make_tuple(fault->rank, fault->why);
            },
            "rank"_a, Release(),
            "None, or (rank at fault, why) of what ends requests to that peer: the root cause among ranks of a job, "
            "its own death else.")
        .def(
            "pulse",
            [](Self self, std::uint32_t rank) {
                const auto pulse = self.context->pulse(rank);
                return std::make_tuple(pulse.heartbeat, pulse.call_sequence, pulse.phase, pulse.age_ns, pulse.leaving);
            },
            "rank"_a, Release(),
            "(heartbeats, call sequence, phase, ns since the last heartbeat, leaving) as last heard.")
        .def(
            "publish_call",
            [](Self self, std::uint64_t sequence, std::uint64_t phase) { self.context->publish_call(sequence, phase); },
            "sequence"_a, "phase"_a, Release(), "What my pulse tells the others about where I am.")
        .def(
            "publish_verdict",
            [](Self self, std::uint32_t rank) { self.context->publish_verdict(rank, runtime::now_ns() + tell_ns); },
            "rank"_a, Release(), "Tell every live peer whom I hold dead, before raising PeerError; takes <= 500 ms.")
        .def(
            "take_notifications",
            [](Self self) {
                std::vector<runtime::Notification> taken;
                {
                    nb::gil_scoped_release release;
                    taken = self.context->take_notifications();
                }
                nb::list result;
                for (const auto& item : taken)
                    result.append(nb::make_tuple(item.rank, nb::bytes(item.payload.data(), item.payload.size())));
                return result;
            },
            "list[(rank, bytes)] in order of arrival; each is given once.")
        .def(
            "statistics",
            [](Self self) {
                std::vector<std::pair<const char*, std::uint64_t>> rows;
                {
                    nb::gil_scoped_release release;
                    rows = self.context->statistics().rows();
                }
                nb::dict result;
                for (const auto& [name, value] : rows) result[name] = value;
                return result;
            },
            "dict[str, int] of counters, a snapshot; fabric.stats.Statistics gives them names and types.")
        .def_prop_ro(
            "capabilities", [](Self self) { return capabilities_dict(self.context->capabilities()); },
            "dict of what the provider promises (csrc/provider/capabilities.hpp).");
}

}  // namespace

Ticket submit_specs(Context& context, std::uint32_t rank, std::span<const ChunkSpec> chunks,
                    std::span<const ControlSpec> controls, bool delivered, std::int64_t timeout_ms,
                    runtime::Posting posting) {
    Engine::Submitted submitted{};
    const bool taken = wait_in_slices(timeout_ms, [&](TimeNs until) {
        submitted = context.submit(rank, chunks, controls, delivered ? Level::delivered : Level::local, until, posting);
        return submitted.status != Status::would_block;
    });
    if (!taken) context.fail_full(rank, timeout_ms);
    if (submitted.status != Status::ok) context.fail_submit(rank, submitted.status);
    return submitted.request;
}

}  // namespace bind

void bind_context(nb::module_& module) {
    using namespace bind;
    register_failures();
    bind_request(module);
    bind_prepared(module);
    module.def(
        "status_name", [](int status) { return std::string(runtime::status_name(static_cast<Status>(status))); },
        "status"_a, "The word for a status number.");
    module.def(
        "live_objects",
        [] {
            nb::dict counts;
            for (std::size_t i = 0; i < live_names.size(); ++i)
                counts[live_names[i]] = live_counts[i].load(std::memory_order_relaxed);
            return counts;
        },
        "dict[str, int]: how many objects of each kind are alive in this process; for tests.");
    using Release = nb::call_guard<nb::gil_scoped_release>;
    auto cls = nb::class_<PyContext>(module, "Context",
                                     "One transport instance: provider, engine, regions, peers, one progress thread.");
    cls.def(
        "__init__",
        [](PyContext* self, std::uint32_t rank, std::uint32_t size, const nb::dict& options) {
            const auto parsed = read_options(rank, size, options);
            nb::gil_scoped_release release;
            new (self) PyContext{std::make_shared<Context>(parsed)};
        },
        "rank"_a, "size"_a, "options"_a,
        "options (all optional): provider 'local' or libfabric's name, libraries list[str], source_address, domain,\n"
        "signal_path ('auto', 'atomic', 'message'), delivery_complete ('auto', '1', '0'), trust_order, "
        "trust_immediates, "
        "rendezvous,\n"
        "ordering ('auto', 'gated', 'counted'), max_outstanding, lanes, requests_max, counters, timeout_ms, "
        "hard_timeout_ms, heartbeat_ms, silence_ms, "
        "sync_writes,\n"
        "liveness ('auto', 'heartbeat'), endpoints, bulk_chunk_bytes, bulk_window, bulk_hold_us, operations_max, "
        "regions_max, remote_regions_max, notifications_max,\n"
        "independent (peers are no job: each numbers the others as it likes).\n"
        "Raises InvalidArgumentError, UnavailableError (no such provider here), CapacityError.");
    bind_regions(cls);
    bind_peers(cls);
    cls.def(
           "start", [](const PyContext& self) { self.context->start(); }, Release(), "Start the progress thread. Once.")
        .def(
            "close",
            [](const PyContext& self, std::int64_t timeout_ms) { self.context->close(deadline_after(timeout_ms)); },
            "timeout_ms"_a = 2000, Release(),
            "Drain for at most timeout_ms, tell the peers that this rank leaves, stop and release everything. "
            "Idempotent.")
        .def_prop_ro("rank", [](const PyContext& self) { return self.context->rank(); })
        .def_prop_ro("size", [](const PyContext& self) { return self.context->size(); })
        .def_prop_ro("closed", [](const PyContext& self) { return self.context->closed(); });
    bind_submissions(cls);
    bind_waits(cls);
    bind_records(cls);
    bind_low_latency_words(cls);
}

}  // namespace expertwire
