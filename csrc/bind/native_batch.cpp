// Many chunks in one call: what a chunk costs here is two numbers read from arrays, or five where each has its own
// regions and size.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <sched.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind/native_bind.hpp"
#include "runtime/failure.hpp"

namespace expertwire::bind {

std::shared_ptr<PyRequest> submit_batch(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                        std::uint32_t local, std::uint32_t remote, std::uint64_t bytes,
                                        const OffsetArray& offsets, const OffsetArray& remote_offsets,
                                        std::uint32_t lane, std::int64_t timeout_ms) {
    runtime::Context& context = *self.context;
    context.check_usable();
    const OpKind op = parse_kind(kind);
    const std::span<const std::uint64_t> from(offsets.data(), offsets.shape(0));
    const std::span<const std::uint64_t> to(remote_offsets.data(), remote_offsets.shape(0));
    const nanobind::gil_scoped_release release;
    const std::vector<ChunkSpec> chunks =
        context.chunks(rank, op, RegionId{local}, from, RemoteRegionId{remote}, to, bytes, lane);
    const Ticket ticket = submit_specs(context, rank, chunks, {}, true, timeout_ms);
    return std::make_shared<PyRequest>(self.context, ticket, rank);
}

std::unique_ptr<PyPrepared> prepare_arrays(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                           const NumberArray& locals, const OffsetArray& offsets,
                                           const NumberArray& remotes, const OffsetArray& remote_offsets,
                                           const OffsetArray& bytes, std::uint32_t lane) {
    runtime::Context& context = *self.context;
    context.check_usable();
    const OpKind op = parse_kind(kind);
    const auto view = [](const auto& array) { return std::span(array.data(), array.shape(0)); };
    const runtime::ChunkArrays arrays{view(locals), view(offsets), view(remotes), view(remote_offsets), view(bytes)};
    const nanobind::gil_scoped_release release;
    return std::make_unique<PyPrepared>(self.context, context.prepare(rank, op, arrays, lane));
}

namespace {

// Nothing: it is on its way, or was released.
std::optional<int> prepared_submit(PyPrepared& self, const std::optional<nanobind::bytes>& notification,
                                   std::int64_t timeout_ms, bool later) {
    runtime::PreparedRequest& request = self.request;
    runtime::Context& context = request.context();
    context.check_usable();
    std::span<const std::byte> payload;
    if (notification) payload = {static_cast<const std::byte*>(notification->data()), notification->size()};
    const nanobind::gil_scoped_release release;
    if (!request.begin()) return std::nullopt;
    try {
        const runtime::PreparedChunks& chunks = request.chunks();
        ControlSpec control;
        if (notification) control = context.notification(chunks.rank, payload, Scope::request, 0);
        const std::span<const ControlSpec> controls(&control, notification ? 1 : 0);
        request.took(submit_specs(context, chunks.rank, chunks.specs, controls, true, timeout_ms,
                                  later ? runtime::Posting::later : runtime::Posting::alone));
    } catch (...) {
        request.refused();
        throw;
    }
    return request.status();
}

int prepared_turn(PyPrepared& self) {
    runtime::Context& context = self.request.context();
    if (context.forked()) context.check_usable();
    if (const int status = self.request.status(); status != static_cast<int>(Status::pending)) return status;
    const nanobind::gil_scoped_release release;
    if (const std::optional<Ticket> ticket = self.request.under_way()) context.turn_for(*ticket, 20'000);
    return self.request.status();
}

int prepared_wait(PyPrepared& self, std::int64_t timeout_ms) {
    runtime::Context& context = self.request.context();
    context.check_usable();
    const auto pending = [&] { return self.request.status() == static_cast<int>(Status::pending); };
    wait_in_slices(timeout_ms, [&](TimeNs until) {
        if (const std::optional<Ticket> ticket = self.request.under_way())
            context.wait_slice(*ticket, until);
        else if (pending())
            sched_yield();  // another thread is about to have submitted it
        return !pending();
    });
    if (const std::optional<Ticket> ticket = self.request.under_way()) context.mark_stalled(*ticket);
    return self.request.status();
}

}  // namespace

void bind_prepared(nanobind::module_& module) {
    namespace nb = nanobind;
    using Release = nb::call_guard<nb::gil_scoped_release>;
    using Self = PyPrepared&;
    nb::class_<PyPrepared>(module, "PreparedRequest",
                           "A request whose chunks have been checked, submitted as often as one likes, one at a time.\n"
                           "Dropping it gives the handle up, never the memory it still uses.")
        .def("submit", &prepared_submit, nb::arg("notification").none(), nb::arg("timeout_ms"), nb::arg("later"),
             "Once more; status(), or None where it is on its way or was released. notification: bytes or None, sent "
             "once all\n"
             "of it is there. later: nothing is posted by this call. Chunks are checked again where regions or peers "
             "have\n"
             "changed. Otherwise as Context.submit().")
        .def(
            "status", [](Self self) { return self.request.status(); },
            "0 ok, 1 pending, -1 never submitted, -2 released, else the number of its failure (Context.status_name).")
        .def("turn", &prepared_turn, "Help the engine for at most 20 us if nobody does, then status().")
        .def("wait", &prepared_wait, nb::arg("timeout_ms"), Release(),
             "status() once it has ended, or 1 when the deadline passed: it then still owns its memory.")
        .def(
            "cancel",
            [](Self self) {
                self.request.context().check_usable();
                if (const std::optional<Ticket> ticket = self.request.under_way())
                    self.request.context().cancel(*ticket);
            },
            Release(), "Of what is on its way, where nothing of it was posted; else nothing.")
        .def(
            "release", [](Self self) { return self.request.release(); }, Release(),
            "It will not be submitted again. False: it is on its way.")
        .def_prop_ro(
            "code", [](Self self) { return self.request.code(); }, "The provider's number behind its failure, or 0.")
        .def_prop_ro(
            "times",
            [](Self self) {
                const runtime::PreparedRequest::Times times = self.request.times();
                return std::make_tuple(times.posted_ns, times.post_ns, times.wall_ns, times.ended_ns);
            },
            "In ns: when its submission began (CLOCK_MONOTONIC), how long that took, the same of CLOCK_REALTIME, and "
            "when its\n"
            "end was seen (0: not yet).");
}

}  // namespace expertwire::bind
