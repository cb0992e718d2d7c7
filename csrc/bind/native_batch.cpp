// Many chunks in one call: what a chunk costs here is two numbers read from arrays, or five where each has its own
// regions and size.
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

std::shared_ptr<PyRequest> submit_arrays(const PyContext& self, std::uint32_t rank, const std::string& kind,
                                         const NumberArray& locals, const OffsetArray& offsets,
                                         const NumberArray& remotes, const OffsetArray& remote_offsets,
                                         const OffsetArray& bytes, const std::optional<nanobind::bytes>& notification,
                                         std::uint32_t lane, std::int64_t timeout_ms, bool later) {
    runtime::Context& context = *self.context;
    context.check_usable();
    const OpKind op = parse_kind(kind);
    const auto view = [](const auto& array) { return std::span(array.data(), array.shape(0)); };
    const runtime::ChunkArrays arrays{view(locals), view(offsets), view(remotes), view(remote_offsets), view(bytes)};
    std::span<const std::byte> payload;
    if (notification) payload = {static_cast<const std::byte*>(notification->data()), notification->size()};
    const nanobind::gil_scoped_release release;
    const std::vector<ChunkSpec> chunks = context.chunks(rank, op, arrays, lane);
    std::vector<ControlSpec> controls;
    if (notification) controls.push_back(context.notification(rank, payload, Scope::request, 0));
    return submit_specs(self, rank, chunks, controls, true, timeout_ms, later);
}

}  // namespace expertwire::bind
