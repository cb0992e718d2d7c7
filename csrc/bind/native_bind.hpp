// The parts of `_native`; one file per Python class.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "provider/live_objects.hpp"
#include "runtime/clock.hpp"
#include "runtime/context.hpp"
#include "runtime/prepared_request.hpp"

namespace expertwire {

void bind_context(nanobind::module_& module);      // native_context.cpp; also registers Failure → expertwire.errors
void bind_provider(nanobind::module_& module);     // native_provider.cpp
void bind_exchange(nanobind::module_& module);     // native_exchange.cpp
void bind_low_latency(nanobind::module_& module);  // native_low_latency.cpp
void bind_liveness(nanobind::module_& module);     // native_liveness.cpp
void bind_token(nanobind::module_& module);        // native_token.cpp

namespace bind {

// What Python's `Context` holds; Exchange keeps a copy of the shared pointer, so that teardown may come in any order.
struct PyContext {
    std::shared_ptr<runtime::Context> context;
};

// What Python's `Request` holds: dropping it gives the handle up.
struct PyRequest {
    std::shared_ptr<runtime::Context> context;
    Ticket ticket;
    std::uint32_t rank = 0;
    std::atomic<bool> released{false};
    Counted<Live::request> counted;

    PyRequest(std::shared_ptr<runtime::Context> owner, Ticket request, std::uint32_t peer)
        : context(std::move(owner)), ticket(request), rank(peer) {}
    ~PyRequest() { release(); }
    void release() {
        if (!released.exchange(true)) context->release(ticket);
    }
};

void bind_peers(nanobind::class_<PyContext>& cls);  // native_peers.cpp

OpKind parse_kind(const std::string& kind);  // throws Failure

// Submits, waiting up to timeout_ms where the tables are full. Without the GIL. Throws Failure.
Ticket submit_specs(runtime::Context& context, std::uint32_t rank, std::span<const ChunkSpec> chunks,
                    std::span<const ControlSpec> controls, bool delivered, std::int64_t timeout_ms,
                    runtime::Posting posting = runtime::Posting::with_a_turn);

// native_batch.cpp
using OffsetArray =
    nanobind::ndarray<const std::uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
std::shared_ptr<PyRequest> submit_batch(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                        std::uint32_t local, std::uint32_t remote, std::uint64_t bytes,
                                        const OffsetArray& offsets, const OffsetArray& remote_offsets,
                                        std::uint32_t lane, std::int64_t timeout_ms);

using NumberArray =
    nanobind::ndarray<const std::uint32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Python's `PreparedRequest`.
struct PyPrepared {
    runtime::PreparedRequest request;
    Counted<Live::request> counted;

    PyPrepared(std::shared_ptr<runtime::Context> owner, runtime::PreparedChunks chunks)
        : request(std::move(owner), std::move(chunks)) {}
};
std::unique_ptr<PyPrepared> prepare_arrays(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                           const NumberArray& locals, const OffsetArray& offsets,
                                           const NumberArray& remotes, const OffsetArray& remote_offsets,
                                           const OffsetArray& bytes, std::uint32_t lane);
void bind_prepared(nanobind::module_& module);

// Raises the pending KeyboardInterrupt, if any. Takes the GIL: call it between wait slices (≤ 50 ms apart).
void check_signals();

constexpr TimeNs wait_slice_ns = 50'000'000;  // Ctrl-C is answered within 100 ms (SPEC T19)

inline TimeNs deadline_after(std::int64_t timeout_ms) {
    return runtime::now_ns() + static_cast<TimeNs>(std::max<std::int64_t>(timeout_ms, 0)) * 1'000'000;
}

// Runs `slice(until)` until it says that it is done; between slices looks for Ctrl-C. False: the deadline passed.
template <class Slice>
bool wait_in_slices(std::int64_t timeout_ms, Slice slice) {
    const TimeNs deadline = deadline_after(timeout_ms);
    while (true) {
        if (slice(std::min(deadline, runtime::now_ns() + wait_slice_ns))) return true;
        check_signals();
        if (runtime::now_ns() >= deadline) return false;
    }
}

// A warning to logger "expertwire.ep". Takes the GIL.
void log_stall(const std::string& text);

}  // namespace bind
}  // namespace expertwire
