// Many chunks in one call: what a chunk costs here is two numbers read from arrays, or five where each has its own
// regions and size.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <mutex>
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
    return submit_specs(self, rank, chunks, {}, true, timeout_ms);
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
    auto prepared = std::make_unique<PyPrepared>();
    prepared->context = self.context;
    prepared->chunks = context.prepare(rank, op, arrays, lane);
    return prepared;
}

namespace {

std::shared_ptr<PyRequest> submit_prepared(PyPrepared& self, const std::optional<nanobind::bytes>& notification,
                                           std::int64_t timeout_ms, bool later) {
    runtime::Context& context = *self.context;
    context.check_usable();
    std::span<const std::byte> payload;
    if (notification) payload = {static_cast<const std::byte*>(notification->data()), notification->size()};
    const nanobind::gil_scoped_release release;
    const std::lock_guard lock(self.mutex);
    context.renew(self.chunks);
    const PyContext owner{self.context};
    const runtime::Posting posting = later ? runtime::Posting::later : runtime::Posting::alone;
    if (!notification) return submit_specs(owner, self.chunks.rank, self.chunks.specs, {}, true, timeout_ms, posting);
    const ControlSpec control = context.notification(self.chunks.rank, payload, Scope::request, 0);
    return submit_specs(owner, self.chunks.rank, self.chunks.specs, {&control, 1}, true, timeout_ms, posting);
}

}  // namespace

void bind_prepared(nanobind::module_& module) {
    nanobind::class_<PyPrepared>(module, "PreparedRequest",
                                 "A request whose chunks have been checked, to be submitted as often as one likes.")
        .def("submit", &submit_prepared, nanobind::arg("notification").none(), nanobind::arg("timeout_ms"),
             nanobind::arg("later"),
             "Once more. notification: bytes or None, sent once all of it is there. later: nothing is posted by this "
             "call.\n"
             "Chunks are checked again where regions or peers have changed. Otherwise as Context.submit().");
}

}  // namespace expertwire::bind
